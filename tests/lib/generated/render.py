"""A program as Python: the body in straight lines, and `run`, which calls the verb."""

from __future__ import annotations

from typing import Any

from .programs import Leaf, Program

PRELUDE = """\
import jax
import jax.numpy as jnp
import treescan
from treescan.carries import cast, clip_gradient, ema, stop_gradient, running_sum, window

dtype = jnp.{dtype}
optimization_barrier = jax.lax.optimization_barrier


@jax.custom_jvp
def own_jvp(a):
    return jnp.tanh(a)


own_jvp.defjvp(lambda a, t: (own_jvp(*a), (1 - own_jvp(*a) ** 2) * t[0]))


@jax.custom_vjp
def own_vjp(a):
    return jnp.sin(a)


own_vjp.defvjp(lambda a: (jnp.sin(a), a), lambda a, t: (t * jnp.cos(a),))


def halved(a):
    # In a loop that goes on where padding is infinite, and then makes all rows NaN.
    going = lambda s: jnp.any(jnp.abs(s[0]) > 1) & (s[1] < 5000)
    step = lambda s: (jnp.where(jnp.abs(s[0]) > 1, s[0] / 2, s[0]), s[1] + 1)
    a, steps = jax.lax.while_loop(going, step, (jax.lax.stop_gradient(a), 0))
    return jnp.where(steps < 5000, a, jnp.nan)


def in_turns(steps, parts):
    whole = jnp.zeros((steps, *parts[0].shape[1:]), parts[0].dtype)
    for i, part in enumerate(parts):
        whole = whole.at[i :: len(parts)].set(part)
    return whole


SEEN = []


def observed(a):
    # An effect that notes what it is shown.
    jax.debug.callback(lambda a: SEEN.append(bool(jnp.isfinite(a).all())), a)
    return a


@jax.custom_vjp
def own_vjp_of_two(a, b):
    return jnp.sin(a) * b


own_vjp_of_two.defvjp(lambda a, b: jax.vjp(lambda a, b: jnp.sin(a) * b, a, b), lambda pull, t: pull(t))


@jax.custom_jvp
def own_product(a, b):
    return a @ b


own_product.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))


@jax.custom_vjp
def own_product_vjp(a, b):
    return a @ b


own_product_vjp.defvjp(lambda a, b: jax.vjp(jnp.matmul, a, b), lambda pull, t: pull(t))
"""

CUSTOM = {
    "ema": "ema({}, 0.7, shared=False)",
    "running_sum": "running_sum({}, shared=False)",
    "window": "window({})",
    "cast": "cast({})",
    "clip": "clip_gradient({}, 0.3)",
    "stop": "stop_gradient({})",
}


def tuple_of(items: Any) -> str:
    items = list(items)
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"


def _axes(start: int, batch: int) -> tuple[int, ...]:
    return tuple(range(start, start + batch))


def raw(leaf: Leaf) -> str:
    """The leaf as the body is given it."""
    return f"{leaf.name}_" if leaf.axis else leaf.name


def body_lines(program: Program) -> list[str]:
    n = len(program.batch)
    keywords = [name for name in ("key", "valid") if getattr(program, {"key": "keyed", "valid": "valid"}[name])]
    lines = [f"def body(carry, x{', *, ' + ', '.join(keywords) if keywords else ''}):"]
    lines += [f"    {tuple_of(raw(leaf) for leaf in leaves)} = {name}"
              for name, leaves in (("carry", program.carry), ("x", program.xs)) if leaves]  # fmt: skip
    for leaf in (*program.carry, *program.xs):
        if leaf.axis:
            lines.append(f"    {leaf.name} = jnp.moveaxis({raw(leaf)}, {_axes(leaf.axis, n)}, {_axes(0, n)})")
    lines += [f"    {instruction.line()}" for instruction in program.body]
    new = [
        raw(leaf)
        if leaf.fixed
        else f"jnp.moveaxis({name}, {_axes(0, n)}, {_axes(leaf.axis, n)})"
        if leaf.axis
        else name
        for leaf, name in zip(program.carry, program.nxt, strict=True)
    ]
    ys = [f"jnp.moveaxis({y.name}, {_axes(0, n)}, {_axes(y.axis, n)})" if y.axis else y.name for y in program.ys]
    return [*lines, f"    return {tuple_of(new)}, {tuple_of(ys)}"]


def _prefix(values: list[Any]) -> str:
    return "(" + ", ".join(map(repr, values)) + ("," if len(values) == 1 else "") + ")"


def _named(**texts: str) -> str:
    return f"dict({', '.join(f'{name}={text}' for name, text in texts.items())})"


