"""Resets and lengths under vmap, NaN in the padding: a carry that was NaN (mode value, no derivative)."""

from generated.programs import Instruction, Leaf, Program, Type, Value

SOURCE = """
@jax.custom_jvp
def own_product(a, b):
    return a @ b


own_product.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))


@jax.custom_vjp
def own_product_vjp(a, b):
    return a @ b


own_product_vjp.defvjp(lambda a, b: jax.vjp(jnp.matmul, a, b), lambda pull, t: pull(t))


def make_body(w0, w1, w2):
    def body(carry, x):
        (h0, h1, h2_) = carry
        (x0, x1) = x
        h2 = jnp.moveaxis(h2_, (), ())
        v0 = x1 * w2
        v1 = x1 * v0
        v2 = 0.5 * jnp.einsum('...ij,...ij->...', h2, h2)
        v3 = jax.lax.conv_general_dilated(v0.reshape((-1, 1, 2)), w1.reshape((1, 1, 2)), (1,), 'SAME').reshape(v0.shape)
        v4 = v1 + 0.5 * v3
        v5 = v4 + v2
        v6 = v4 - v5
        v7 = jnp.tanh(v6)
        v8 = jnp.sum(v7, axis=(-1,))
        v9 = x0 + v8
        v10 = jnp.tanh(v9)
        v11 = jnp.sum(v10, axis=(-1,))
        v12 = h2 + 0.5 * v11
        v13 = jnp.tanh(v12)
        return (v7, v10, jnp.moveaxis(v13, (), ())), (v13,)
    return body


def make_init(init):
    return (init[0], init[1], init[2])


def run(init, xs, ws, flags):
    body = make_body(*ws)
    final, ys = treescan.mask_scan(body, (init[0], init[1], init[2]), (xs[0], xs[1]), carry_axes=(0, 0, 2), lengths=flags[0], resets=flags[1], fill=-1)
    return jax.tree.leaves(final), [ys[0]]
"""

PROGRAM = Program(
    batch=(),
    dtype="float64",
    steps=11,
    carry=(
        Leaf(
            value=Value(name="h0", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            axis=0,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
        Leaf(
            value=Value(name="h1", type=Type(rows=True, shape=(1,), kind="f", positive=False)),
            axis=0,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=False,
        ),
        Leaf(
            value=Value(name="h2", type=Type(rows=True, shape=(2, 2), kind="f", positive=False)),
            axis=2,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
    ),
    xs=(
        Leaf(
            value=Value(name="x0", type=Type(rows=True, shape=(1,), kind="f", positive=False)),
            axis=0,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
        Leaf(
            value=Value(name="x1", type=Type(rows=True, shape=(), kind="f", positive=False)),
            axis=0,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
    ),
    weights=(
        Leaf(
            value=Value(name="w0", type=Type(rows=False, shape=(2,), kind="c", positive=False)),
            axis=None,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=False,
        ),
        Leaf(
            value=Value(name="w1", type=Type(rows=False, shape=(2,), kind="f", positive=True)),
            axis=None,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
        Leaf(
            value=Value(name="w2", type=Type(rows=False, shape=(2,), kind="f", positive=True)),
            axis=None,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
    ),
    body=(
        Instruction(
            value=Value(name="v0", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            text="{0} * {1}",
            reads=("x1", "w2"),
            op="scalar_add",
        ),
        Instruction(
            value=Value(name="v1", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            text="{0} * {1}",
            reads=("x1", "v0"),
            op="scalar_add",
        ),
        Instruction(
            value=Value(name="v2", type=Type(rows=True, shape=(), kind="f", positive=False)),
            text="0.5 * jnp.einsum('...ij,...ij->...', {0}, {1})",
            reads=("h2", "h2"),
            op="",
        ),
        Instruction(
            value=Value(name="v3", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            text="jax.lax.conv_general_dilated({0}.reshape((-1, 1, 2)), {1}.reshape((1, 1, 2)), (1,), 'SAME').reshape({0}.shape)",
            reads=("v0", "w1"),
            op="convolve",
        ),
        Instruction(
            value=Value(name="v4", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            text="{0} + 0.5 * {1}",
            reads=("v1", "v3"),
            op="",
        ),
        Instruction(
            value=Value(name="v5", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            text="{0} + {1}",
            reads=("v4", "v2"),
            op="",
        ),
        Instruction(
            value=Value(name="v6", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            text="{1} - {0}",
            reads=("v5", "v4"),
            op="",
        ),
        Instruction(
            value=Value(name="v7", type=Type(rows=True, shape=(2,), kind="f", positive=False)),
            text="jnp.tanh({0})",
            reads=("v6",),
            op="",
        ),
        Instruction(
            value=Value(name="v8", type=Type(rows=True, shape=(), kind="f", positive=False)),
            text="jnp.sum({0}, axis=(-1,))",
            reads=("v7",),
            op="",
        ),
        Instruction(
            value=Value(name="v9", type=Type(rows=True, shape=(1,), kind="f", positive=False)),
            text="{0} + {1}",
            reads=("x0", "v8"),
            op="",
        ),
        Instruction(
            value=Value(name="v10", type=Type(rows=True, shape=(1,), kind="f", positive=False)),
            text="jnp.tanh({0})",
            reads=("v9",),
            op="",
        ),
        Instruction(
            value=Value(name="v11", type=Type(rows=True, shape=(), kind="f", positive=False)),
            text="jnp.sum({0}, axis=(-1,))",
            reads=("v10",),
            op="",
        ),
        Instruction(
            value=Value(name="v12", type=Type(rows=True, shape=(2, 2), kind="f", positive=False)),
            text="{0} + 0.5 * {1}",
            reads=("h2", "v11"),
            op="",
        ),
        Instruction(
            value=Value(name="v13", type=Type(rows=True, shape=(2, 2), kind="f", positive=False)),
            text="jnp.tanh({0})",
            reads=("v12",),
            op="",
        ),
    ),
    nxt=("v7", "v10", "v13"),
    ys=(
        Leaf(
            value=Value(name="v13", type=Type(rows=True, shape=(2, 2), kind="f", positive=False)),
            axis=0,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
    ),
    verb="mask_scan",
    flags="lengths+resets",
    options=(),
    fill=(-1,),
    save=("all",),
    mode=("value",),
    outer=2,
    context="jit",
    padding="nan",
    keyed=False,
    valid=False,
    seed=149,
)

if __name__ == "__main__":
    import jax
    from generated.compare import check

    jax.config.update("jax_enable_x64", True)
    print(check(PROGRAM), "sets of arrays and masks are equal to the plain loop")
