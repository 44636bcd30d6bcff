"""What a stream reads: arrays, a function of (start, n), or an iterator over parts."""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from ..._arguments import without_axis
from ..._avals import Array, PyTree, TreeDef, describe_node, is_key, is_weak, type_of
from ..._batches.batch import Packed, Padded
from ..._errors import Fault, Misuse, Row, TypeMisuse
from ..._tree import is_number, leaves_with_path


class Read(NamedTuple):
    """A part that was read.

    Attributes:
        number: that of the part, in the order of the run.
        start: the position of its first step.
        steps: how many steps it has.
        done: how many steps of the run are done after it.
        xs: its xs.
        state: the state of the source after it, as a text; None: it was not asked for, or the source has none.
    """

    number: int
    start: int
    steps: int
    done: int
    xs: PyTree
    state: str | None = None


class Source(Protocol):
    """What parts are read from."""

    @property
    def length(self) -> int | None:
        """The number of steps; None: it is not known before the end."""
        ...

    @property
    def part(self) -> int:
        """The steps of a part, unless it is the last one."""
        ...

    @property
    def reads_once(self) -> bool:
        """Whether a part that was read is gone, as one of an iterator is."""
        ...

    def read(self, done: int, state: str | None, keeps: Callable[[int], bool]) -> Iterator[Read]:
        """Reads the parts that follow the first `done` ones.

        Args:
            done: how many parts are not needed.
            state: the state of the source after these, if it has one.
            keeps: whether the state after a part is needed, by its number.
        """
        ...


def source_of(source: Any, length: int | None, part: int, *, reverse: bool) -> Source:
    """The source that the user means.

    Raises:
        Fault: for an `ArgumentError` if it is none, or does not fit `length` or `reverse`.
    """
    if isinstance(source, Padded | Packed):
        kind = type(source).__name__
        raise TypeMisuse(
            f"{{call}}: `source` is a `{kind}`, which {{verb}} does not take.",
            "Pass `source.data`, and `lengths=source.lengths`."
            if kind == "Padded"
            else "Pad the sequences instead, and pass `lengths`.",
        )
    if callable(source) and not _is_array(source):
        if inspect.isgeneratorfunction(source):
            cure = f"Call it: `{source.__name__}()` is an iterator over parts."
            raise TypeMisuse("{call}: `source` is a function that makes an iterator.", cure)
        if length is None:
            raise Misuse(
                "{call}: `source` is a function of (start, n), so the number of steps is unknown.",
                "Pass `length=`, the number of steps of the whole run.",
            )
        return _Sliced(source, length, part, reverse)
    if source is None:
        if length is None:
            raise Misuse("{call}: there is no source, so the number of steps is unknown.", "Pass `length=`.")
        return _Sliced(_nothing, length, part, reverse)
    if isinstance(source, Iterator) or _is_iterable(source):
        if reverse:
            raise Misuse(
                f"{{call}}: `reverse=True` begins with the last part, but `source` is {describe_node(source)}, "
                "of which only the next part can be read.",
                "Pass arrays, a `np.memmap` for example, or a function of (start, n) with `length=`.",
            )
        return _InOrder(iter(source), length, part)
    steps = steps_of(source, "source")
    if length is not None and length != steps:
        raise Misuse(
            f"{{call}}: `length` is {length}, but `source` has {steps} steps.",
            "Leave `length` out, or slice the source.",
        )
    return _Sliced(lambda start, n: jax.tree.map(lambda leaf: _slice(leaf, start, n), source), steps, part, reverse)


def _is_iterable(node: object) -> TypeGuard[Iterable[PyTree]]:
    """Whether it is one object that gives parts, and not an array, a tree or a text."""
    leaves = jax.tree.leaves(node)
    is_leaf = len(leaves) == 1 and leaves[0] is node
    return is_leaf and isinstance(node, Iterable) and not (_is_array(node) or isinstance(node, str | bytes))


def _is_array(leaf: object) -> bool:
    return all(hasattr(leaf, name) for name in ("shape", "dtype", "__getitem__"))


