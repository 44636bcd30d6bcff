"""A program run by the library and by the plain loop, and what differs."""

from __future__ import annotations

import contextlib
import linecache
import traceback
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treescan
from treescan._faster import in_bulk, products
from treescan._remat import remat

from .data import Element, element
from .oracle import Plain, inexact, wide
from .programs import Leaf, Program
from .render import source

TOLERANCE = {"float64": 1e-8, "float32": 3e-3, "bfloat16": 0.3}
SETS = 3


class Failure(Exception):
    """What is wrong: a first line that tells its kind, and the rest."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind}\n{text}")
        self.kind, self.text = kind, text


class Refused(Exception):
    """A TreescanError."""


class Skipped(Exception):
    """Numbers that are not finite in the plain loop either."""


_COUNT = iter(range(10**9))


def load(program: Program) -> dict[str, Any]:
    """The names that the program's source defines."""
    text = source(program)
    file = f"<program {next(_COUNT)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "generated_program"}
    exec(compile(text, file, "exec"), names)
    return names


def library(program: Program, run: Callable[..., Any]) -> Callable[..., Any]:
    """`(init, xs, ws, flags, cots, tangents)` to a dict of what the program's mode asks for."""
    axes = [[0 if leaf.mapped else None for leaf in leaves] for _, leaves in _parts(program)]
    mapped = jax.vmap(run, in_axes=(*axes, 0)) if program.outer else run

    def everything(init: Any, xs: Any, ws: Any, flags: Any, cots: Any, tangents: Any) -> dict[str, Any]:
        given, n, m = [*init, *xs, *ws], len(init), len(init) + len(xs)

        def outputs(floats: Any) -> Any:
            left = iter(floats)
            merged = [next(left) if inexact(a) else a for a in given]
            out = mapped(merged[:n], merged[n:m], merged[m:], flags)
            return [a for a in jax.tree.leaves(out) if inexact(a)], out

        floats = [a for a in given if inexact(a)]
        found: dict[str, Any] = {}
        if "vjp" in program.mode:
            _, pull, found["out"] = jax.vjp(outputs, floats, has_aux=True)
            found["grads"] = pull(cots)[0]
            if program.seed % 3 == 0:  # where nothing is differentiated, padded rows may see their own values
                found["forward"] = outputs(floats)[1]
        else:
            found["out"] = outputs(floats)[1]
        if "jvp" in program.mode:
            found["tangents"] = jax.jvp(lambda f: outputs(f)[0], (floats,), (tangents,))[1]
        if "hvp" in program.mode:
            gradient = lambda f: jax.vjp(lambda g: outputs(g)[0], f)[1](cots)[0]  # noqa: E731
            found["hvp"] = jax.jvp(gradient, (floats,), (tangents,))[1]
        return found

    return everything


@contextlib.contextmanager
def _sized(program: Program) -> Any:
    """Within it loops as small as these are rewritten as large ones are, by either plan of `remat="auto"`."""
    with contextlib.ExitStack() as stack:
        if program.option("remat") == "'auto'":
            of_remat = {"LEAST_STEPS": 2, "LARGE": 0 if program.seed % 2 else 2**60}
            stack.enter_context(unittest.mock.patch.multiple(remat, **of_remat))
            stack.enter_context(unittest.mock.patch.object(in_bulk, "PAYS", 0))
        if program.seed % 4 == 1:
            stack.enter_context(unittest.mock.patch.object(products, "LARGE", 1))
        yield


def check(program: Program) -> int:
    """Raises Failure if the program is not what the plain loop is; else the number of sets compared."""
    loose = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with jax.enable_x64(program.dtype == "float64"), loose[0], loose[1], _sized(program):
        names = load(program)
        plain = Plain(program, names)
        everything, values = (library(each, names["run"]) for each in (program, program.replace(mode=("value",))))
        compiled = jax.jit(everything) if program.context == "jit" else everything
        rng = np.random.default_rng(program.seed)
        done, types = 0, None
        for _ in range(SETS if program.context == "jit" else 1):
            elements = [element(rng, program)]
            elements += [element(rng, program, elements[0]) for _ in range(program.outer - 1)]
            with contextlib.suppress(Skipped):
                types = _check_set(program, plain, values, compiled, elements, rng, types)
                done += 1
    return done


