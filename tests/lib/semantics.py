"""What four loops compute, as plain Python: the reference pages show these functions, and the tests compare with them.

`tests/docs/test_semantics.py` holds the verbs to them, values and gradients. They are written for arrays, `[T, B]` if
there are rows. A verb does the same for each leaf of a pytree, and runs the rows together.
"""

import jax
import jax.numpy as jnp


# --8<-- [start:mask_scan]
def mask_scan(f, init, xs, mask, fill=0.0, reverse=False):
    carry, ys = list(init), jnp.full(mask.shape, fill)
    steps, rows = mask.shape
    for b in range(rows):  # each row alone
        for t in range(steps)[::-1] if reverse else range(steps):
            if mask[t, b]:  # padding is never read
                carry[b], y = f(carry[b], xs[t, b])
                ys = ys.at[t, b].set(y)
    return jnp.stack(carry), ys


# --8<-- [end:mask_scan]


# --8<-- [start:resets]
def resets_of_a_row(f, init, xs, resets, reset_to, reverse=False):
    carry, ys, ended = init, jnp.zeros(len(xs)), False
    for t in range(len(xs))[::-1] if reverse else range(len(xs)):
        begins = ended if reverse else resets[t]
        carry, y = f(reset_to if begins else carry, xs[t])
        ys = ys.at[t].set(y)
        ended = resets[t]  # in reverse, a segment ends at its flag
    return carry, ys


# --8<-- [end:resets]


# --8<-- [start:while_scan]
def while_scan(cond, f, init, xs, max_length, fill=0.0, reverse=False):
    carry, ys, steps = init, jnp.full(max_length, fill), 0
    for t in range(max_length)[::-1] if reverse else range(max_length):
        if not cond(carry):
            break
        carry, y = f(carry, xs[t])
        ys, steps = ys.at[t].set(y), steps + 1
    return carry, ys, steps, not cond(carry)


def while_scan_of_rows(cond, f, init, xs, max_length, **options):
    rows = [
        while_scan(cond, f, init[b], xs[:, b], max_length, **options)
        for b in range(len(init))  # each row alone
    ]
    carry, ys, steps, stopped = map(jnp.array, zip(*rows, strict=True))
    return carry, ys.T, steps, stopped


# --8<-- [end:while_scan]


# --8<-- [start:scan_layers]
def scan_layers(block, x, layers, xs, state, args=(), reverse=False):
    n = len(layers)  # a list of layers: the verb takes stack(layers)
    state, ys = list(state), [None] * n
    for i in range(n)[::-1] if reverse else range(n):
        x, state[i], ys[i] = block(layers[i], x, xs[i], state[i], *args)
    return x, stack(state), stack(ys)


def stack(items):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)


# --8<-- [end:scan_layers]
