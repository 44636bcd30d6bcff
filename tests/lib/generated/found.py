"""Programs that found a mistake once, each made small, by what was wrong. `make fuzz` adds those that it finds."""

from .programs import Instruction, Leaf, Program, Type, Value

FOUND: dict[str, Program] = {}

FOUND["Closed-over arrays that are bad for an element without steps: NaN gradients of vmap."] = Program(
    (),
    "float64",
    9,
    (Leaf(Value("h0", Type(True, (3,)))),),
    (Leaf(Value("x0", Type(True, (3,)))),),
    (Leaf(Value("w0", Type(False, (3,), positive=True)), axis=None),),
    (
        Instruction(Value("v0", Type(True, (3,))), "{0} / {1}", ("x0", "w0")),
        Instruction(Value("v1", Type(True, (3,))), "jnp.tanh({0} + {1})", ("h0", "v0")),
    ),
    ("v1",),
    (),
    mode=("vjp",),
    outer=3,
    padding="zero",
    seed=3,
)

FOUND["The gradient of complex products: reduce_precision does not accept complex64."] = Program(
    (),
    "float64",
    9,
    (Leaf(Value("h0", Type(True, (3,), kind="c"))),),
    (Leaf(Value("x0", Type(True, (3,), kind="c"))),),
    (Leaf(Value("w0", Type(False, (3, 3), kind="c")), axis=None),),
    (
        Instruction(Value("v0", Type(True, (3,), kind="c")), "{0} @ {1}", ("h0", "w0")),
        Instruction(Value("v1", Type(True, (3,), kind="c")), "jnp.sin(0.3 * {0}) + {1}", ("v0", "x0")),
    ),
    ("v1",),
    (),
    options=(("chunk", "3"),),
    mode=("vjp",),
)

FOUND["A cond that reads weights, under vmap: no transpose rule of stop_gradient."] = Program(
    (),
    "float64",
    9,
    (Leaf(Value("h0", Type(True, (3,)))),),
    (Leaf(Value("x0", Type(True, (3,)))),),
    (Leaf(Value("w0", Type(False, (3,))), axis=None),),
    (
        Instruction(
            Value("v0", Type(True, (3,))),
            "jax.lax.cond(jnp.sum({0}) > 0.1, lambda a: jnp.tanh(a + {1}), lambda a: a, {0})",
            ("h0", "w0"),
        ),
        Instruction(Value("v1", Type(True, (3,))), "jnp.tanh({0} + {1})", ("x0", "v0")),
    ),
    ("v1",),
    (),
    mode=("vjp",),
    outer=2,
)

FOUND["Resets and lengths under vmap, NaN in the padding: a carry that was NaN (mode value, no derivative)."] = Program(
    (),
    "float64",
    11,
    (
        Leaf(Value("h0", Type(True, (2,)))),
        Leaf(Value("h1", Type(True, (1,))), mapped=False),
        Leaf(Value("h2", Type(True, (2, 2))), axis=2),
    ),
    (Leaf(Value("x0", Type(True, (1,)))), Leaf(Value("x1", Type(True, ())))),
    (
        Leaf(Value("w0", Type(False, (2,), kind="c")), axis=None, mapped=False),
        Leaf(Value("w1", Type(False, (2,), positive=True)), axis=None),
        Leaf(Value("w2", Type(False, (2,), positive=True)), axis=None),
    ),
    (
        Instruction(Value("v0", Type(True, (2,))), "{0} * {1}", ("x1", "w2"), op="scalar_add"),
        Instruction(Value("v1", Type(True, (2,))), "{0} * {1}", ("x1", "v0"), op="scalar_add"),
        Instruction(Value("v2", Type(True, ())), "0.5 * jnp.einsum('...ij,...ij->...', {0}, {1})", ("h2", "h2")),
        Instruction(
            Value("v3", Type(True, (2,))),
            "jax.lax.conv_general_dilated({0}.reshape((-1, 1, 2)), {1}.reshape((1, 1, 2)), (1,), 'SAME').reshape({0}.shape)",
            ("v0", "w1"),
            op="convolve",
        ),
        Instruction(Value("v4", Type(True, (2,))), "{0} + 0.5 * {1}", ("v1", "v3")),
        Instruction(Value("v5", Type(True, (2,))), "{0} + {1}", ("v4", "v2")),
        Instruction(Value("v6", Type(True, (2,))), "{1} - {0}", ("v5", "v4")),
        Instruction(Value("v7", Type(True, (2,))), "jnp.tanh({0})", ("v6",)),
        Instruction(Value("v8", Type(True, ())), "jnp.sum({0}, axis=(-1,))", ("v7",)),
        Instruction(Value("v9", Type(True, (1,))), "{0} + {1}", ("x0", "v8")),
        Instruction(Value("v10", Type(True, (1,))), "jnp.tanh({0})", ("v9",)),
        Instruction(Value("v11", Type(True, ())), "jnp.sum({0}, axis=(-1,))", ("v10",)),
        Instruction(Value("v12", Type(True, (2, 2))), "{0} + 0.5 * {1}", ("h2", "v11")),
        Instruction(Value("v13", Type(True, (2, 2))), "jnp.tanh({0})", ("v12",)),
    ),
    ("v7", "v10", "v13"),
    (Leaf(Value("v13", Type(True, (2, 2)))),),
    flags="lengths+resets",
    fill=(-1,),
    save=("all",),
    mode=("value",),
    outer=2,
    seed=149,
)

FOUND["A product of rank 0, added to an array, crashed in JAX's words."] = Program(
    (),
    "float64",
    9,
    (Leaf(Value("h0", Type(True, (3,)))),),
    (Leaf(Value("x0", Type(True, (3,)))),),
    (Leaf(Value("w0", Type(False, (3,))), axis=None), Leaf(Value("w1", Type(False, (3, 3))), axis=None)),
    (
        Instruction(Value("v0", Type(True, ())), "{0} @ {1}", ("w0", "h0")),
        Instruction(Value("v1", Type(True, (3,))), "{0} @ {1}", ("w1", "h0")),
        Instruction(Value("v2", Type(True, (3,))), "jnp.tanh({0} + {1} + {2})", ("v0", "v1", "x0")),
    ),
    ("v2",),
    (),
    options=(("chunk", "4"),),
)

FOUND["A product of rank 0, added to an array as long as a chunk: a wrong gradient."] = FOUND[
    "A product of rank 0, added to an array, crashed in JAX's words."
].replace(options=(("chunk", "3"),))
