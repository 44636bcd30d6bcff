"""Options of strangers: what is put around each step, and what it is fed. Their objects are checked as they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._avals import PyTree, describe_argument, describe_leaf, shape_of
from .._body.carry import agree, find_differences
from .._errors import Fault, PluginFault, TypeMisuse, accepts
from .._loop.feed import Feed, Slot
from .._loop.loop import Loop, Step, is_untraced
from .._rows.checks import check_slots
from .._trace.hoist import wrapped
from .._transforms.transform import Stage, Transform
from .._tree import Static
from ..options import Around, Option


def around_steps(options: Any) -> list[Transform]:
    """The transforms of objects that are options.

    Raises:
        Fault: for an `ArgumentError` if one of them is none, or cannot be part of a program.
    """
    if isinstance(options, Option) or not isinstance(options, Sequence):
        cure = "Write it in brackets: `options=[option]`." if isinstance(options, Option) else _KINDS
        raise TypeMisuse(f"{{call}}: `options` must be a list of options, got {describe_argument(options)}.", cure)
    transforms = list[Transform]()
    for place, option in enumerate(options):
        name = f"options[{place}]"
        if not isinstance(option, Option):
            is_class = isinstance(option, type) and issubclass(option, Option)
            cure = f"Pass an instance: `{option.__name__}(...)`." if is_class else _KINDS
            raise TypeMisuse(f"{{call}}: `{name}` is no option: it is {describe_argument(option)}.", cure)
        if not isinstance(option.around, Around):
            raise PluginFault(
                f"{{call}}: {who(option)} says that it is around {describe_argument(option.around)}.",
                "`around` is one of `Around.BODY`, `Around.MASK` and `Around.REMAT`.",
            )
        if not accepts(option, 4):
            raise PluginFault(f"{{call}}: {who(option)} cannot be called with (step, consts, state, feed).", _CALLED)
        try:
            hash(option)
        except TypeError as error:
            raise PluginFault(
                f"{{call}}: {who(option)} has no hash, but it is part of the program.",
                "Make its class a dataclass with `frozen=True`. It may hold numbers and tuples, and no arrays: these "
                "belong to the carry or to `feeds`.",
                cause=error,
            ) from None
        transforms += _OF[option.around](Static(option))
    return transforms


_CALLED = (
    "Write it as `def __call__(self, step, consts, state, feed): ...`. It calls `step(consts, state, feed)`, and "
    "returns what that returns, the next state and y."
)
_FED = (
    "A feed has `x`, `position` and `valid`. Anything else is in a `Slot`, a class attribute that "
    "`feeds(self, length)` names, and `slot.of(feed)` reads."
)
_KINDS = "Each is an object of a subclass of `treescan.options.Option`."


def who(option: Option) -> str:
    """An option, by its class and the package that this comes from."""
    kind = type(option)
    return f"the option `{kind.__qualname__}` of `{kind.__module__.partition('.')[0]}`"


def _option(holder: Any) -> Option:
    """The option that a step or a transform holds, which is equal to another as `Static` says."""
    return holder.given.value


@dataclass(frozen=True)
class WithOption:
    """A step with what an option adds. What the option alone is fed goes no further: the step is traced without it."""

    step: Step
    given: Static
    fed: tuple[Slot[Any], ...] = ()

    option = property(_option)

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        returned, failed = list[tuple[PyTree, PyTree]](), list[Exception]()

        def step(consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
            for slot in self.fed:
                feed = slot.put(feed, None)
            try:
                returned.append(self.step(consts, state, feed))
            except Exception as error:  # of the body, or of another option
                failed.append(error)
                raise
            return returned[-1]

        try:
            result: Any = self.option(step, consts, state, feed)
        except Exception as error:
            if error in failed or isinstance(error, Fault):
                raise
            if breach := _breach(error, self.option, feed):
                raise PluginFault(f"{{call}}: {who(self.option)} {breach[0]}", breach[1], cause=error) from None
            error.add_note(f"{who(self.option)[0].upper()}{who(self.option)[1:]} raised this.")
            raise
        if not isinstance(result, tuple) or len(result) != 2:
            raise PluginFault(
                f"{{call}}: {who(self.option)} returned {describe_argument(result)}.",
                "It returns the next state and y, as `step(consts, state, feed)` does.",
            )
        expected, y = returned[-1] if returned else (state, result[1])
        self._check("state", expected, result[0])
        if self.option.around is not Around.BODY:
            self._check("y", y, result[1])
        return result

    def _check(self, name: str, expected: PyTree, got: PyTree) -> None:
        if agree(expected, got):
            return
        raise PluginFault(
            f"{{call}}: {who(self.option)} returned a {name} of other types than the step that it is around.",
            f"The {name} keeps the structure, shapes and dtypes that `step(consts, state, feed)` returns.",
            header=("leaf", "step", "option"),
            rows=[difference.row for difference in find_differences(name, (), expected, got)],
        )


def _breach(error: Exception, option: Option, feed: Feed) -> tuple[str, str] | None:
    """What an option did that asks for what it is not given, and the cure; None: its error is another.

    An empty slot may be the cause only where the error is of None.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, Feed):
        return f"reads `feed.{error.name}`, which a feed does not have.", _FED
    if isinstance(error, TypeError) and f"{WithOption.__call__.__qualname__}.<locals>.step()" in str(error):
        return "calls its step with other arguments than (consts, state, feed).", _CALLED
    slots = [slot for slot in vars(type(option)).values() if isinstance(slot, Slot) and slot.of(feed) is None]
    if not slots or "None" not in str(error):
        return None
    return (
        f"failed with a {type(error).__name__}, perhaps because its slot `{slots[0].name}` is empty, so that "
        "`slot.of(feed)` is None.",
        "Nothing feeds it. The method `feeds(self, length)` returns a dict from the slot to an array with an entry for "
        "each {unit}.",
    )


