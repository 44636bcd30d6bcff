"""The conformance kit: every built-in keeps the laws, and a carry that breaks one is caught, by its name."""

import dataclasses
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.custom_batching import custom_vmap
from loops import array

import treescan
from treescan.carries import (
    AbstractCarry,
    best,
    buffer,
    cast,
    clip_gradient,
    ema,
    keys,
    moments,
    running_sum,
    stop_gradient,
    window,
)
from treescan.testing import check_carry

pytestmark = pytest.mark.quick

ROWS = (3,)
STEPS = 5


def entries(*shape: int) -> jax.Array:
    return array(STEPS, *shape, seed=1)


KEEP = entries(3) > 0
BUILT_IN: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "keys": (keys(jax.random.key(0)), entries(), ()),
    "keys, one a row": (keys(jax.random.split(jax.random.key(0), 3)), entries(3), ROWS),
    "cast": (cast(array(3, 2)), entries(3, 2), ROWS),
    "cast of carries with rows of their own": (
        cast({"mean": ema(array(3), 0.9), "last": window(array(2, 3))}),
        {"mean": entries(3), "last": entries(3)},
        ROWS,
    ),
    "window": (window(array(2, 3)), entries(3), ROWS),
    "ema": (ema(array(3), jnp.array(0.9)), entries(3), ROWS),
    "ema, shared": (ema({"a": array(2), "b": array()}, 0.9, shared=True), {"a": entries(3, 2), "b": entries(3)}, ROWS),
    "ema, unbiased": (ema(0.0, 0.9, debias=True, shared=True), entries(3), ROWS),
    "moments": (moments((3,)), entries(3), ROWS),
    "moments, shared": (moments((2,), shared=True), entries(3, 2), ROWS),
    "sum": (running_sum(jnp.zeros(3)), entries(3), ROWS),
    "sum, shared": (running_sum(shared=True), entries(3), ROWS),
    "best": (best(jnp.zeros((3, 2)), jnp.full(3, -jnp.inf)), (entries(3), entries(3, 2)), ROWS),
    "best, shared": (best(jnp.zeros(2), mode="min"), (entries(3), entries(3, 2)), ROWS),
    "clip_gradient": (clip_gradient(array(3, 2), max_norm=0.5), entries(3, 2), ROWS),
    "stop_gradient": (stop_gradient(array(3)), entries(3), ROWS),
    "buffer": (buffer(jnp.zeros(2), 2, batch=ROWS), (entries(3, 2), KEEP), ROWS),
    "buffer, shared": (buffer(0.0, 9), (entries(3), KEEP), ROWS),
}


EVERY_DAY = ("sum",)  # the kit compiles some twenty programs for each carry
NAMES = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in BUILT_IN]


@pytest.mark.parametrize("name", NAMES)
def test_built_ins_keep_the_laws(name: str) -> None:
    carry, returned, batch = BUILT_IN[name]
    check_carry(carry, returned, batch=batch)


def carry_class(cls: type) -> type:
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@carry_class
class Plain(AbstractCarry[Any, Any]):
    """A carry without fault, for others to break."""

    value: Any

    def read(self) -> Any:
        return self.value

    def write(self, returned: Any, valid: Any) -> Any:
        return type(self)(returned)


def test_a_carry_without_the_rows_of_batch_is_told_so() -> None:
    with pytest.raises(AssertionError) as caught:
        check_carry(Plain(jnp.zeros(2)), jnp.ones((4, 3)), batch=(3,))
    law, table, cure = str(caught.value).split("\n\n")[1:]
    assert law.startswith("Each leaf has the batch shape")
    assert "carry.value   [3] at axis 0   float32[2]" in table
    assert "leave `batch` out" in " ".join(cure.split())


def broken(name: str, **hooks: Any) -> type:
    """A carry with hooks of its own; `returns` is the next value, of the carry, what is returned, and `valid`."""
    if returns := hooks.pop("returns", None):
        hooks["write"] = lambda self, *given: dataclasses.replace(self, value=returns(self, *given))
    return carry_class(type(name, (Plain,), hooks))


calls: list[int] = []


def raises(*_: Any) -> Any:
    raise KeyError("nothing to write")


