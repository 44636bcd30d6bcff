"""Small typed examples of each primitive that treescan treats specially, by the name it has in jaxprs.

`tables` finds the names in the modules themselves. An example is of one type; its operands are of rank 0, 1 and 2, of
different shapes where the primitive takes such. Axes are of size 3, as the tests' chunks are: what is broadcast along
the wrong axis has a shape that fits.
"""

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives as jax_primitives
import jax.numpy as jnp
import numpy as np
from jax import lax

CHUNK = 3
ONE, ROW, GRID = (), (CHUNK,), (2, CHUNK)

FLOATS = ("float32", "bfloat16", "float64")
COMPLEX = ("complex64",)
INTEGERS = ("int32", "uint8")
BOOL = ("bool",)
INEXACT = FLOATS + COMPLEX
NUMBERS = INEXACT + INTEGERS


# Tables.


# They read traces and rewrite none; `test_finite_blame.py` has the names of the first, and what the others make of a
# trace is compared with what XLA allocates (`test_plan_bytes.py`, `test_describe.py`).
_REWRITE_NOTHING = frozenset({"blame"})
_TABLES_THAT_REWRITE_NOTHING = frozenset(
    {
        "cost._SAME",
        "cost._FUSED",
        "cost._WRITES_INTO",
        "compact._DRAWS",
        "dependence._FORMS",
        "equations._FOR_DATA_ALONE",
        "products._OTHER_MESH",
    }
)
_NAMES_OF_VALUES = "name"  # the primitive that a policy of JAX refers to


def tables() -> dict[str, frozenset[str]]:
    """The names in each table of primitives, and those that a module compares an equation's name with."""
    found = {}
    names = ("_trace", "_transforms", "_outputs", "_remat", "_program", "_rows", "_until", "_faster", "_options")
    folders = [importlib.import_module(f"treescan.{name}") for name in names]
    for info in (info for f in folders for info in pkgutil.walk_packages(f.__path__, f"{f.__name__}.")):
        module = importlib.import_module(info.name)
        leaf = info.name.rpartition(".")[2]
        if leaf in _REWRITE_NOTHING:
            continue
        for name, value in vars(module).items():
            if not name.startswith("__") and _is_table(value) and f"{leaf}.{name}" not in _TABLES_THAT_REWRITE_NOTHING:
                found[f"{info.name}.{name}"] = frozenset(value)
        compared = re.findall(r"\.name [!=]= \"([\w-]+)\"", Path(module.__file__).read_text())
        if compared:
            found[f"{info.name}, compared"] = frozenset(compared) - {_NAMES_OF_VALUES}
    return found


def _is_table(value: Any) -> bool:
    """Sets of names, and dicts of functions by name; but for those of JAX's effects all are of primitives."""
    if isinstance(value, dict) and not all(map(callable, value.values())):
        return False
    named = isinstance(value, set | frozenset | dict) and bool(value) and all(isinstance(name, str) for name in value)
    return named and not all(name.endswith("Effect") for name in value)


# Examples.


class Operand(NamedTuple):
    """What is drawn for one place, of one step: numbers from `low` to below `high`."""

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float

    @property
    def is_inexact(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.inexact))

    @property
    def is_anything(self) -> bool:
        """Whether it may be any number."""
        return self.low < 0 < self.high

    def draw(self, rng: np.random.Generator, *lead: int) -> np.ndarray:
        shape = (*lead, *self.shape)
        if self.dtype == "bool":
            return rng.random(shape) < 0.5
        if not self.is_inexact:
            return rng.integers(max(int(self.low), 0), max(int(self.high), 1), shape).astype(self.dtype)
        values = rng.uniform(self.low, self.high, shape)
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            values = values + 1j * rng.uniform(self.low, self.high, shape) / 2
        return np.asarray(values, jnp.dtype(self.dtype))


class Example(NamedTuple):
    """A function that evaluates the primitive on these operands."""

    name: str
    function: Callable[..., Any]
    operands: tuple[Operand, ...]

    def jaxpr(self) -> Any:
        """Its trace for one step."""
        types = (jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype)) for each in self.operands)
        return jax.make_jaxpr(lambda *given: jax.tree.leaves(self.function(*given)))(*types)


