"""A random program: its arrays, its body, and the verb, options, masks and transforms with which it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .operations import OPERATIONS, binary, scalar_add
from .products import PRODUCTS, sum_of_products, to_scalar, vector_weights
from .programs import Builder, Draw, Leaf, NotPossible, Program, Type, Value, chance, choice

VERBS = ["mask_scan"] * 13 + ["while_scan"] * 4
VERBS += ["scan", "fold", "accumulate", "fori", "scan_layers", "fold_layers"]
WITHOUT_YS = ("fold", "accumulate", "fori", "fold_layers")
REMAT = [
    "'step'",
    "'nested'",
    "treescan.Remat(levels=3)",
    "treescan.Remat(policy='dots_saveable')",
    "treescan.Remat(chunk=2)",
    "treescan.Remat('everything_saveable', chunk=2)",
    "treescan.Remat('everything_saveable', levels=3, chunk=2)",
]
TAKES_AUTO = ("scan", "fold", "accumulate", "fori", "mask_scan")
TABLE = [op for weight, op in OPERATIONS + PRODUCTS for _ in range(weight)]


def draw_program(draw: Draw) -> Program:
    """Any program."""
    verb = choice(draw, VERBS)
    steps = choice(draw, [5, 2, 3, 4, 4, 6, 7, 8, 9, 11, 1, 17] + [0] * ("layers" not in verb))
    batch = choice(draw, [(2,), (), (), (1,), (3,), (), (4,), (2,), (2, 2), (), (1, 2)])
    sizes = tuple(choice(draw, [1, 2, 3, 4, 2, 3, 4]) for _ in range(2))
    dtype = choice(draw, ["float64"] * 16 + ["float32"] * 3 + ["bfloat16"])
    mode = _mode(draw, verb, dtype)
    g = Builder(draw, batch, sizes, forward=mode == ("value",))
    outer = choice(draw, [0, 0, 0, 2, 0, 2, 3])
    carry = [_carry_leaf(draw, i, batch, sizes, dtype, verb) for i in range(choice(draw, [1, 1, 2, 3]))]
    rows = verb == "while_scan" and batch != () and chance(draw, 60)
    if verb == "while_scan":
        carry.append(Leaf(Value(f"h{len(carry)}", Type(rows, (), "i")), 0 if rows else None))
    xs = [_x_leaf(draw, i, batch, sizes, dtype, verb) for i in range(choice(draw, [1, 0, 1, 2, 2, 3]))]
    if verb == "fori":
        xs = [Leaf(Value("x0", Type(False, (), "i")), None, mapped=False)]
    weights = [_weight(draw, i, sizes, dtype) for i in range(choice(draw, [2, 1, 2, 3, 4]))]
    if verb in ("scan_layers", "fold_layers"):
        xs = xs or [_x_leaf(draw, 0, batch, sizes, dtype, verb)]
    keyed = verb in ("mask_scan", "scan", "while_scan") and chance(draw, 8)
    valid = (verb == "mask_scan" or rows) and chance(draw, 10)
    _fill_pool(g, carry, xs, weights, keyed, valid)
    _add_instructions(g, choice(draw, [4, 2, 3, 4, 5, 6, 7, 8, 9, 11]))
    nxt = tuple(_next(g, leaf) for leaf in carry)
    ys = () if verb in WITHOUT_YS else tuple(_outputs(g, verb))
    carry = [_fixed(leaf, name) for leaf, name in zip(carry, nxt, strict=True)]
    program = Program(
        batch, dtype, steps, tuple(carry), tuple(xs), tuple(weights),
        tuple(g.body), nxt, ys, verb, mode=mode, outer=outer, keyed=keyed, valid=valid,
        context=choice(draw, ["jit"] * 27 + ["eager"] * 2 + ["disable_jit"]),
        padding=choice(draw, ["nan", "zero", "inf", "random", "minus one"]), seed=draw.integer(0, 999),
        flags="while rows" if rows else "while" if verb == "while_scan" else "none",
    )  # fmt: skip
    text = " ".join(instruction.text for instruction in program.body)
    if "vjp" in text or any(leaf.custom in ("clip", "stop") for leaf in carry):  # JAX has no forward mode for these
        program = _without_modes(program, "jvp", "hvp")
    if "stop_gradient" in text or "halved" in text:  # as for `truncate`
        program = _without_modes(program, "hvp")
    if "conv_general_dilated" in text and outer and verb == "while_scan":  # mapped ones of XLA let a NaN through
        program = program.replace(padding="random")
    if program.context != "jit":  # each primitive is compiled by itself
        mode = ("vjp",) if "vjp" in program.mode else ("value",)
        program = program.replace(mode=mode, outer=0, steps=min(steps, 5))
    return _with_options(draw, program)


def _without_modes(program: Program, *names: str) -> Program:
    return program.replace(mode=tuple(mode for mode in program.mode if mode not in names) or ("vjp",))


def _mode(draw: Draw, verb: str, dtype: str) -> tuple[str, ...]:
    if dtype != "float64":
        return choice(draw, [("vjp",), ("value",)])
    return choice(draw, [("vjp",)] * 8 + [("vjp", "jvp")] * 4 + [("vjp", "hvp"), ("value",)])


def _shape(draw: Draw, sizes: tuple[int, ...], most: int = 2) -> tuple[int, ...]:
    rank = min(choice(draw, [1, 1, 1, 1, 0, 2]), most)
    return tuple(choice(draw, sizes) for _ in range(rank))


def _kind(draw: Draw, dtype: str) -> str:
    return "c" if dtype != "bfloat16" and chance(draw, 7) else "f"


def _carry_leaf(draw: Draw, i: int, batch: Any, sizes: Any, dtype: str, verb: str) -> Leaf:
    which = choice(draw, ["rows"] * 12 + ["custom"] * 2 + ["int", "shared", "fixed", "fixed"])
    name, shape = f"h{i}", _shape(draw, sizes)
    if which == "int":
        return Leaf(Value(name, Type(True, (), "i")), 0)
    if which == "shared":
        return Leaf(Value(name, Type(False, shape, _kind(draw, dtype))), None)
    if which == "fixed":
        return Leaf(Value(name, Type(False, tuple(choice(draw, sizes) for _ in range(2)))), None, fixed=True)
    if which == "custom" and verb in ("mask_scan", "scan", "while_scan"):
        return Leaf(
            Value(name, Type(True, shape)), 0, choice(draw, ["ema", "running_sum", "window", "cast", "clip", "stop"])
        )
    axis = draw.integer(1, len(shape)) if shape and verb == "mask_scan" and chance(draw, 10) else 0
    return Leaf(Value(name, Type(True, shape, _kind(draw, dtype))), axis, mapped=not chance(draw, 25))


def _x_leaf(draw: Draw, i: int, batch: Any, sizes: Any, dtype: str, verb: str) -> Leaf:
    name, which = f"x{i}", choice(draw, ["rows"] * 7 + ["positive", "shared", "shared", "int"])
    mapped = not chance(draw, 25)
    whole = verb not in ("fori", "scan_layers", "fold_layers") and chance(draw, 8)
    if which == "int":
        rows = chance(draw, 60)
        return Leaf(Value(name, Type(rows, (), "i")), 0 if rows else None, mapped=mapped)
    shape = _shape(draw, sizes)
    if which == "shared":
        return Leaf(Value(name, Type(False, shape, _kind(draw, dtype))), None, mapped=mapped, whole=whole)
    axis = draw.integer(1, len(shape)) if shape and verb == "mask_scan" and chance(draw, 10) else 0
    kind = Type(True, shape, "f" if which == "positive" else _kind(draw, dtype), which == "positive")
    movable = not whole and "layers" not in verb
    time = draw.integer(0, len(batch) + len(shape)) if movable and chance(draw, 12) else 0
    return Leaf(Value(name, kind), axis, whole=whole, time=time, mapped=mapped)


def _weight(draw: Draw, i: int, sizes: tuple[int, ...], dtype: str) -> Leaf:
    shape = tuple(choice(draw, sizes) for _ in range(choice(draw, [2, 2, 1, 1, 0])))
    positive = chance(draw, 20)
    kind = "f" if positive else _kind(draw, dtype)
    return Leaf(Value(f"w{i}", Type(False, shape, kind, positive)), None, mapped=chance(draw, 40))


def _fill_pool(g: Builder, carry: Any, xs: Any, weights: Any, keyed: bool, valid: bool) -> None:
    for leaf in (*weights, *xs, *carry):
        if leaf.custom == "window":
            g.values += [Value(f"{leaf.name}[{i}]", leaf.type) for i in (-1, 0)]
        else:
            g.values.append(Value(leaf.name, leaf.type))
    if keyed:
        g.values.append(Value("key", Type(False, (), "k")))
    if valid:
        g.values.append(Value("valid", Type(True, (), "b")))


def _add_instructions(g: Builder, number: int) -> None:
    """Of a few kinds of operations that are drawn first: what fails is often two of the same kind that meet."""
    kinds = [g.choice(TABLE) for _ in range(g.choice([6, 4, 8, 12, 30]))]
    if g.chance(60):
        kinds += [vector_weights, to_scalar, scalar_add, binary, sum_of_products, sum_of_products]
    for _ in range(6 * number):
        operation = g.choice(kinds)
        try:
            operation(g)
        except NotPossible:
            continue
        g.body[-1] = replace(g.body[-1], op=operation.__name__)
        if len(g.body) >= number:
            break


def _next(g: Builder, leaf: Leaf) -> str:
    """A value of the leaf's type, made of what the body computed."""
    if leaf.fixed:
        return leaf.name
    kind, own = leaf.type, Value(leaf.name if leaf.custom != "window" else f"{leaf.name}[-1]", leaf.type)
    if kind.kind == "i":
        return g.emit("{0} + 1", [own], None, kind.shape, "i").name
    same = [v for v in g.values if (v.type.rows, v.type.shape, v.type.kind) == (kind.rows, kind.shape, kind.kind)]
    same = [v for v in same if v.name != leaf.name] or [own]
    unread = _unread(g)
    new = g.choice([v for v in same if v in unread] or same[-3:])
    for _ in range(g.choice([1, 2, 1, 0, 3])):
        unread = _unread(g)
        other = [v for v in g.values if v.type.kind in f"f{kind.kind}" and (kind.rows or not v.type.rows) and v != new]
        other = [v for v in other if v in unread] or other[-4:]
        if not other:
            break
        added = _fitted(g, g.choice(other), kind)
        text = g.choice(["{0} + {1}", "{1} + {0}", "{0} + 0.5 * {1}", "{0} + {1}", "{1} - {0}", "{0} * {1}"])
        slot = g.lifted(1, added.type, len(kind.shape))
        new = g.emit(text.format("{0}", slot), [new, added], kind.rows, kind.shape, kind.kind)
    if kind.kind == "c":
        return g.emit("{0} / (1 + jnp.abs({0}))", [new], None, kind.shape, "c").name
    if new is own or g.chance(90):
        new = g.emit(g.choice(["jnp.tanh({0})", "jnp.sin({0})", "jnp.tanh({0})"]), [new], kind.rows, kind.shape)
    return new.name