@dataclass
class _Checked:
    """Checks parts against the first one."""

    structure: TreeDef = None
    types: dict[str, str] = field(default_factory=dict[str, str])

    def __call__(self, number: int, start: int, steps: int, part: PyTree) -> Read:
        part = jax.tree.map(lambda leaf: _slice(leaf, 0, steps), part)
        structure: TreeDef = jax.tree.structure(part)
        types = {path: _type_of_step(leaf) for path, leaf in leaves_with_path("x", part)}
        if self.structure is None:
            self.structure, self.types = structure, types
        if structure != self.structure or types != self.types:
            raise self._other(start, types)
        return Read(number, start, steps, start + steps, part)

    def _other(self, start: int, types: dict[str, str]) -> Fault:
        none = "(missing)"
        paths = [path for path in self.types | types if self.types.get(path) != types.get(path)]
        return Misuse(
            f"{{call}}: the part at step {start} differs from the first part that was read.",
            "All parts have the same structure and dtypes, because one program runs them. Convert them in the source."
            if paths
            else "They have the same leaves, but not in the same containers.",
            header=("leaf", "first part", "this part"),
            rows=[Row(path, self.types.get(path, none), types.get(path, none)) for path in paths],
        )


def _type_of_step(leaf: Any) -> str:
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)  # JAX 0.12 warns of what it narrows
    return str(ShapedArray(leaf.shape[1:], dtype))


def _nothing(start: int, n: int) -> None:
    """The part of a loop without inputs."""


@dataclass
class _Sliced:
    """A source of which any part can be read."""

    take: Callable[[int, int], PyTree]
    length: int
    part: int
    reverse: bool
    reads_once: bool = False

    def __post_init__(self) -> None:
        self.part = min(self.part, self.length) or self.part

    def read(self, done: int, state: str | None, keeps: Callable[[int], bool]) -> Iterator[Read]:
        """Reads the parts that follow the first `done` ones."""
        checked, starts = _Checked(), range(0, self.length, self.part)
        for number, start in list(enumerate(starts[::-1] if self.reverse else starts))[done:]:
            steps = min(self.part, self.length - start)
            try:
                with _noted(start):
                    part = self.take(start, steps)
            except StopIteration as end:  # in a generator, as this is, Python makes a RuntimeError of it
                raise Misuse(
                    f"{{call}}: the source ended at step {start}, but `length` is {self.length}. It raised "
                    f"StopIteration for ({start}, {steps}).",
                    "It is called for each part, and returns its steps. An iterator over parts is a source itself.",
                    cause=end,
                ) from None
            if part is None and self.take is not _nothing:
                raise Misuse(
                    f"{{call}}: the source returned None for ({start}, {steps}).",
                    "It is called with (start, n), and returns the n steps from `start` on: leaves `[n, ...]`.",
                )
            there = steps_of(part, "x") if jax.tree.leaves(part) else steps
            if there != steps:
                raise Misuse(
                    f"{{call}}: the source returned {there} steps for ({start}, {steps}).",
                    "It is called with (start, n), and returns the n steps from `start` on: leaves `[n, ...]`.",
                )
            read = checked(number, start, steps, part)
            yield read._replace(done=self.length - start) if self.reverse else read


@dataclass
class _InOrder:
    """A source of which only the next part can be read."""

    parts: Iterator[PyTree]
    length: int | None
    part: int
    reads_once: bool = True

    def read(self, done: int, state: str | None, keeps: Callable[[int], bool]) -> Iterator[Read]:
        """Reads the parts that follow the first `done` ones. Without a state these are read too."""
        checked, number, start = _Checked(), 0, 0
        if state is not None:
            cast(Any, self.parts).set_state(_from_text(state))
            number, start = done, done * self.part
        while self.length is None or start < self.length:
            part = self._next(start)
            if part is _END:
                break
            steps = self._steps(number, start, steps_of(part, "x"))
            if number >= done:
                kept = self._state() if keeps(number) else None
                yield checked(number, start, steps, part)._replace(state=kept)
            number, start = number + 1, start + steps
        if self.length is not None and start < self.length:
            raise Misuse(
                f"{{call}}: the source ended after {start} steps, but `length` is {self.length}.",
                "Leave `length` out to run the steps that are there, or pass a source with as many.",
            )

    def _next(self, start: int) -> PyTree:
        with _noted(start):
            return next(self.parts, _END)

    def _steps(self, number: int, start: int, there: int) -> int:
        """How many steps of a part are run, which has so many; those beyond `length` are not."""
        left = self.part if self.length is None else self.length - start
        says = f"{{call}}: the part at step {start} has {there} steps, but `part` is {self.part}"
        if there > self.part or there == 0:
            raise Misuse(
                f"{says}.",
                f"Pass `part={there}`, if all parts have as many." if there else "Leave empty parts out.",
                "Parts of an iterator are neither cut nor joined, because its state is only known between two parts.",
            )
        if there < min(self.part, left) and self._next(start + there) is not _END:
            raise Misuse(
                f"{says}, and it is not the last one.",
                f"Pass `part={there}`, if all parts have as many."
                if number == 0
                else f"Make parts of {self.part} steps. Only the last one may be shorter.",
            )
        return min(there, left)

    def _state(self) -> str | None:
        get: Any = getattr(self.parts, "get_state", None)
        return None if get is None else _as_text(get())