@custom_vmap
def _identity(x):
    return x


_identity.def_vmap(lambda size, batched, x: (2 * x, batched[0]))


@jax.custom_vjp
def _normalised(x):
    return x


_normalised.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.abs(g),))


def divided(carry: Any, new: Any, valid: Any) -> Any:
    valid = jnp.ones(new.shape, bool) if valid is None else valid
    return carry.value * jnp.sum(jnp.where(valid, new, 0)) / jnp.sum(valid, dtype=new.dtype)


@jax.tree_util.register_pytree_node_class
class NotTheLast(AbstractCarry[Any, Any]):
    """What comes out of a program is rounded: the next scan begins from something else."""

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        done = isinstance(leaves[0], jax.Array) and not isinstance(leaves[0], jax.core.Tracer)
        return cls(jnp.round(leaves[0], 2) if done else leaves[0])

    def read(self):
        return self.value

    def write(self, returned, valid):
        return NotTheLast(self.value + returned)


Drifts = broken("Drifts", returns=lambda carry, new, valid: new.astype(jnp.float16))
MixesRows = broken("MixesRows", returns=lambda carry, new, valid: carry.value + jnp.cumsum(new))
BROKEN: dict[type, str] = {
    broken("Impure", read=lambda self: calls.append(1) or self.value + len(calls)): (
        "`read`, `write` and `rows` run, and are pure: they return the same result twice"
    ),
    broken("Raises", returns=raises): "KeyError: 'nothing to write'",
    Drifts: "`write` returns a carry with the same class, structure, shapes, dtypes",
    broken("LooksAtTracers", returns=lambda carry, new, valid: -new if isinstance(new, jax.core.Tracer) else new): (
        "equals a Python loop over the hooks."
    ),
    broken("OtherUnderVmap", returns=lambda carry, new, valid: _identity(new)): (
        "Under `jax.vmap`, each element has the same result as on its own."
    ),
    NotTheLast: "A scan that continues from a returned carry equals one long scan, bit by bit.",
    broken("LooksAtTheMask", returns=lambda carry, new, valid: new if valid is None else new + 1): (
        "Chunks do not change the result"
    ),
    MixesRows: "In a masked scan, what a row stores and reads has the same value as for the row on its own",
    broken("CountsPadding", returns=lambda carry, new, valid: carry.value + jnp.sum(new), rows=lambda self: None): (
        "do not depend on values that were returned for invalid rows, or on their number."
    ),
    broken(
        "NormalisesGradient",
        read=lambda self: _normalised(self.value),
        returns=lambda carry, new, valid: carry.read() + new,
    ): "The gradient of zero is zero, not NaN.",
    broken("DividesByNone", returns=divided, rows=lambda self: None): (
        "Gradients are finite, even in a step in which no row is valid."
    ),
}


@carry_class
class Mean(AbstractCarry[Any, Any]):
    """Right without rows. With a mask, each row would count the steps of all."""

    total: Any
    count: Any

    def read(self):
        return {"mean": self.total / jnp.maximum(self.count, 1), "count": self.count}

    def write(self, returned, valid):
        return dataclasses.replace(self, total=self.total + returned, count=self.count + 1)

    def rows(self):
        return {"count": None}


@carry_class
class MeanInRows(Mean):
    def rows(self):
        return 0


@carry_class
class Apart(Mean):
    """What reads the count alone is that of all rows."""

    def read(self):
        return self.total, self.count


@carry_class
class OfAll(Mean):
    """Reads the rows of each other."""

    def read(self):
        return jnp.sum(self.total)


@carry_class
class CountsAll(Mean):
    def write(self, returned, valid):
        count = self.count + (1 if valid is None else valid.size)
        return dataclasses.replace(self, total=self.total + returned, count=count)


def check_mean(kind: Any, count: Any) -> None:
    check_carry(kind(jnp.zeros(3), count), entries(3), batch=ROWS)


@pytest.mark.slow
def test_what_a_row_reads_is_that_of_the_row_alone() -> None:
    with pytest.raises(AssertionError) as caught:
        check_mean(Mean, jnp.zeros(()))
    text = str(caught.value)
    assert "In a masked scan, what a row stores and reads" in text
    assert re.search(r'row \[2\]: read\(\)\["mean"\] .*\s+reads carry.count, which all rows share', text), text
    assert 'read()["count"]' not in text