def _parts(program: Program) -> list[tuple[str, tuple[Leaf, ...]]]:
    """The fields of an element, and what the program says of their leaves."""
    return [("init", program.carry), ("xs", program.xs), ("weights", program.weights)]


def _stack(program: Program, elements: list[Element]) -> tuple[Any, ...]:
    if not program.outer:
        first = elements[0]
        return first.init, first.xs, first.weights, list(first.flags.given)
    parts = [
        [
            np.stack([getattr(e, name)[i] for e in elements]) if leaf.mapped else getattr(elements[0], name)[i]
            for i, leaf in enumerate(leaves)
        ]
        for name, leaves in _parts(program)
    ]
    flags = [np.stack(group) for group in zip(*(e.flags.given for e in elements), strict=True)]
    return *parts, flags


def _check_set(
    program: Program, plain: Plain, values: Any, compiled: Any, elements: list[Element], rng: Any, types: Any
) -> Any:
    names = plain.names
    given = _stack(program, elements)
    if program.context != "jit":
        given = jax.tree.map(jnp.asarray, given)
    runs = [plain.run(e) for e in elements]
    if not all(_is_tame(a) for final, ys, _ in runs for out in (final, *ys.values()) for a in out):
        raise Skipped
    floats = [a for part in given[:3] for a in part if inexact(a)]
    tangents = [_random(rng, a) for a in floats]
    if types is None:
        with _explained(program):
            types = jax.eval_shape(lambda *given: values(*given, None, None)["out"], *given)
    with _explained(program), jax.disable_jit(program.context == "disable_jit"):
        cots = [_random(rng, t) for t in jax.tree.leaves(types) if inexact(t)]
        names["SEEN"].clear()
        found = jax.block_until_ready(compiled(*given, cots, tangents))
        jax.effects_barrier()
        if not all(names["SEEN"]):
            raise Failure("an effect saw padding")
    left = iter(map(np.asarray, cots))
    all_cots = [next(left) if inexact(t) else None for t in jax.tree.leaves(types)]
    own = [[None if c is None else c[i] if program.outer else c for c in all_cots] for i in range(len(elements))]
    per_element = [(each[: len(types[0])], each[len(types[0]) :]) for each in own]
    try:
        for way in ("out", "forward"):
            if way in found:
                _compare_values(program, plain, elements, runs, found[way])
    except Failure:
        if _rounding_decides(program, plain, elements, runs):
            raise Skipped from None
        raise
    if "grads" not in found and "tangents" not in found and "hvp" not in found:
        return types
    grads = _gradients(program, plain, elements, runs, per_element)
    if not all(np.isfinite(g).all() and np.max(np.abs(g), initial=0) < 1e6 for g in grads):
        raise Skipped
    if "grads" in found:
        try:
            _compare_all(program, "gradient", found["grads"], grads, _names(program))
        except Failure:
            if _rounding_decides_gradient(program, plain, elements, per_element, grads):
                raise Skipped from None
            raise
        _no_gradient_of_padding(program, elements, found["grads"])
    if "tangents" in found and all(np.isfinite(wide(a)).all() for a in floats):
        got = sum(np.sum(wide(c) * wide(t)).real for c, t in zip(cots, found["tangents"], strict=True))
        want = sum(np.sum(g * wide(t)).real for g, t in zip(grads, tangents, strict=True))
        scale = sum(np.sum(np.abs(wide(c) * wide(t))) for c, t in zip(cots, found["tangents"], strict=True))
        scale += sum(np.sum(np.abs(g * wide(t))) for g, t in zip(grads, tangents, strict=True))
        if not abs(got - want) <= tolerance_of(program) * max(1, scale):
            raise Failure("wrong jvp", f"{got} instead of {want}")
    elif "tangents" in found and not all(np.isfinite(wide(t)).all() for t in found["tangents"]):
        raise Failure("jvp is not finite", "where the gradient is")
    if "hvp" in found:
        _compare_second(program, plain, elements, per_element, tangents, found["hvp"])
    return types


def _is_tame(array: Any) -> bool:
    """Whether a result is finite, and so small that rounding is not all there is to it."""
    values = wide(array)
    return bool(np.isfinite(values).all() and np.max(np.abs(values), initial=0) < 1e6)