class Entry(NamedTuple):
    """The types for which a primitive has examples, and these."""

    types: tuple[str, ...]
    make: Callable[[str], list[tuple[Callable[..., Any], list[Operand]]]]

    def examples(self, name: str, dtype: str) -> Iterator[Example]:
        if dtype in self.types:
            for number, (function, operands) in enumerate(self.make(dtype)):
                shapes = ", ".join(
                    f"{'' if each.dtype == dtype else each.dtype + ' '}{list(each.shape)}" for each in operands
                )
                yield Example(f"{name} {number} of {dtype} {shapes}", function, tuple(operands))


ANY, POSITIVE, UNIT = (-1.5, 1.5), (0.5, 2.0), (-0.8, 0.8)
COUNTS = (1, 6)
ALIKE = ((ONE, ONE), (ROW, ROW), (GRID, GRID))
BROADCAST = (*ALIKE, (ONE, ROW), (ROW, ONE), (ONE, GRID), (GRID, ONE))


def _operand(shape: tuple[int, ...], dtype: str, domain: tuple[float, float]) -> Operand:
    whole = not jnp.issubdtype(dtype, jnp.inexact)
    return Operand(shape, dtype, *(COUNTS if whole else domain))


def unary(function, types=FLOATS, domain=ANY, shapes=(ONE, ROW, GRID)) -> Entry:
    return Entry(types, lambda dtype: [(function, [_operand(shape, dtype, domain)]) for shape in shapes])


def binary(function, types=FLOATS, domains=(ANY, ANY), shapes=ALIKE) -> Entry:
    def make(dtype: str) -> list[Any]:
        return [
            (function, [_operand(shape, dtype, domain) for shape, domain in zip(pair, domains, strict=True)])
            for pair in shapes
        ]

    return Entry(types, make)


def several(*entries: Entry) -> Entry:
    """The examples of several entries as one."""
    types = tuple(dict.fromkeys(dtype for entry in entries for dtype in entry.types))

    def make(dtype: str) -> list[Any]:
        return [example for entry in entries if dtype in entry.types for example in entry.make(dtype)]

    return Entry(types, make)


def of(function, *operands, types=FLOATS) -> Entry:
    """One example: operands are shapes, or (shape, dtype, domain) where they are not of the example's type."""

    def make(dtype: str) -> list[Any]:
        given = [
            Operand(o[0], o[1], *o[2]) if o and isinstance(o[0], tuple) else _operand(o, dtype, ANY) for o in operands
        ]
        return [(function, given)]

    return Entry(types, make)


def each(types: tuple[str, ...], *examples: Any) -> Entry:
    """Examples of the same types: (function, *operands)."""
    return several(*(of(function, *operands, types=types) for function, *operands in examples))


def whole(shape: tuple[int, ...], high: int) -> Any:
    """An operand of whole numbers below `high`."""
    return (shape, "int32", (0, high))


def _compare(function) -> Entry:
    return binary(function, (*FLOATS, *INTEGERS))


def _clamp() -> Entry:
    def between_numbers(low, a, high):  # JAX itself fails to differentiate with respect to bounds of rank 0 then
        return lax.clamp(lax.stop_gradient(low), a, lax.stop_gradient(high))

    same = [(lambda *given: lax.clamp(*given), *(shape,) * 3) for shape in (ONE, ROW, GRID)]
    return each((*FLOATS, "int32"), *same, *((between_numbers, ONE, shape, ONE) for shape in (ROW, GRID)))


def _whole_power(a, n):
    return lax.pow(lax.stop_gradient(a), n)  # JAX's own rule needs promotion of types, which is off in the tests


def _select_n() -> Entry:
    def pick(which, *cases):
        return lax.select_n(which, *cases)

    flag = [(shape, "bool", (0, 1)) for shape in (ONE, ROW, GRID)]
    return several(
        *(of(pick, (shape, "bool", (0, 1)), shape, shape, types=(*NUMBERS, *BOOL)) for shape in (ONE, ROW, GRID)),
        of(pick, flag[0], ROW, ROW, types=NUMBERS),
        of(pick, flag[0], GRID, GRID, types=NUMBERS),
        of(pick, whole(ROW, 3), ROW, ROW, ROW, types=NUMBERS),
    )