@pytest.mark.slow
def test_what_rows_share_may_be_read_apart() -> None:
    check_mean(MeanInRows, jnp.zeros(3))
    check_mean(Apart, jnp.zeros(()))
    with pytest.raises(AssertionError, match=r"row \[0\]: read\(\)"):
        check_mean(OfAll, jnp.zeros(()))
    with pytest.raises(AssertionError, match=r"or on their number.\n\n.*\n +carry.count +2. +3."):
        check_mean(CountsAll, jnp.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_law_is_named(cls: type) -> None:
    value = jnp.zeros(()) if "rows" in vars(cls) else jnp.zeros(3)
    with pytest.raises(AssertionError) as caught:
        check_carry(cls(value), entries(3), batch=ROWS)
    assert BROKEN[cls] in str(caught.value)
    assert f"`{cls.__name__}` breaks" in str(caught.value)
    assert cls is not MixesRows or "`compact=True` does not change the result" in str(caught.value)


def test_the_report_shows_the_leaf() -> None:
    with pytest.raises(AssertionError) as caught:
        check_carry(Drifts(jnp.zeros(3)), entries(3), batch=ROWS)
    assert str(caught.value) == (
        "`Drifts` breaks 1 of the 12 laws of custom carries.\n\n"
        "`write` returns a carry with the same class, structure, shapes, dtypes and static fields.\n\n"
        "  leaf          expected     came\n"
        "  carry.value   float32[3]   float16[3]   dtype"
    )


@carry_class
class ReadsTheMask(Plain):
    def write(self, returned, valid):
        return ReadsTheMask(self.value + returned * valid.sum())


@carry_class
class ReadsWrongly(Plain):
    def read(self):
        return jnp.zeros(2) + jnp.zeros(3)


@carry_class
class FailsInATrace(Plain):
    def write(self, returned, valid):
        return FailsInATrace(returned if float(returned[0]) < 9 else -returned)


@pytest.mark.parametrize(
    ("cls", "hook", "error"),
    [
        (ReadsTheMask, "write(valid=None)", AttributeError),
        (ReadsWrongly, "read()", TypeError),
        (FailsInATrace, "write(valid=None)", jax.errors.ConcretizationTypeError),
    ],
)
def test_the_report_names_the_hook_and_the_line(cls: Any, hook: str, error: type[Exception]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_carry(cls(jnp.zeros(3)), entries(3), batch=ROWS)
    line = inspect.getsourcelines(vars(cls)[hook.partition("(")[0]])[1] + 1
    text = str(caught.value)
    assert re.search(rf"{re.escape(hook)}  +no error  +{error.__name__}: .*test_check_carry.py:{line}", text), text
    note = "every verb calls `write` with `valid=None`"
    assert (note in text) is ("valid=None" in text) is ("valid=None" in hook)
    assert isinstance(caught.value.__cause__, error)


def test_a_carry_without_fault_passes() -> None:
    check_carry(Plain(jnp.zeros(3)), entries(3), batch=ROWS)


@carry_class
class Decays(AbstractCarry[Any, Any]):
    value: Any
    decay: Any = 0.5

    def read(self):
        return self.value

    def write(self, returned, valid):
        return dataclasses.replace(self, value=self.decay * self.value + returned)


@carry_class
class DecaysInRows(Decays):
    def rows(self):
        return {"decay": None}


@pytest.mark.slow
def test_a_carry_with_rows_is_tried_on_rows_by_default() -> None:
    check_carry(DecaysInRows(jnp.zeros(())), entries())
    with pytest.raises(AssertionError, match=r"carry\.decay +\[3\] at axis 0 +~?float32\[\]"):
        check_carry(Decays(jnp.zeros(())), entries())


@pytest.mark.parametrize("returned", [jnp.zeros(2), 1.0, {}])
def test_too_few_steps(returned: Any) -> None:
    with pytest.raises(treescan.errors.ArgumentError, match="at least 3 steps"):
        check_carry(Plain(jnp.zeros(())), returned)