def _rounding_decides(program: Program, plain: Plain, elements: list[Element], runs: Any) -> bool:
    """Whether the plain loop itself gives other values when its arguments change in their last digits."""

    def flat(run: Any) -> list[np.ndarray]:
        final, ys, _ = run
        return [wide(a) for out in (final, *(ys[key] for key in sorted(ys))) for a in out]

    return any(
        _differ(program, flat(run), flat(plain.run(near)))
        for run, near in zip(runs, _nearby(program, elements), strict=True)
    )


def _rounding_decides_gradient(program: Program, plain: Plain, elements: list[Element], cots: Any, grads: Any) -> bool:
    """The same of the plain gradient."""
    near = _nearby(program, elements)
    return _differ(program, grads, _gradients(program, plain, near, [plain.run(e) for e in near], cots))


def _nearby(program: Program, elements: list[Element]) -> list[Element]:
    """Elements whose numbers differ in their last digits."""
    rng = np.random.default_rng(program.seed)

    def moved(a: Any) -> Any:
        if not inexact(a):
            return a
        step = 4 * float(jnp.finfo(a.dtype).eps)
        return (a * (1 + step * rng.normal(size=a.shape))).astype(a.dtype)

    return [Element(*([moved(a) for a in part] for part in e[:3]), e.flags) for e in elements]


def _differ(program: Program, mine: list[np.ndarray], others: list[np.ndarray]) -> bool:
    largest = max([1.0, *(float(np.max(np.abs(a), initial=0)) for a in mine)])
    apart = max([0.0, *(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(mine, others, strict=True))])
    return apart > 0.1 * tolerance_of(program) * largest


@contextlib.contextmanager
def _explained(program: Program) -> Any:
    """TreescanErrors are refusals, all others failures."""
    try:
        yield
    except treescan.TreescanError as error:
        raise Refused(str(error).splitlines()[0]) from error
    except Exception as error:
        if "Failed to translate module to LLVM IR" in str(error):  # a fault of XLA's, in some unrolled loops
            raise Refused("XLA does not compile it") from error
        first = next((line for line in str(error).splitlines() if line.strip()), "")[:160]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/treescan/" in f.filename]
        where = f" [{frames[-1].filename.rsplit('/treescan/', 1)[1]}:{frames[-1].lineno}]" if frames else ""
        raise Failure(f"{type(error).__name__}{where}: {first}", traceback.format_exc()[-6000:]) from error


def tolerance_of(program: Program) -> float:
    """Beside the largest number."""
    low = program.dtype == "float64" and any("float32" in instruction.text for instruction in program.body)
    return 3e-4 if low else TOLERANCE[program.dtype]


def _random(rng: Any, like: Any) -> Any:
    values = rng.normal(size=like.shape)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        values = values + 1j * rng.normal(size=like.shape)
    return np.asarray(values).astype(like.dtype)


def _names(program: Program) -> list[str]:
    return [leaf.name for _, leaves in _parts(program) for leaf in leaves if leaf.type.kind in "fc"]


def _compare_values(program: Program, plain: Plain, elements: Any, runs: Any, out: Any) -> None:
    for i, (e, (final, ys, _)) in enumerate(zip(elements, runs, strict=True)):
        mine = jax.tree.map(lambda a, i=i: np.asarray(a)[i] if program.outer else np.asarray(a), out)
        want = plain.stacked(e, ys, mine[1])
        if program.verb != "accumulate":
            _compare_all(program, "carry", mine[0], final, [f"leaf {j} of element {i}" for j in range(len(final))])
        _compare_all(program, "output", mine[1], want, [f"output {j} of element {i}" for j in range(len(want))])


def _gradients(program: Program, plain: Plain, elements: Any, runs: Any, cots: Any) -> list[np.ndarray]:
    """As the library gives them: stacked where mapped, added up elsewhere; of floats alone, in order."""
    all_grads = [plain.gradient(e, run[2], c if program.verb != "accumulate" else (_zeros(plain, e), c[1]))
                 for e, run, c in zip(elements, runs, cots, strict=True)]  # fmt: skip
    results = []
    for part, (_, leaves) in enumerate(_parts(program)):
        columns = [
            _of_arguments(program, plain, e, g[0]) if part == 0 else g[part]
            for e, g in zip(elements, all_grads, strict=True)
        ]
        for i, leaf in enumerate(leaves):
            if leaf.type.kind not in "fc":
                continue
            values = [column[i] for column in columns]
            results.append(values[0] if not program.outer else np.stack(values) if leaf.mapped else sum(values))
    return results


