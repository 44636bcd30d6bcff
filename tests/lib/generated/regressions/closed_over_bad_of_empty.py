"""Closed-over arrays that are bad for an element without steps: NaN gradients of vmap."""

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


def make_body(w0):
    def body(carry, x):
        (h0,) = carry
        (x0,) = x
        v0 = x0 / w0
        v1 = jnp.tanh(h0 + v0)
        return (v1,), ()
    return body


def make_init(init):
    return (init[0],)


def run(init, xs, ws, flags):
    body = make_body(*ws)
    final, ys = treescan.mask_scan(body, (init[0],), (xs[0],), lengths=flags[0])
    return jax.tree.leaves(final), []
"""

PROGRAM = Program(
    batch=(),
    dtype="float64",
    steps=9,
    carry=(
        Leaf(
            value=Value(name="h0", type=Type(rows=True, shape=(3,), kind="f", positive=False)),
            axis=0,
            custom="",
            whole=False,
            fixed=False,
            time=0,
            mapped=True,
        ),
    ),
    xs=(
        Leaf(
            value=Value(name="x0", type=Type(rows=True, shape=(3,), kind="f", positive=False)),
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
            value=Value(name="w0", type=Type(rows=False, shape=(3,), kind="f", positive=True)),
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
            value=Value(name="v0", type=Type(rows=True, shape=(3,), kind="f", positive=False)),
            text="{0} / {1}",
            reads=("x0", "w0"),
            op="",
        ),
        Instruction(
            value=Value(name="v1", type=Type(rows=True, shape=(3,), kind="f", positive=False)),
            text="jnp.tanh({0} + {1})",
            reads=("h0", "v0"),
            op="",
        ),
    ),
    nxt=("v1",),
    ys=(),
    verb="mask_scan",
    flags="lengths",
    options=(),
    fill=(),
    save=(),
    mode=("vjp",),
    outer=3,
    context="jit",
    padding="zero",
    keyed=False,
    valid=False,
    seed=3,
)

if __name__ == "__main__":
    import jax
    from generated.compare import check

    jax.config.update("jax_enable_x64", True)
    print(check(PROGRAM), "sets of arrays and masks are equal to the plain loop")