def _unread(g: Builder) -> list[Value]:
    """What the body computed and nothing reads yet."""
    read = {name for instruction in g.body for name in instruction.reads}
    return [instruction.value for instruction in g.body if instruction.value.name not in read]


def _fitted(g: Builder, value: Value, kind: Type) -> Value:
    """The value, or its sum, where that broadcasts to the type."""
    if not value.type.shape:
        return value
    if len(value.type.shape) == len(kind.shape) and value.type.shape == kind.shape:
        return value
    axes = tuple(range(-len(value.type.shape), 0))
    return g.emit(f"jnp.sum({{0}}, axis={axes})", [value], None, (), value.type.kind)


def _fixed(leaf: Leaf, name: str) -> Leaf:
    return leaf.__class__(**{**vars(leaf), "fixed": leaf.fixed or (name == leaf.name and not leaf.custom)})


def _outputs(g: Builder, verb: str) -> list[Leaf]:
    found = []
    for _ in range(g.choice([1, 0, 1, 2, 3])):
        unread = [v.name for v in _unread(g)]
        value = g.pick(lambda t: True, "fffffcib") if not unread or g.chance(40) else g.values_of(unread)
        shared = verb == "mask_scan" and not value.type.rows and g.batch
        axis = None if shared or not value.type.rows else 0
        shape = value.type.shape
        if axis == 0 and shape and verb == "mask_scan" and g.chance(8):
            axis = g.draw.integer(1, len(shape))
        rank = len(shape) + (len(g.batch) if value.type.rows else 0)
        time = g.draw.integer(0, rank) if g.chance(10) else 0
        found.append(Leaf(value, axis, time=time))
    return found