_END: Any = object()


@contextlib.contextmanager
def _noted(start: int) -> Generator[None]:
    """Adds to what the source raises which part was read."""
    try:
        yield
    except Exception as error:
        error.add_note(f"The source of `treescan.stream` raised this for the part at step {start}.")
        raise


def _as_text(state: object) -> str:
    """The state of an iterator as a text: what JSON can hold, or bytes."""
    if isinstance(state, bytes):
        return json.dumps({"bytes": base64.b64encode(state).decode()})
    try:
        return json.dumps({"json": state})
    except (TypeError, ValueError):
        raise TypeMisuse(
            f"{{call}}: `get_state()` of the source returned {describe_node(state)}, which a checkpoint cannot hold.",
            "It returns bytes, or what JSON can hold: dicts, lists, numbers and texts.",
        ) from None


def _from_text(text: str) -> Any:
    kind, value = json.loads(text).popitem()
    return base64.b64decode(value) if kind == "bytes" else value


def steps_of(tree: PyTree, root: str) -> int:
    """The size of the first axis of all leaves."""
    leaves = leaves_with_path(root, tree)
    strange = [
        (path, x) for path, x in leaves if type_of(x) is None and (not _is_array(x) or isinstance(x, np.ndarray))
    ]
    for path, leaf in strange:
        raise TypeMisuse(
            f"{{call}}: {path} is {describe_node(leaf)}, but must be an array of numbers.",
            "A source is a tree of arrays `[T, ...]`, an iterator over parts of it, or a function of (start, n). To "
            'read a file part by part, pass `np.load(path, mmap_mode="r")`.',
        )
    if not all(_has_axis(leaf) for _, leaf in leaves):
        bare = without_axis(root, tree)
        lists = [path for path, node in bare if isinstance(node, list | tuple)]
        made = "np.asarray" if is_number(tree) else "treescan.stack"
        parts = f"A part holds `part` steps, not a single one: `{made}` makes one of a list of steps. "
        raise Misuse(
            f"{{call}}: `{root}` has leaves without an axis of steps.",
            f"{parts * (root == 'x')}The first axis of every leaf is the steps.",
            *(f"Make an array of the numbers, `np.asarray({path})`." for path in lists[:1]),
            rows=[Row(path, "an axis of steps", describe_node(node)) for path, node in bare],
        )
    sizes = {leaf.shape[0] for _, leaf in leaves}
    if not sizes:
        raise Misuse("{call}: `source` holds no arrays.", "Pass None, and `length`, for a loop without inputs.")
    if len(sizes) > 1:
        raise Misuse(
            f"{{call}}: the leaves of `{root}` do not have the same number of steps.",
            "The first axis of every leaf is the steps. For a list of parts, pass `iter(parts)`.",
            header=("leaf", "steps", "is"),
            rows=[Row(path, str(leaf.shape[0]), describe_node(leaf)) for path, leaf in leaves],
        )
    return int(sizes.pop())


def _has_axis(leaf: object) -> bool:
    return bool(getattr(leaf, "shape", ()))


def _slice(leaf: Any, start: int, steps: int) -> Array | np.ndarray:
    """Some steps of a leaf, read now: a copy, unless JAX holds it."""
    if isinstance(leaf, jax.Array):
        if is_key(leaf) or is_weak(leaf) or len(leaf.devices()) > 1 or next(iter(leaf.devices())).platform != "cpu":
            is_whole = start == 0 and steps == leaf.shape[0]
            return leaf if is_whole else jax.lax.dynamic_slice_in_dim(leaf, start, steps)
        leaf = np.asarray(leaf)
    return np.array(leaf[start : start + steps])


def padded(read: Read, part: int) -> Read:
    """A part with as many steps as a whole one. The last step is repeated, and not read."""
    missing = part - read.steps

    def pad(leaf: Array | np.ndarray) -> Array | np.ndarray:
        library: Any = jnp if isinstance(leaf, jax.Array) else np
        return library.concatenate([leaf, library.broadcast_to(leaf[-1:], (missing, *leaf.shape[1:]))])

    return read._replace(xs=jax.tree.map(pad, read.xs)) if missing else read