def call_options(program: Program) -> list[str]:
    options = dict(program.options)
    verb = program.verb
    into = out = ""
    first = options.get("time_axis") == "1"
    if any(x.whole or x.time != int(first) for x in program.xs):
        axes = [None if x.whole else x.time for x in program.xs]
        into = _prefix(axes) if axes[1:] != axes[:-1] or None in axes else repr(axes[0])
    given = [0 if keep is None else y.time for y, keep in zip(program.ys, program.save, strict=True)]
    if any(time != int(first) for time in given):
        out = _prefix(given) if given[1:] != given[:-1] else repr(given[0])
    if verb == "mask_scan" and into + out:
        first_or_second = str(int(first))
        options["time_axis"] = _named(xs=into or first_or_second, ys=out or first_or_second, mask=first_or_second)
    else:
        options |= {name: text for name, text in (("in_axes", into), ("out_axes", out)) if text}
    if program.by_rows or program.flags == "lengths":
        rows = {}
        if any(leaf.axis != 0 for leaf in program.carry):
            rows["carry"] = _prefix([leaf.axis for leaf in program.carry])
        if any(leaf.axis != 0 or leaf.whole for leaf in program.xs):
            rows["x"] = _prefix([leaf.axis for leaf in program.xs])
        if any(leaf.axis != 0 for leaf in program.ys):
            rows["y"] = _prefix([leaf.axis for leaf in program.ys])
        options |= {"row_axes": _named(**rows)} if rows else {}
        flags = program.flags.split("+")
        for i, name in enumerate([] if verb == "while_scan" else flags):
            text = f"flags[{i}]"
            options[name] = f"jnp.moveaxis({text}, 0, 1)" if first and name != "lengths" else text
    if program.reset_to:
        half = [f"c[{i}]" + (" / 2" if leaf.type.rows and leaf.type.kind in "fc" else "")
                for i, leaf in enumerate(program.carry)]  # fmt: skip
        options["reset_to"] = f"lambda c: {tuple_of(half)}"
    if any(keep != "all" for keep in program.save):
        options["save"] = _prefix(list(program.save))
    if any(fill != 0 for fill in program.fill):
        same = len(set(map(repr, program.fill))) == 1
        options["fill"] = repr(program.fill[0]) if same else _prefix(list(program.fill))
    if program.keyed:
        options["key"] = "jax.random.key(7)"
    if verb == "while_scan":
        options["max_length"] = str(program.steps)
    elif verb in ("scan", "mask_scan", "fold", "accumulate") and all(x.whole for x in program.xs):
        options["length"] = str(program.steps)
    return [f"{name}={value}" for name, value in options.items()]


def _blocks(program: Program, block: str) -> str:
    if program.period == 1:
        return block
    return f"[{block}] * {program.period}" if program.seed % 2 else f"[{', '.join([block] * program.period)}]"


def _turns(program: Program, layers: str) -> str:
    """The stacks of the blocks of a pattern, of which the last ones may be a layer shorter, or empty."""
    places = range(program.period)
    return (
        f"[jax.tree.map(lambda x: x[i::{program.period}], {layers}) for i in {list(places)}]" if places[1:] else layers
    )


def run_lines(program: Program) -> list[str]:
    init = tuple_of(CUSTOM.get(leaf.custom, "{}").format(f"init[{i}]") for i, leaf in enumerate(program.carry))
    xs = tuple_of(f"jnp.moveaxis(xs[{i}], 0, {x.time})" if x.time else f"xs[{i}]" for i, x in enumerate(program.xs))
    verb, rest = program.verb, ", ".join(["", *call_options(program)])
    layers = "{" + ", ".join(f"'{x.name}': xs[{i}]" for i, x in enumerate(program.xs)) + "}"
    block = "lambda layer, c: body(c, tuple(layer.values()))"
    calls = {
        "fold": f"treescan.fold(lambda c, x: body(c, x)[0], {init}, {xs}{rest})",
        "accumulate": f"treescan.accumulate(lambda c, x: body(c, x)[0], {init}, {xs}{rest})",
        "fori": f"treescan.fori(0, {program.steps}, lambda i, c: body(c, (i,))[0], {init}{rest})",
        "scan_layers": f"treescan.scan_layers({_blocks(program, block)}, {init}, {_turns(program, layers)}{rest})",
        "fold_layers": f"treescan.fold_layers({_blocks(program, f'{block}[0]')}, {init}, {_turns(program, layers)}{rest})",
        "while_scan": f"treescan.while_scan(lambda c: c[-1] < {'0' if program.by_rows else 'flags[0]'}, body, {init}, {xs}{rest})[:2]",
    }
    call = calls.get(verb, f"treescan.{verb}(body, {init}, {xs}{rest})")
    lines = ["def run(init, xs, ws, flags):", "    body = make_body(*ws)"]
    if verb == "accumulate":
        lines += [f"    ys = {call}", "    return [], jax.tree.leaves(ys)"]
    elif verb in ("fold", "fori", "fold_layers"):
        lines += [f"    final = {call}", "    return jax.tree.leaves(final), []"]
    else:
        kept = [f"jnp.moveaxis(ys[{i}], {y.time}, 0)" if y.time else f"ys[{i}]"
                for i, (y, keep) in enumerate(zip(program.ys, program.save, strict=True)) if keep is not None]  # fmt: skip
        lines += [f"    final, ys = {call}"]
        if program.period > 1:
            lines += [f"    ys = tuple(in_turns({program.steps}, parts) for parts in zip(*ys, strict=True))"]
        lines += [f"    return jax.tree.leaves(final), [{', '.join(kept)}]"]
    return lines


def source(program: Program) -> str:
    """A module with `make_body`, `make_init` and `run`."""
    weights = ", ".join(leaf.name for leaf in program.weights)
    init = tuple_of(CUSTOM.get(leaf.custom, "{}").format(f"init[{i}]") for i, leaf in enumerate(program.carry))
    lines = [f"def make_body({weights}):", *(f"    {line}" for line in body_lines(program)), "    return body", "", ""]
    lines += ["def make_init(init):", f"    return {init}", "", "", *run_lines(program)]
    return PRELUDE.format(dtype=program.dtype) + "\n\n" + "\n".join(lines) + "\n"