# fmt: off
def _shapers() -> dict[str, Entry]:
    of_each = {
        "concatenate": [(lambda a, b: lax.concatenate([a, b], 0), ROW, ROW),
                        (lambda a, b: lax.concatenate([a, b, a], 1), GRID, (2, 1))],
        "reshape": [(lambda a: lax.reshape(a, (1, 1)), ONE), (lambda a: lax.reshape(a, (CHUNK, 2)), GRID)],
        "rev": [(lambda a: lax.rev(a, (0,)), ROW), (lambda a: lax.rev(a, (0, 1)), GRID)],
        "slice": [(lambda a: lax.slice(a, (1,), (3,)), ROW), (lambda a: lax.slice(a, (0, 0), (2, 3), (1, 2)), GRID)],
        "split": [(lambda a: lax.split(a, (1, 2)), ROW), (lambda a: lax.split(a, (2, 1), 1), GRID)],
        "squeeze": [(lambda a: lax.squeeze(a, (0,)), (1,)), (lambda a: lax.squeeze(a, (0, 2)), (1, CHUNK, 1))],
        "transpose": [(lambda a: lax.transpose(a, (1, 0)), GRID),
                      (lambda a: lax.transpose(a, (2, 0, 1)), (2, CHUNK, 2))],
    }
    return {name: each((*NUMBERS, *BOOL), *made) for name, made in of_each.items()}


def _reducers() -> dict[str, Entry]:
    def reduced(function, types):
        axes = ((0, ROW), (1, GRID), ((0, 1), GRID))
        return each(types, *((lambda a, axis=axis: function(a, axis), shape) for axis, shape in axes))

    def placed(function):
        axes = ((0, ROW), (1, GRID))
        return each((*FLOATS, "int32"), *((lambda a, axis=axis: function(a, axis, np.int32), s) for axis, s in axes))

    return {
        "argmax": placed(lax.argmax),
        "argmin": placed(lax.argmin),
        "cumsum": each(NUMBERS, (lambda a: lax.cumsum(a, 0), ROW), (lambda a: lax.cumsum(a, 1, reverse=True), GRID),
                       (lambda a: lax.cumsum(a, 0), GRID)),
        "cummax": of(lambda a: lax.cummax(a, 0), GRID),
        "cummin": of(lambda a: lax.cummin(a, 1), GRID),
        "top_k": of(lambda a: lax.top_k(a, 2), ROW),
        "approx_top_k": of(lambda a: lax.approx_max_k(a, 2), ROW),
        "eq_to": binary(jax_primitives.eq_to_p.bind),
        "le_to": binary(jax_primitives.le_to_p.bind),
        "lt_to": binary(jax_primitives.lt_to_p.bind),
        "pmax": of(_among(lax.pmax), ROW),
        "pmin": of(_among(lax.pmin), ROW),
        "reduce_window_max": of(_largest_near, ROW),
        "reduce_window_min": of(lambda a: lax.reduce_window(a, np.inf, lax.min, (2,), (1,), "VALID"), ROW),
        "scatter-max": of(lambda a, b: a.at[1].max(b), ROW, ONE),
        "scatter-min": of(lambda a, b: a.at[1].min(b), ROW, ONE),
        "select_and_gather_add": of(lambda a, b: jax.jvp(_largest_near, (a,), (b,))[1], ROW, ROW),
        "select_and_scatter_add": of(jax.grad(lambda a: jnp.sum(_largest_near(a))), ROW),
        "bitcast_convert_type": of(lambda a: lax.bitcast_convert_type(a, f"int{8 * a.dtype.itemsize}"), ROW),
        "reduce_and": reduced(jnp.all, BOOL),
        "reduce_or": reduced(jnp.any, BOOL),
        "reduce_max": reduced(jnp.max, (*FLOATS, *INTEGERS)),
        "reduce_min": reduced(jnp.min, (*FLOATS, *INTEGERS)),
        "reduce_prod": reduced(functools.partial(jnp.prod, promote_integers=False), (*FLOATS, *COMPLEX, "int32")),
        "reduce_sum": reduced(functools.partial(jnp.sum, promote_integers=False), NUMBERS),
        "sort": several(
            each((*FLOATS, *INTEGERS), (lambda a: lax.sort(a), ROW), (lambda a: lax.sort(a, dimension=0), GRID)),
            of(lambda a, b: lax.sort((a, b), num_keys=1), ROW, ROW),
            of(lambda a, b: lax.sort((b, a), dimension=1), GRID, whole(GRID, 100)),
        ),
    }
# fmt: on


def _at(a, i):
    """Rows of the first axis."""
    return a.at[i].get(mode="clip")