def _zeros(plain: Plain, e: Element) -> list[np.ndarray]:
    return [np.zeros_like(wide(leaf)) if inexact(leaf) else None for leaf in plain.leaves(e)]


def _of_arguments(program: Program, plain: Plain, e: Element, leaves: list[Any]) -> list[Any]:
    """The gradient with respect to the arrays that custom carries are made of."""
    if not any(leaf.custom for leaf in program.carry):
        return leaves
    like = plain.leaves(e)
    cots = [jnp.asarray(c, a.dtype) if c is not None else np.zeros(a.shape, jax.dtypes.float0)
            for c, a in zip(leaves, like, strict=True)]  # fmt: skip
    _, pull = jax.vjp(lambda init: [jnp.asarray(a) for a in jax.tree.leaves(plain.names["make_init"](init))],
                      [jnp.asarray(a) for a in e.init])  # fmt: skip
    return [None if g.dtype == jax.dtypes.float0 else wide(g) for g in pull(cots)[0]]


def _compare_all(program: Program, what: str, got: Any, want: Any, names: list[str], tolerance: float = 0) -> None:
    tolerance = tolerance or tolerance_of(program)
    finite = [wide(w)[np.isfinite(wide(w))] for w in want]
    scale = max([1.0, *(float(np.max(np.abs(f), initial=0)) for f in finite)])
    for a, b, name in zip(got, want, names, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            raise Failure(f"wrong {what}", f"{name}: shape {a.shape} instead of {b.shape}")
        low = 1e5 if a.dtype in (np.float32, np.complex64) and program.dtype == "float64" else 1
        x, y = wide(a), wide(b)
        same = (np.isnan(x) & np.isnan(y)) | (x == y) | (np.abs(x - y) <= tolerance * low * scale)
        if not same.all():
            kind = f"{what} is not finite" if not np.isfinite(x[~same]).all() else f"wrong {what}"
            raise Failure(kind, f"{name}: got\n{a}\ninstead of\n{b}")


def _no_gradient_of_padding(program: Program, elements: Any, grads: Any) -> None:
    left = iter(grads)
    for leaves in (program.carry, program.xs):
        for i, leaf in enumerate(leaves):
            if leaf.type.kind not in "fc":
                continue
            g = np.asarray(next(left))
            if leaves is program.xs and not leaf.whole and leaf.type.rows and (leaf.mapped or not program.outer):
                for k, e in enumerate(elements):
                    mine = g[k] if program.outer else g
                    n, axis = len(program.batch), (leaf.axis or 0) + 1
                    mine = np.moveaxis(mine, tuple(range(axis, axis + n)), tuple(range(1, 1 + n)))
                    if np.any(mine[~e.flags.valid] != 0):
                        raise Failure("gradient of padding", f"{leaf.name} {i}: {mine}")


def _compare_second(program: Program, plain: Plain, elements: Any, cots: Any, tangents: Any, got: Any) -> None:
    """Against differences of the plain gradient."""
    wanted = []
    for size in (1e-5, 3e-6):
        sides = []
        for sign in (1, -1):
            moved = [_moved(program, e, k, tangents, sign * size) for k, e in enumerate(elements)]
            runs = [plain.run(e) for e in moved]
            sides.append(_gradients(program, plain, moved, runs, cots))
        wanted.append([(a - b) / (2 * size) for a, b in zip(*sides, strict=True)])
    if all(_is_tame(w) for w in wanted[0]):  # beyond that, differences are rounding
        largest = max([1.0, *(float(np.max(np.abs(w), initial=0)) for w in wanted[0])])
        noise = max([0.0, *(float(np.max(np.abs(v - w), initial=0)) for v, w in zip(*wanted, strict=True))]) / largest
        tolerance = max(1e-5, 10 * noise, 3 * tolerance_of(program))
        _compare_all(program, "second derivative", got, wanted[1], _names(program), tolerance)


def _moved(program: Program, e: Element, k: int, tangents: Any, size: float) -> Element:
    left, parts = iter(tangents), []
    for name, leaves in _parts(program):
        arrays = []
        for a, leaf in zip(getattr(e, name), leaves, strict=True):
            if leaf.type.kind not in "fc":
                arrays.append(a)
                continue
            t = np.asarray(next(left))
            arrays.append(a + size * (t[k] if program.outer and leaf.mapped else t))
        parts.append(arrays)
    return Element(*parts, e.flags)