def _with_options(draw: Draw, program: Program) -> Program:
    verb, steps = program.verb, program.steps
    options: dict[str, str] = {}
    if chance(draw, 30):
        options["reverse"] = "True"
    if verb not in ("fold_layers",) and chance(draw, 10):
        options["unroll"] = choice(draw, ["2", "3", "True"])
    if chance(draw, 15):
        options["remat"] = choice(draw, REMAT + ["'auto'"] * (verb in TAKES_AUTO))
    custom = any(leaf.custom for leaf in program.carry)
    if verb in ("scan", "fold", "accumulate", "mask_scan") and not custom and chance(draw, 10):
        options["truncate"] = str(choice(draw, [1, 2, 3]))
        # A cut has no tangent, so the truncated gradient's jvp is not what its finite differences are.
        program = _without_modes(program, "hvp")
    save = fill = ()
    if program.ys:
        save = ("all",) * len(program.ys)
        if verb in ("scan", "while_scan", "mask_scan", "scan_layers") and chance(draw, 18):
            at = [range(draw.integer(0, steps - 1), steps, draw.integer(1, 3))] * 2 if steps else []
            save = tuple(choice(draw, ["all", "last", 2, None, 1, 3, *at]) for _ in program.ys)
        fill = (0,) * len(program.ys)
        if verb in ("mask_scan", "while_scan") and chance(draw, 30):
            several = chance(draw, 50)
            one = _fill(draw, verb, program.ys)
            fill = tuple(_fill(draw, verb, (leaf,)) if several else one for leaf in program.ys)
    ys = tuple(leaf if keep == "all" else leaf.__class__(**{**vars(leaf), "time": 0})
               for leaf, keep in zip(program.ys, save, strict=True))  # fmt: skip
    flags, reset_to = program.flags, False
    if "layers" in verb and chance(draw, 50):
        program = program.replace(period=choice(draw, [2, 3]))
        ys = tuple(leaf.__class__(**{**vars(leaf), "time": 0}) for leaf in ys)
        save = ("all",) * len(ys)
        if chance(draw, 30):
            options["remat"] = choice(draw, ["('step', None, 'step')", "(None, None, 'step')"]) + f"[:{program.period}]"
    plain_rows = all(leaf.axis == 0 and not leaf.whole for leaf in (*program.carry, *program.xs))
    if verb == "fold" and program.batch and not custom and plain_rows and chance(draw, 80):
        flags = "lengths"
    if flags == "while rows" and not program.keyed and chance(draw, 30):
        options["compact"] = choice(draw, ["True", "(1,)", "(1, 2)", "(2, 3)"])
    if verb == "mask_scan":
        flags = choice(draw, ["lengths"] * 3 + ["mask", "mask", "resets", "lengths+resets", "mask+resets"])
        reset_to = "resets" in flags and not custom and chance(draw, 40)
        chunk = choice(draw, [None, 2, 1, 3, 4, None, 8, 0, max(steps, 1), program.weights[0].type.shape[:1] or (2,)])
        chunk = chunk[0] if isinstance(chunk, tuple) else chunk
        if chunk is not None:
            options["chunk"] = str(chunk)
        if program.batch and chunk != 0 and not program.keyed and chance(draw, 15):
            options["compact"] = choice(draw, ["True", "(1,)", "(1, 2)", "(2, 3)"])
        if program.batch and chance(draw, 8):
            options["time_axis"] = "1"
            program = _batch_first(program)
            ys = tuple(Leaf(**{**vars(y), "time": 1}) if keep == "all" and _rank(y, program) >= 1 else y
                       for y, keep in zip(ys, save, strict=True))  # fmt: skip
    if flags == "none" and not any(leaf.mapped for leaf in (*program.carry, *program.xs, *program.weights)):
        program = program.replace(outer=0)
    return program.replace(options=tuple(options.items()), save=save, fill=fill, ys=ys, flags=flags, reset_to=reset_to)


def _rank(leaf: Leaf, program: Program) -> int:
    return len(leaf.type.shape) + (len(program.batch) if leaf.type.rows else 0)


def _batch_first(program: Program) -> Program:
    xs = tuple(Leaf(**{**vars(x), "time": 1 if not x.whole and _rank(x, program) >= 1 else 0}) for x in program.xs)
    return program.replace(xs=xs)


def _fill(draw: Draw, verb: str, leaves: Any) -> Any:
    kinds = {leaf.type.kind for leaf in leaves}
    some: list[Any] = ["hold", 1, "hold"] if verb == "mask_scan" else [1]
    if kinds <= {"f", "c"}:
        some += [0.5, -1]
    return choice(draw, some)