def _along(a, i):
    """Entries of each row; 0 where there is none."""
    return jnp.take_along_axis(a, i, 1, mode="fill", fill_value=0)


# fmt: off
def _indexers() -> dict[str, Entry]:
    return {
        "dynamic_slice": each(
            NUMBERS, (lambda a, i: lax.dynamic_slice(a, (i,), (2,)), ROW, whole(ONE, 5)),
            (lambda a, i, j: lax.dynamic_slice(a, (i, j), (1, 2)), GRID, whole(ONE, 3), whole(ONE, 3)),
        ),
        "gather": each(NUMBERS, (_at, ROW, whole((2,), 5)), (_at, GRID, whole((4,), 3)),
                       (_along, GRID, whole((2, 2), 5))),
        "pad": each(NUMBERS, (lambda a, b: lax.pad(a, b, [(1, 0, 1)]), ROW, ONE),
                    (lambda a, b: lax.pad(a, b, [(0, 1, 0), (-1, 2, 0)]), GRID, ONE)),
        "broadcast_in_dim": each(NUMBERS, (lambda a: lax.broadcast_in_dim(a, ROW, ()), ONE),
                                 (lambda a: lax.broadcast_in_dim(a, (CHUNK, 1, CHUNK), (2,)), ROW),
                                 (lambda a: lax.broadcast_in_dim(a, (2, 2, CHUNK), (0, 2)), GRID)),
    }


DOTS = [  # (one operand, the other, contracted axes, batch axes)
    ((3,), (3,), ((0,), (0,)), ((), ())),
    ((), (), ((), ()), ((), ())),
    ((), (3,), ((), ()), ((), ())),
    ((3,), (2,), ((), ()), ((), ())),
    ((3,), (3, 2), ((0,), (0,)), ((), ())),
    ((2, 3), (3, 4), ((1,), (0,)), ((), ())),
    ((3, 2), (4, 3), ((0,), (1,)), ((), ())),
    ((2, 3), (2, 3), ((0, 1), (0, 1)), ((), ())),
    ((2, 3, 4), (4, 5, 2), ((0, 2), (2, 0)), ((), ())),
    ((2, 3, 4), (4, 5, 2), ((2, 0), (0, 2)), ((), ())),
    ((5, 3), (2, 4, 3), ((1,), (2,)), ((), ())),
    ((2, 3), (2, 3), ((1,), (1,)), ((0,), (0,))),
    ((2, 3), (3, 2, 4), ((1,), (0,)), ((0,), (1,))),
    ((3, 2, 4), (2, 4, 3), ((2,), (1,)), ((0, 1), (2, 0))),
    ((3, 2), (3, 4), ((), ()), ((0,), (0,))),
]
# fmt: on


def _dots() -> Entry:
    def plain(one, other, *axes):
        return of(lambda a, b: lax.dot_general(a, b, axes), one, other, types=NUMBERS)

    def named(**params):
        return lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())), **params)

    wide = jnp.float32
    return several(
        *(plain(*dot) for dot in DOTS),
        of(named(precision=("highest", "default")), GRID, (3, 4), types=("float32",)),
        of(named(preferred_element_type=wide), GRID, (3, 4), types=("bfloat16",)),
        of(named(preferred_element_type=jnp.int32), GRID, (3, 4), types=("uint8",)),
        of(named(preferred_element_type=wide), GRID, ((3, 4), "bfloat16", ANY), types=("float32",)),
    )