def fed(loop: Loop, option: Option) -> tuple[Loop, tuple[Slot[Any], ...]]:
    """The loop, whose feed has what the slots of an option hold, and these slots."""
    feeds = option.feeds(loop.length)
    if not isinstance(feeds, Mapping):
        raise PluginFault(
            f"{{call}}: `feeds` of {who(option)} returned {describe_argument(feeds)}.",
            "It returns a dict from each `Slot` to an array with an entry for each step.",
        )
    xs = loop.xs
    held = {} if xs.extra is None else xs.extra.held
    for slot, value in feeds.items():
        if not isinstance(slot, Slot):
            raise PluginFault(
                f"{{call}}: `feeds` of {who(option)} has the key {describe_argument(slot)}, which is no `Slot`.",
                'Make the slot once, beside the class: `SCALE = Slot("scale", rows=False)`.',
            )
        if any(slot.name == other.name for other in held):
            raise PluginFault(
                f"{{call}}: {who(option)} feeds the slot `{slot.name}`, and so does another option.",
                "Slots of one loop have different names. Begin the name with that of your package.",
            )
        bad = [leaf for leaf in jax.tree.leaves(value) if (shape_of(leaf) or (None,))[0] != loop.length]
        if bad or slot.of_chunks:
            raise PluginFault(
                f"{{call}}: {who(option)} feeds the slot `{slot.name}` "
                + ("for chunks." if slot.of_chunks else f"{describe_leaf(bad[0])}, which has no entry for each step."),
                f"Each array has {loop.length} entries along its first axis, one for each {{unit}}.",
            )
        xs = slot.put(xs, jax.tree.map(jnp.asarray, value))
    return loop.having(xs=xs), tuple(feeds)


@dataclass(frozen=True)
class AroundBody(Transform):
    """An option around the body. It is there before the step is traced, so that all others see the two as one."""

    given: Static
    stage: ClassVar[Stage] = Stage.EXTENDED

    option = property(_option)

    def __call__(self, loop: Loop) -> Loop:
        turns = [fed(turn, self.option) for turn in loop.each]
        return loop.with_turns([turn.having(step=WithOption(turn.step, self.given, slots)) for turn, slots in turns])


@dataclass(frozen=True)
class Lift(Transform):
    """Makes room for an option around the step that `remat` recomputes: this one closes over nothing."""

    stage: ClassVar[Stage] = Stage.CUT

    def __call__(self, loop: Loop) -> Loop:
        return loop if is_untraced(loop) else wrapped(loop)


@dataclass(frozen=True)
class AroundMask(Transform):
    """An option around the step of all rows."""

    given: Static
    stage: ClassVar[Stage] = Stage.CUT

    option = property(_option)

    def __call__(self, loop: Loop) -> Loop:
        if loop.limit is not None or loop.turns:
            raise PluginFault(
                f"{{call}}: {who(self.option)} is around more than the body, which {{verb}} does not support.",
                "`around = Around.BODY` is supported everywhere.",
            )
        plain = is_untraced(loop)
        loop, slots = fed(loop if plain else wrapped(loop), self.option)  # its step was traced without them
        step = WithOption(loop.step, self.given, slots)
        if loop.rows is not None:
            check_slots(loop.xs, loop.xs.valid.shape[1:])
        if plain:
            return loop.having(step=step)
        loop = wrapped(loop, step_of=lambda _: step)
        if loop.rows is not None and len(loop.masked.tiers) > 1:
            from .._rows.compact import refuse_draws_around

            refuse_draws_around(loop)
        return loop


@dataclass(frozen=True)
class AroundRemat(AroundMask):
    """An option around the step that `remat` recomputes."""

    stage: ClassVar[Stage] = Stage.SUMMED


_OF: dict[Around, Any] = {
    Around.BODY: lambda given: [AroundBody(given)],
    Around.MASK: lambda given: [AroundMask(given)],
    Around.REMAT: lambda given: [Lift(), AroundRemat(given)],
}
