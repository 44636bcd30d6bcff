"""Programs that found a mistake once, each made small, by what was wrong. `make fuzz` adds those that it finds.

What can be told in a few lines of Python has a test of its own, in `test_rewriting.py`.
"""

from .programs import Instruction, Leaf, Program, Type, Value

FOUND: dict[str, Program] = {}

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