def _convolutions() -> Entry:
    def convolve(one, other, **params):
        def function(a, b):
            return lax.conv_general_dilated(a, b, **{"window_strides": (1,), "padding": "SAME", **params})

        return of(function, one, other, types=INEXACT)

    return several(
        convolve((2, 1, 5), (3, 1, 3)),
        convolve((2, 2, 5), (4, 1, 2), feature_group_count=2, padding="VALID"),
        convolve((4, 1, 5), (2, 1, 2), batch_group_count=2),
        convolve((2, 1, 5), (3, 1, 3), window_strides=(2,), padding=[(1, 2)], lhs_dilation=(2,)),
        convolve((2, 1, 6), (3, 1, 2), rhs_dilation=(2,)),
        convolve((1, 4, 5, 2), (2, 2, 2, 3), window_strides=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")),
        convolve((5, 2, 3), (4, 3, 2), dimension_numbers=("WNC", "WIO", "NWC"), precision="highest"),
    )


# Calls, loops and branches.


@jax.custom_jvp
def _with_jvp(a, b):
    return a * jnp.sin(b)


@_with_jvp.defjvp
def _with_jvp_rule(primals, tangents):
    (a, b), (da, db) = primals, tangents
    return _with_jvp(a, b), da * jnp.sin(b) + a * jnp.cos(b) * db


@jax.custom_vjp
def _with_vjp(a, b):
    return a * jnp.sin(b)


_with_vjp.defvjp(lambda a, b: (a * jnp.sin(b), (a, b)), lambda r, g: (g * jnp.sin(r[1]), g * r[0] * jnp.cos(r[1])))


def _called(how):
    def function(a, b):
        return how(lambda a, b: [a * jnp.sin(b), b * b])(a, b)

    return binary(function, INEXACT)


def _closed_call(function):
    """A function under a call that only JAX itself binds."""

    def call(*given):
        jaxpr = jax.make_jaxpr(jax.jit(function))(*given).jaxpr
        (equation,) = jaxpr.eqns
        params = {"call_jaxpr": equation.params["jaxpr"]}
        called = equation.replace(primitive=jax_primitives.closed_call_p, params=params)
        return jax.core.eval_jaxpr(jaxpr.replace(eqns=[called]), [], *given)

    return call


def _loops() -> dict[str, Entry]:
    def scan(a, b):
        def step(carry, x):
            return carry * jnp.sin(x), carry + b[0]

        return lax.scan(step, a, b)

    def loop(a, i):
        return lax.while_loop(lambda s: s[1] > 0, lambda s: (jnp.sin(s[0]), s[1] - 1), (a, i))[0]

    def branch(i, a, b):
        return lax.cond(i > 0, lambda a, b: [a * b, b], lambda a, b: [jnp.sin(a), a], a, b)

    return {
        "scan": of(scan, ONE, ROW, types=INEXACT),
        "while": several(*(of(loop, shape, whole(ONE, 3), types=("float32",)) for shape in (ONE, ROW))),
        "cond": several(*(of(branch, whole(ONE, 2), shape, shape, types=INEXACT) for shape in (ONE, ROW, GRID))),
    }


def _linear_of_a_rule(a, b, da, db):
    """The rule for reverse mode, before it is transposed."""
    return jax.jvp(_with_vjp, (a, b), (da, db))


def _complex_of_real() -> dict[str, Entry]:
    double = ("float32",)

    def called_out(how, **options):
        def call(a):
            return how(lambda a: a * np.complex64(1j), jax.ShapeDtypeStruct(a.shape, jnp.complex64), a, **options)

        return of(call, ROW, types=double)

    return {
        "complex": binary(lax.complex, double),
        "fft": several(
            of(lambda a: jnp.fft.rfft(a), ROW, types=double), of(lambda a: jnp.fft.fft(a), GRID, types=COMPLEX)
        ),
        "eig": of(lambda a: lax.linalg.eig(a)[0], (3, 3), types=double),
        "schur": of(lambda a: lax.linalg.schur(a), (3, 3), types=double),
        "pure_callback": called_out(jax.pure_callback, vmap_method="sequential"),
        "io_callback": called_out(jax.experimental.io_callback),
    }


def _largest_near(a):
    return lax.reduce_window(a, -np.inf, lax.max, (2,), (1,), "VALID")


def _among(reduce):
    """A reduction over the only device of a mesh."""

    def function(a):
        mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec()
        return jax.shard_map(lambda a: reduce(a, "i"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(a)

    return function


def _vary(a):
    """Within a `jax.shard_map`: an array that is the same on all devices, as one that need not be."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    varied = lambda a: lax.pcast(a, "rows", to="varying")[None]  # noqa: E731
    return jax.shard_map(varied, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("rows"))(a)


def _same_iota(a):
    return a * lax.iota(a.dtype, CHUNK) + lax.broadcasted_iota(a.dtype, (2, CHUNK), 0)[1]


def _alike() -> dict[str, Entry]:
    """Functions of `jax.lax` that are called as their primitive is."""
    kinds = {
        "cos cosh exp exp2 expm1 logistic sin sinh tan tanh": lambda function: unary(function, INEXACT),
        "log log1p rsqrt sqrt": lambda function: unary(function, INEXACT, POSITIVE),
        "ceil erf erfc floor is_finite round": unary,
        "real imag": lambda function: unary(function, COMPLEX),
        "ge gt le lt": _compare,
    }
    found = {name: entry(getattr(lax, name)) for names, entry in kinds.items() for name in names.split()}
    bits = {name: binary(getattr(lax, f"bitwise_{name}"), (*INTEGERS, *BOOL)) for name in ("and", "or", "xor")}
    return found | bits


# fmt: off
ENTRIES: dict[str, Entry] = {
    "abs": several(unary(lax.abs, (*FLOATS, "int32")), unary(lax.abs, COMPLEX, POSITIVE)),
    "add": several(binary(jnp.add, NUMBERS, shapes=BROADCAST), binary(lax.add, FLOATS, shapes=(((1, 3), (2, 3)),))),
    "add_any": binary(jax_primitives.add_jaxvals_p.bind, INEXACT),
    "atan2": binary(lax.atan2, FLOATS, (ANY, POSITIVE)),
    "cbrt": unary(lax.cbrt, FLOATS, POSITIVE),
    "clamp": _clamp(),
    "conv_general_dilated": _convolutions(),
    "convert_element_type": several(
        unary(lambda a: lax.convert_element_type(a, jnp.float16), FLOATS),
        unary(lambda a: lax.convert_element_type(a, jnp.float32), (*INTEGERS, *BOOL, "bfloat16")),
        unary(lambda a: lax.convert_element_type(a, jnp.complex64), ("float32", "bfloat16")),
        unary(lambda a: lax.convert_element_type(a, jnp.int32), FLOATS),
    ),
    "copy": unary(jnp.copy, (*NUMBERS, *BOOL)),
    "custom_jvp_call": binary(_with_jvp, INEXACT),
    "custom_lin": Entry(INEXACT, lambda t: [(_linear_of_a_rule, [_operand(ROW, t, ANY)] * 4)]),
    "custom_vjp_call": binary(_with_vjp, INEXACT),
    "closed_call": _called(_closed_call),
    "div": several(binary(jnp.divide, INEXACT, (ANY, POSITIVE), BROADCAST), binary(lax.div, INTEGERS)),
    "dot_general": _dots(),
    "eq": several(_compare(lax.eq), binary(lax.eq, (*COMPLEX, *BOOL))),
    "erf_inv": unary(lax.erf_inv, domain=UNIT),
    "integer_pow": several(*(unary(lambda a, n=n: lax.integer_pow(a, n), (*INEXACT, "int32")) for n in (3, 4)),
                           unary(lambda a: lax.integer_pow(a, -3), INEXACT, POSITIVE)),
    "iota": of(_same_iota, ROW, types=NUMBERS),
    "jit": _called(jax.jit),
    "max": binary(jnp.maximum, (*FLOATS, *INTEGERS), shapes=BROADCAST),
    "min": binary(jnp.minimum, (*FLOATS, *INTEGERS), shapes=BROADCAST),
    "mul": binary(jnp.multiply, NUMBERS, shapes=BROADCAST),
    "ne": several(_compare(lax.ne), binary(lax.ne, (*COMPLEX, *BOOL))),
    "neg": unary(lax.neg, (*INEXACT, "int32")),
    "not": unary(lax.bitwise_not, (*INTEGERS, *BOOL)),
    "pow": several(
        binary(lax.pow, INEXACT, (POSITIVE, POSITIVE)),
        of(_whole_power, ROW, whole(ROW, 4), types=FLOATS),
    ),
    "pvary": unary(_vary, ("float32",)),
    "reduce_precision": unary(lambda a: lax.reduce_precision(a, 8, 4), FLOATS),
    "rem": binary(lax.rem, (*FLOATS, *INTEGERS), (ANY, POSITIVE)),
    "remat2": _called(jax.checkpoint),
    "select_n": _select_n(),
    "sign": unary(lax.sign, (*FLOATS, "int32")),
    "square": unary(lax.square, NUMBERS),
    "stop_gradient": unary(lax.stop_gradient, INEXACT),
    "sub": binary(jnp.subtract, NUMBERS, shapes=BROADCAST),
    **_alike(), **_shapers(), **_reducers(), **_indexers(), **_loops(), **_complex_of_real(),
}
# fmt: on


def examples(name: str, *dtypes: str) -> list[Example]:
    """The examples of a primitive in these types."""
    return [example for dtype in dtypes for example in ENTRIES[name].examples(name, dtype)]
