"""The operations of random bodies: each adds one instruction, or says that there is nothing for it to work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .programs import Builder, NotPossible, Value, broadcast

Operation = Callable[[Builder], Value]

# fmt: off
UNARY = [
    "jnp.tanh({0})", "jnp.sin({0})", "jnp.cos({0})", "jax.nn.sigmoid({0})", "jax.nn.softplus({0})",
    "jax.nn.relu({0})", "jax.nn.gelu({0})", "jax.nn.silu({0})", "jax.nn.elu({0})", "jnp.exp(-jnp.square({0}))",
    "jnp.log1p(jnp.square({0}))", "jnp.sqrt(1 + jnp.square({0}))", "jnp.arctan({0})", "jnp.abs({0})", "-{0}",
    "0.3 * {0} ** 3", "2 * {0}", "jnp.expm1(-jnp.abs({0}))", "jax.lax.erf({0})", "jnp.cbrt(1 + jnp.square({0}))",
    "jax.lax.rsqrt(1 + jnp.square({0}))", "jnp.sign({0})", "jnp.floor({0})", "jnp.clip({0}, -0.5, 0.5)",
    "jnp.cosh(jnp.tanh({0}))", "jnp.arcsinh({0})", "jax.lax.stop_gradient({0})", "jnp.square({0})",
    "{0}.astype(jnp.float32).astype({0}.dtype)", "jnp.nan_to_num({0})", "jax.jit(jnp.tanh)({0})",
    "jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)))({0})", "own_jvp({0})", "own_vjp({0})", "jnp.zeros_like({0})",
    "jnp.real(jnp.exp(1j * {0}))", "jnp.imag({0} * jnp.exp(0.5j * {0}))", "1.5 - {0}", "0.25 + {0}", "jnp.exp2(-{0} * {0})",
    "jax.grad(lambda a: jnp.sum(jnp.tanh(a) ** 2))({0})", "jax.jvp(jnp.sin, ({0},), (jnp.cos({0}),))[1]",
    "jnp.logaddexp({0}, 0.1)", "jnp.tan(0.5 * jnp.tanh({0}))", "jnp.round({0})", "jnp.log(jnp.square({0}) + 0.5)",
    "jnp.atan2({0}, 1.5)", "jnp.sinc(0.3 * {0})", "optimization_barrier({0})",
]
COMPLEX_UNARY = [
    "jnp.sin(0.3 * {0})", "jnp.tanh(0.3 * {0})", "jnp.conj({0})", "-{0}", "{0} * (0.5 + 0.5j)", "jnp.exp(-0.1j * {0})",
    "{0} / (1 + jnp.abs({0}) ** 2)", "0.3 * {0} * {0}", "jnp.cos(0.2 * {0})", "jax.lax.stop_gradient({0})",
]
TO_REAL = ["jnp.real({0})", "jnp.imag({0})", "jnp.square(jnp.abs({0}))"]
BINARY = [
    "{0} + {1}", "{0} + {1}", "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} * {1}", "jnp.maximum({0}, {1})",
    "jnp.minimum({0}, {1})", "jnp.where({0} > {1}, {0}, {1})", "jnp.arctan2({0}, 1.5 + jnp.square({1}))",
    "{0} / (1 + jnp.square({1}))", "jnp.logaddexp({0}, {1})", "(1.5 + jnp.sin({0})) ** jnp.tanh({1})",
    "jnp.hypot({0}, 1 + jnp.abs({1}))", "jnp.where(jnp.abs({1}) < 0.3, 0.0, {0})", "own_jvp({0}) * {1}",
    "jax.jit(lambda a, b: jnp.tanh(a) + b)({0}, {1})", "jax.checkpoint(lambda a, b: a * jnp.sin(b))({0}, {1})",
    "jnp.remainder({0}, 1.3 + jnp.abs({1}))", "own_vjp_of_two({0}, {1})", "jnp.copysign({0}, {1})", "jnp.heaviside({0}, 0.5) * {1}",
]
COMPLEX_BINARY = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / (2 + jnp.abs({1}))"]
TERNARY = [
    "jnp.where({0} > 0, {1}, {2})", "jnp.clip({0}, -jnp.abs({1}), jnp.abs({2}))", "{0} * {1} + {2}",
    "{0} + jax.nn.sigmoid({1}) * ({2} - {0})", "jnp.where(({0} > 0) & ({1} < 0.5), {2}, {0})", "{0} + {1} + {2}",
    "({0} + {1}) * {2}",
]
ALONG = [  # of the last axis
    "jnp.cumsum({0}, axis=-1)", "jnp.cumprod({0}, axis=-1)", "jnp.sort({0}, axis=-1)", "jnp.flip({0}, axis=-1)",
    "jnp.roll({0}, 1, axis=-1)", "jax.nn.softmax({0}, axis=-1)", "jax.nn.log_softmax({0}, axis=-1)",
    "{0}[..., ::-1]", "jax.lax.associative_scan(jnp.add, {0}, axis={0}.ndim - 1)", "jnp.cumsum({0}, axis=-1)[..., ::-1]",
    "{0}.at[..., 0].set(0.3)", "{0}.at[..., -1].add(0.5)", "{0}.at[..., 0].multiply(0.5)", "jax.lax.cummax({0}, {0}.ndim - 1)",
    "jnp.pad({0}, [(0, 0)] * ({0}.ndim - 1) + [(1, 0)])[..., :-1]", "{0} - jnp.mean({0}, axis=-1, keepdims=True)",
    "jnp.take({0}, jnp.array([0, -1, 0])[:{0}.shape[-1]], axis=-1)[..., :1] + {0}", "jax.lax.cumlogsumexp({0}, {0}.ndim - 1)",
    "jnp.take_along_axis({0}, jnp.argsort({0}, axis=-1), axis=-1)",
]
REDUCTIONS = ["jnp.sum({0}, axis={a})", "jnp.mean({0}, axis={a})", "jnp.max({0}, axis={a})", "jnp.min({0}, axis={a})",
              "jnp.prod({0}, axis={a})", "jax.nn.logsumexp({0}, axis={a})", "jnp.var({0}, axis={a})",
              "jnp.sqrt(1 + jnp.sum(jnp.square({0}), axis={a}))"]
# fmt: on


def _of_one(name: str, texts: list[str], test: Any = lambda t: True, kinds: str = "f", kind: str = "f") -> Operation:
    """On one value, whose shape it keeps."""

    def operation(g: Builder) -> Value:
        a = g.pick(test, kinds)
        return g.emit(g.choice(texts), [a], None, a.type.shape, kind)

    operation.__name__ = name
    return operation


# fmt: off
along = _of_one("along", ALONG, lambda t: t.shape)
to_real = _of_one("to_real", TO_REAL, kinds="c")
to_complex = _of_one("to_complex", ["jax.lax.complex({0}, jnp.sin({0}))", "{0} * (0.6 + 0.8j)", "jnp.exp(1j * {0})"], kind="c")
on_ints = _of_one("on_ints", ["{0} + 1", "{0} % 3", "-{0}", "jnp.bitwise_xor({0}, 1)", "jnp.where({0} > 2, 0, {0})"],
                  kinds="i", kind="i")
compare = _of_one("compare", ["{0} > 0", "jnp.isfinite({0})", "jnp.abs({0}) < 0.4", "~({0} < 0.1)"], kind="b")
# fmt: on


def unary(g: Builder) -> Value:
    a = g.pick(kinds="fc")
    return g.emit(g.choice(UNARY if a.type.kind == "f" else COMPLEX_UNARY), [a], None, a.type.shape, a.type.kind)


def binary(g: Builder) -> Value:
    a, b = g.pick(kinds="fffc"), g.pick(kinds="fffc")
    shape = broadcast(a.type.shape, b.type.shape)
    kind = "c" if "c" in a.type.kind + b.type.kind else "f"
    text = g.choice(BINARY if kind == "f" else COMPLEX_BINARY)
    operands = g.operands(a, b)
    return g.emit(text.format(*operands), [a, b], None, shape, kind)


def ternary(g: Builder) -> Value:
    three = [g.pick() for _ in range(3)]
    shape = broadcast(*(v.type.shape for v in three))
    operands = g.operands(*three)
    return g.emit(g.choice(TERNARY).format(*operands), three, None, shape)


def scalar_add(g: Builder) -> Value:
    """A number added to an array."""
    a, b = g.pick(lambda t: not t.shape), g.pick(lambda t: t.shape)
    first, second = g.lifted(0, a.type, len(b.type.shape)), "{1}"
    text = g.choice(["{a} + {b}", "{b} + {a}", "{b} - {a}", "{a} * {b}", "jnp.tanh({a} + {b})"])
    return g.emit(text.format(a=first, b=second), [a, b], None, b.type.shape)


def reduce(g: Builder) -> Value:
    a = g.pick(lambda t: t.shape)
    rank = len(a.type.shape)
    axes = g.choice([tuple(range(-rank, 0)), (-1,), (-rank,)])
    shape = [s for i, s in enumerate(a.type.shape) if i - rank not in axes]
    return g.emit(g.choice(REDUCTIONS).replace("{a}", str(axes)), [a], None, shape)


def divide_by_positive(g: Builder) -> Value:
    """By data that are bad in padding."""
    a = g.pick()
    b = g.pick(lambda t: t.positive)
    shape = broadcast(a.type.shape, b.type.shape)
    text = g.choice(["{0} / {1}", "{0} * jnp.log({1})", "{0} * jnp.sqrt({1})", "{0} * {1} ** 0.5", "{0} + 1 / {1}"])
    operands = g.operands(a, b)
    return g.emit(text.format(*operands), [a, b], None, shape)


def low_precision(g: Builder) -> Value:
    """A product in float32, and back."""
    a = g.pick(lambda t: t.shape)
    size = a.type.shape[-1]
    w = g.pick(lambda t: not t.rows and t.shape[:1] == (size,) and len(t.shape) <= 2)
    text = "({0}.astype(jnp.float32) @ {1}.astype(jnp.float32)).astype({0}.dtype)"
    return g.emit(text, [a, w], None, a.type.shape[:-1] + w.type.shape[1:])


def to_int(g: Builder) -> Value:
    a = g.pick()
    if a.type.shape and g.chance(40):
        text = g.choice(["jnp.argmax({0}, axis=-1).astype(jnp.int32)", "jnp.sum({0} > 0, axis=-1, dtype=jnp.int32)"])
        return g.emit(text, [a], None, a.type.shape[:-1], "i")
    text = g.choice(["({0} > 0.1).astype(jnp.int32)", "jnp.int32(jnp.clip(3 * {0}, -9, 9))"])
    return g.emit(text, [a], None, a.type.shape, "i")


def of_int(g: Builder) -> Value:
    a = g.pick(kinds="ib")
    if a.type.kind == "b":
        return g.emit("jnp.where({0}, 0.5, -0.25).astype(dtype)", [a], None, a.type.shape)
    text = g.choice(["0.1 * ({0} % 5).astype(dtype)", "jnp.cos({0}.astype(dtype))"])
    return g.emit(text, [a], None, a.type.shape)


def one_hot(g: Builder) -> Value:
    a, size = g.pick(lambda t: not t.shape, "i"), g.size()
    return g.emit(f"jax.nn.one_hot({{0}} % {size}, {size}, dtype=dtype)", [a], None, (size,))


def select(g: Builder) -> Value:
    p, a, b = g.pick(kinds="b"), g.pick(), g.pick()
    shape = broadcast(p.type.shape, a.type.shape, b.type.shape)
    operands = g.operands(p, a, b)
    return g.emit("jnp.where({}, {}, {})".format(*operands), [p, a, b], None, shape)


def lookup(g: Builder) -> Value:
    """A row of weights, by a number."""
    i, w = g.pick(lambda t: not t.shape, "i"), g.pick(lambda t: not t.rows and t.shape)
    size = w.type.shape[0]
    text = g.choice([f"{{1}}[{{0}} % {size}]", f"jnp.take({{1}}, {{0}} % {size}, axis=0)"])
    return g.emit(text, [i, w], None, w.type.shape[1:])


def element(g: Builder) -> Value:
    """One element along the last axis, by a number of the same rows."""
    a = g.pick(lambda t: len(t.shape) == 1)
    size = a.type.shape[0]
    i = g.pick(lambda t: not t.shape and t.rows == a.type.rows, "i")
    text = f"jnp.take_along_axis({{0}}, ({{1}} % {size})[..., None], axis=-1)[..., 0]"
    return g.emit(text, [a, i], None, ())


def dynamic(g: Builder) -> Value:
    a = g.pick(lambda t: t.shape)
    i = g.pick(lambda t: not t.shape and not (t.rows and g.batch), "i")
    size = a.type.shape[-1]
    short = g.choice(range(1, size + 1))
    if g.chance(40):
        text = f"jax.lax.dynamic_update_slice_in_dim({{0}}, 0.5 * {{0}}[..., :{short}], {{1}} % {size}, {{0}}.ndim - 1)"
        return g.emit(text, [a, i], None, a.type.shape)
    text = f"jax.lax.dynamic_slice_in_dim({{0}}, {{1}} % {size}, {short}, {{0}}.ndim - 1)"
    return g.emit(text, [a, i], None, (*a.type.shape[:-1], short))


def piece(g: Builder) -> Value:
    a = g.pick(lambda t: t.shape)
    shape, last = a.type.shape[:-1], a.type.shape[-1]
    which = g.draw.integer(0, 3)
    if which == 0:
        return g.emit(f"{{0}}[..., {g.draw.integer(-last, last - 1)}]", [a], None, shape)
    if which == 1:
        return g.emit("{0}[..., :1]", [a], None, (*shape, 1))
    if which == 2 and last > 1:
        return g.emit("{0}[..., 1:]", [a], None, (*shape, last - 1))
    return g.emit(f"jnp.split({{0}}, {last}, axis=-1)[-1]", [a], None, (*shape, 1))


def join(g: Builder) -> Value:
    a = g.pick(lambda t: t.shape)
    b = g.pick(
        lambda t: t.rows == a.type.rows and len(t.shape) == len(a.type.shape) and t.shape[:-1] == a.type.shape[:-1]
    )
    total = a.type.shape[-1] + b.type.shape[-1]
    if total > 6:
        raise NotPossible
    return g.emit("jnp.concatenate([{0}, {1}], axis=-1)", [a, b], None, (*a.type.shape[:-1], total))


def stack(g: Builder) -> Value:
    a = g.pick(lambda t: len(t.shape) < 2)
    b = g.pick(lambda t: t.rows == a.type.rows and t.shape == a.type.shape)
    return g.emit("jnp.stack([{0}, {1}], axis=-1)", [a, b], None, (*a.type.shape, 2))


def reshape(g: Builder) -> Value:
    a = g.pick(lambda t: len(t.shape) == 2)
    m, n = a.type.shape
    lead = "{0}.shape[:-2] + " if a.type.rows else ""
    if g.chance(50):
        return g.emit("jnp.swapaxes({0}, -1, -2)", [a], None, (n, m))
    if m * n > 6:
        return g.emit(f"{{0}}.reshape({lead}({n}, {m}))", [a], None, (n, m))
    return g.emit(f"{{0}}.reshape({lead}({m * n},))", [a], None, (m * n,))


def spread(g: Builder) -> Value:
    a, size = g.pick(lambda t: len(t.shape) < 2), g.size()
    if g.chance(30):
        return g.emit("{0}[..., None]", [a], None, (*a.type.shape, 1))
    text = f"jnp.broadcast_to({{0}}[..., None], {{0}}.shape + ({size},))"
    return g.emit(text, [a], None, (*a.type.shape, size))


def constant(g: Builder) -> Value:
    size = g.size()
    text = g.choice([f"jnp.arange({size}, dtype=dtype) / 3", f"jnp.full(({size},), 0.3, dtype)"])
    return g.emit(text, [], False, (size,))


def across_rows(g: Builder) -> Value:
    """Rows meet in zero, by multiplication with the mask: a NaN of padding would be left of it."""
    valid, a = g.values_of(["valid"]), g.pick(lambda t: t.rows)
    mask, axes = g.lifted(1, valid.type, len(a.type.shape)), tuple(range(len(g.batch)))
    return g.emit(f"{{0}} + 0 * jnp.sum({{0}} * {mask}.astype(dtype), axis={axes})", [a, valid], None, a.type.shape)


def for_data_alone(g: Builder) -> Value:
    """What padded rows may only be given good values for: see `PRELUDE`."""
    a = g.pick()
    return g.emit(g.choice(["halved({0})", "observed({0})", "own_vjp({0})"]), [a], None, a.type.shape)


def random_of_key(g: Builder) -> Value:
    key, size = g.pick(lambda t: not t.rows, "k"), g.size()
    shape = g.choice([(), (size,)])
    return g.emit(f"jax.random.uniform({{0}}, {shape}, dtype)", [key], None, shape)


OPERATIONS: list[tuple[int, Operation]] = [
    (12, unary), (14, binary), (4, ternary), (6, scalar_add), (5, along), (6, reduce), (4, divide_by_positive), (2, to_real),
    (1, to_complex), (2, low_precision), (2, to_int), (2, of_int), (1, one_hot), (1, on_ints), (1, compare), (2, select),
    (2, lookup), (1, element), (2, dynamic), (3, piece), (3, join), (2, stack), (2, reshape), (2, spread), (1, constant),
    (4, random_of_key), (4, across_rows), (1, for_data_alone),
]  # fmt: skip
