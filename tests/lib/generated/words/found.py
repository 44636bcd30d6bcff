"""Programs that found a mistake once, each made small, by what was wrong. `python -m generated.words` adds to them."""

from .programs import Program

KINDS = {
    "a mapped axis is read where no argument is mapped: wrong numbers, silently": [
        Program("decaying", ("axis_index",), "mask_scan", (), ("grad", "vmap none")),
        Program("decaying", ("axis_index",), "while_scan", (), ("grad h", "vmap none")),
    ],
    "a mapped axis within what is staged, differentiated from outside: an unbound axis name": [
        Program("decaying", ("psum",), "mask_scan", (), ("grad h", "jit", "vmap h")),
    ],
    "the slot of an option is taken for the mask: NaN in padding": [
        Program("decaying", ("valid",), "mask_scan", ("Unread",), ("jit",), nan=True),
    ],
    "what may not branch in an untyped shard_map runs nothing: a gradient of 0": [
        Program("elementwise", (), "while_scan", ("remat=chunk",), ("jit", "shard_map without vma", "grad")),
    ],
    "a linear loop is not transposed": [
        Program("number", (), "linear_scan", (), ("linear_transpose",)),
        Program("of weights", (), "linear_scan", (), ("loop as rule",)),
    ],
    "branches over x that varies and weights that do not": [
        Program("matmul", ("cond on weights",), "mask_scan", (), ("jit", "shard_map x", "grad w")),
        Program("matmul", ("cond on weights",), "while_scan", (), ("jit", "shard_map w", "grad w", "vmap w")),
    ],
}
"""The kinds of fault for which this generator was written: each is among the programs that it may draw."""

FOUND: dict[str, Program] = {f"{kind}, {n}": each for kind, of in KINDS.items() for n, each in enumerate(of)}

FOUND["an option around the mask that feeds a slot: KeyError"] = Program(
    "decaying", (), "mask_scan", ("AroundMask",), ("jit",)
)
FOUND["an option around remat that feeds a slot: KeyError"] = Program(
    "decaying", (), "scan", ("AroundRemat",), ("jit",)
)

IN_OUR_WORDS = {
    "a custom_vjp in a loop that ends early, mapped": Program(
        "decaying", ("custom_vjp",), "while_scan", (), ("grad", "vmap x")
    ),
    "a custom_vjp in a loop that ends early, mapped and staged": Program(
        "decaying", ("custom_vjp",), "while_scan", (), ("grad", "jit", "vmap x")
    ),
}
"""Programs that the library may refuse, but in its own words."""

FOUND["the number of an axis, of NumPy's type, is taken for a name"] = Program(
    "matmul",
    ("cond of each row", "y of weights"),
    "rows_while_scan",
    ("by the axis",),
    ("custom_jvp", "vmap w", "vmap h"),
)
