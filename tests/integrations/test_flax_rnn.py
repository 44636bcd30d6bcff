"""flax.linen: `RNN` is flax's where that is right, and each row run by itself where it is not."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from by_hand import compiled_and_derived
from flax.core import lift
from jaxprs import equations
from loops import array
from oracle import assert_close
from thin import slow

from treescan.errors import ArgumentError, ArgumentTypeError, BodyError, CarryError
from treescan.integrations.flax import RNN

B, T, F, H = 3, 5, 2, 3
X = array(B, T, F)
LENGTHS = jnp.array([5, 2, 3])
CELLS: dict[str, Callable[[], nn.RNNCellBase]] = {
    "lstm": lambda: nn.LSTMCell(H),
    "simple": lambda: nn.SimpleCell(H),
    "conv_lstm": lambda: nn.ConvLSTMCell(2, kernel_size=(2, 2)),
    "random_carry": lambda: nn.SimpleCell(H, carry_init=nn.initializers.normal()),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "keep_order": {"reverse": True, "keep_order": True},
    "time_major_reverse": {"time_major": True, "reverse": True},
    "time_major_keep_order": {"time_major": True, "reverse": True, "keep_order": True},
    "unroll": {"unroll": 2},
}


PAIRS = [
    *(("lstm", "reverse"), ("simple", "time_major_keep_order")),
    *slow(("lstm", "plain"), ("conv_lstm", "time_major_reverse"), ("random_carry", "keep_order"), ("simple", "unroll")),
]


def inputs_of(cell: str, option: str) -> jax.Array:
    x = array(B, T, 3, 3, F) if cell == "conv_lstm" else X
    return jnp.swapaxes(x, 0, 1) if "time_major" in option else x


def shown(y: jax.Array, valid: Any) -> jax.Array:
    """The outputs with zeros at padding."""
    return jnp.where(jnp.asarray(valid).reshape(*valid.shape, *(1,) * (y.ndim - valid.ndim)), y, 0)


def is_valid(lengths: Any, steps: int, *, time_major: bool = False) -> np.ndarray:
    valid = np.arange(steps) < np.asarray(lengths)[..., None]
    return np.moveaxis(valid, -1, 0) if time_major else valid


def results(rnn: Any, variables: Any, x: jax.Array, valid: Any = None, **options: Any) -> Any:
    """Carry, outputs, and the gradients of a loss in which all of them count, with respect to variables and x."""

    def run(variables: Any, x: jax.Array) -> Any:
        carry, y = rnn.apply(variables, x, return_carry=True, **options)
        return carry, y if valid is None else shown(y, valid)

    return compiled_and_derived(run, variables, x)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(npt.assert_array_equal, actual, expected)


# What is flax's.


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "padded"])
@pytest.mark.parametrize(("cell", "option"), PAIRS)
def test_it_is_flax_at_what_is_valid(cell: str, option: str, lengths: Any) -> None:
    x, options = inputs_of(cell, option), OPTIONS[option]
    ours, theirs = RNN(CELLS[cell](), **options), nn.RNN(CELLS[cell](), **options)
    valid = is_valid(np.full(B, T) if lengths is None else lengths, T, time_major="time_major" in option)
    bad = jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, jnp.nan)
    variables = ours.init(jax.random.key(1), bad, seq_lengths=lengths)
    assert_same(variables, theirs.init(jax.random.key(1), x))
    expected = results(theirs, variables, x, valid, seq_lengths=lengths)
    assert_close(results(ours, variables, bad, seq_lengths=lengths), expected)


def test_fields_and_arguments_are_those_of_flax() -> None:
    def fields(module: Any) -> list[tuple[str, Any]]:
        return [(f.name, f.default) for f in dataclasses.fields(module) if f.init]

    ours, own = fields(RNN), {"remat", "chunk", "compact", "progress", "check_finite"}
    assert sorted(f for f in ours if f[0] not in own) == sorted((n, d) for n, d in fields(nn.RNN))
    assert all(f.kw_only for f in dataclasses.fields(RNN) if f.name in own)
    arguments = [
        [(p.name, p.kind, p.default) for p in inspect.signature(cls.__call__).parameters.values()]
        for cls in (RNN, nn.RNN)
    ]
    assert arguments[0] == arguments[1]


# What is not: each row by itself, in a Python loop.


def row_by_row(cell: Any, variables: Any, x: jax.Array, start: Any, lengths: Any, option: dict[str, Any]) -> Any:
    """x is [*batch, T, F]; every row has its own list of steps, and no padding."""
    params = {"params": variables["params"]["cell"]}
    carries, ys = [], []
    for row in np.ndindex(*np.shape(lengths)):
        n, carry, out = int(np.asarray(lengths)[row]), jax.tree.map(lambda leaf, row=row: leaf[row], start), []
        for t in range(n)[::-1] if option.get("reverse") else range(n):
            carry, y = cell.apply(params, carry, x[(*row, t)])
            out.append(y)
        out = out[::-1] if option.get("keep_order") else out
        ys.append(jnp.stack([*out, *[jnp.zeros(H)] * (x.shape[-2] - n)]))
        carries.append(carry)
    batch = np.shape(lengths)
    carry = jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(*batch, *leaves[0].shape), *carries)
    return carry, jnp.stack(ys).reshape(*batch, *ys[0].shape)


ROWS: dict[str, Any] = {
    "empty_rows": np.array([0, 3, 1]),
    "all_empty": np.array([0, 0]),
    "two_axes": np.array([[3, 0], [1, 2]]),
    "no_axis": np.array(2),
}
DIRECTIONS = {name: OPTIONS[name] for name in ("plain", "reverse", "keep_order")}
EVERYDAY_ROWS = [
    ("empty_rows", "keep_order", False),
    ("all_empty", "plain", False),
    ("two_axes", "reverse", True),
    ("two_axes", "plain", False),
    ("no_axis", "reverse", False),
]


@pytest.mark.parametrize(("rows", "direction", "time_major"), EVERYDAY_ROWS)
def test_rows_are_as_if_alone_and_nan_in_the_padding_reaches_nothing(
    rows: str, direction: str, time_major: bool
) -> None:
    lengths, options = ROWS[rows], DIRECTIONS[direction]
    cell, steps = nn.SimpleCell(H), 3
    x, start = array(*lengths.shape, steps, F), array(*lengths.shape, H, seed=1)
    ours = RNN(cell, time_major=time_major, return_carry=True, **options)
    variables = nn.RNN(nn.SimpleCell(H)).init(jax.random.key(0), jnp.zeros((1, 1, F)))
    valid = is_valid(lengths, steps)
    bad = jnp.where(valid[..., None], x, jnp.nan)

    def run(variables: Any, x: jax.Array, start: Any) -> Any:
        x = jnp.moveaxis(x, -2, 0) if time_major else x
        carry, y = ours.apply(variables, x, initial_carry=start, seq_lengths=lengths)
        return carry, jnp.moveaxis(y, 0, -2) if time_major else y

    def expected(variables: Any, x: jax.Array, start: Any) -> Any:
        return row_by_row(cell, variables, x, start, lengths, options)

    actual = compiled_and_derived(run, variables, bad, start)
    assert_close(actual, compiled_and_derived(expected, variables, x, start))
    (carry, y), (*_, to_x, _) = actual
    npt.assert_array_equal(np.asarray(y)[~valid], 0)
    npt.assert_array_equal(np.asarray(to_x)[~valid], 0)
    npt.assert_array_equal(np.asarray(carry)[lengths == 0], np.asarray(start)[lengths == 0])


def test_traced_lengths_are_clamped() -> None:
    rnn = RNN(nn.SimpleCell(H), reverse=True, return_carry=True)
    variables = rnn.init(jax.random.key(0), X)
    run = jax.jit(lambda lengths: rnn.apply(variables, X, seq_lengths=lengths))
    assert_close(run(jnp.array([7, -1, 3], jnp.int8)), run(jnp.array([5, 0, 3], jnp.int8)))


def test_remat_without_lengths() -> None:
    variables = RNN(nn.SimpleCell(H)).init(jax.random.key(0), X)
    rnn = RNN(nn.SimpleCell(H), remat="step")
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(rnn.apply(variables, x))))(X)
    assert list(equations(jaxpr.jaxpr, "checkpoint")) or list(equations(jaxpr.jaxpr, "remat2"))
    assert_close(results(rnn, variables, X), results(nn.RNN(nn.SimpleCell(H)), variables, X))


class Counting(nn.SimpleCell):
    """Says when it runs, and on how many rows."""

    @nn.compact
    def __call__(self, carry: jax.Array, x: jax.Array) -> Any:
        jax.debug.callback(RAN.append, jnp.int32(carry.shape[0]))
        return super().__call__(carry, x)


RAN: list[Any] = []


def test_steps_that_no_row_has_are_not_run() -> None:
    rnn = RNN(Counting(H), reverse=True, chunk=2)
    x = array(B, 12, F)
    variables = nn.RNN(nn.SimpleCell(H)).init(jax.random.key(0), x)
    run = jax.jit(lambda lengths: rnn.apply(variables, x, seq_lengths=lengths))
    for lengths, ran in [([3, 1, 0], 4), ([0, 0, 0], 0), ([12, 0, 2], 12)]:
        RAN.clear()
        jax.block_until_ready(run(jnp.array(lengths)))
        jax.effects_barrier()
        assert len(RAN) == ran


def test_a_cell_that_draws_nothing_is_traced_once() -> None:
    traces = []

    class Traced(nn.SimpleCell):
        @nn.compact
        def __call__(self, carry: jax.Array, x: jax.Array) -> Any:
            traces.append(x.shape)
            return super().__call__(carry, x)

    variables = nn.RNN(nn.SimpleCell(H)).init(jax.random.key(0), X)
    for lengths in (None, LENGTHS):
        traces.clear()
        RNN(Traced(H)).apply(variables, X, seq_lengths=lengths)
        assert traces == [(B, F)]


# Rngs and variables.


class Dropped(nn.SimpleCell):
    """Draws by itself and in a submodule."""

    @nn.compact
    def __call__(self, carry: jax.Array, x: jax.Array) -> Any:
        noise = jax.random.normal(self.make_rng("noise"), x.shape) if self.has_rng("noise") else 0 * x
        x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x + noise)
        return super().__call__(carry, x)


def key_of(seed: int, typed: bool) -> jax.Array:
    return jax.random.key(seed) if typed else jax.random.PRNGKey(seed)


@pytest.mark.parametrize(
    ("typed", "lengths"),
    [(True, LENGTHS), *slow((False, LENGTHS), (True, None), (False, None))],
    ids=["typed", "raw", "typed_full", "raw_full"],
)
def test_what_is_drawn_is_what_flax_draws(lengths: Any, typed: bool) -> None:
    fields: dict[str, Any] = {"split_rngs": {"params": False, "dropout": True, "noise": not typed}, "reverse": True}
    ours, theirs = RNN(Dropped(H), **fields), nn.RNN(Dropped(H), **fields)
    rngs = {name: key_of(i, typed) for i, name in enumerate(("params", "dropout", "noise"))}
    variables = ours.init(rngs, X, seq_lengths=lengths)
    assert_same(variables, theirs.init(rngs, X))
    del rngs["params"]
    valid = None if lengths is None else is_valid(lengths, T)
    expected = results(theirs, variables, X, valid, seq_lengths=lengths, rngs=rngs)
    bad = X if valid is None else jnp.where(valid[..., None], X, jnp.nan)
    actual = results(ours, variables, bad, seq_lengths=lengths, rngs=rngs)
    assert_close(actual, expected)
    assert not np.allclose(actual[0][1], ours.apply(variables, X, seq_lengths=lengths))


@pytest.mark.slow
def test_what_is_drawn_after_it_is_what_flax_draws_after_it() -> None:
    class Twice(nn.Module):
        rnn: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            rnn = self.rnn(Dropped(H), split_rngs={"params": False, "dropout": True})
            return rnn(x), rnn(x), jax.random.normal(self.make_rng("dropout"))

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    ours, variables = Twice(RNN).init_with_output(rngs, X)
    theirs, expected = Twice(nn.RNN).init_with_output(rngs, X)
    assert_same(variables, expected)
    assert_close(ours, theirs)


class Normed(nn.SimpleCell):
    """A running mean, as in a batch norm, and a counter of steps."""

    @nn.compact
    def __call__(self, carry: jax.Array, x: jax.Array) -> Any:
        mean = self.variable("stats", "mean", jnp.zeros, (F,))
        steps = self.variable("stats", "steps", jnp.zeros, (), jnp.int32)
        if self.is_mutable_collection("stats"):
            mean.value = 0.9 * mean.value + 0.1 * jnp.mean(x, 0)
            steps.value += 1
        return super().__call__(carry, x - jnp.broadcast_to(mean.value, x.shape))


def with_stats(cell: Any = nn.SimpleCell) -> Any:
    params = nn.RNN(cell(H)).init(jax.random.key(0), X)["params"]
    return {"params": params, "stats": {"cell": {"mean": jnp.ones(F), "steps": jnp.int32(0)}}}


@pytest.mark.parametrize("lengths", [None, jnp.full(B, T)], ids=["none", "full"])
def test_carried_variables_are_those_of_flax(lengths: Any) -> None:
    ours, theirs = RNN(Normed(H), variable_carry="stats"), nn.RNN(Normed(H), variable_carry="stats")
    expected = theirs.apply(with_stats(), X, mutable=["stats"])
    assert_close(ours.apply(with_stats(), X, seq_lengths=lengths, mutable=["stats"]), expected)
    assert int(expected[1]["stats"]["cell"]["steps"]) == T


def test_carried_variables_change_while_any_row_goes_on() -> None:
    rnn = RNN(Normed(H), variable_carry="stats", chunk=1)
    bad = jnp.where(is_valid([3, 3, 0], T)[..., None], X, jnp.nan)
    y, changed = rnn.apply(with_stats(), bad, seq_lengths=jnp.array([3, 3, 0]), mutable=["stats"])
    assert int(changed["stats"]["cell"]["steps"]) == 3
    assert np.isfinite(changed["stats"]["cell"]["mean"]).all()
    assert np.isfinite(y).all()


class Own(nn.SimpleCell):
    """A step has its own bias, and says what it saw."""

    @nn.compact
    def __call__(self, carry: jax.Array, x: jax.Array) -> Any:
        bias = self.variable("steps", "bias", lambda: jax.random.normal(self.make_rng("steps"), (F,)))
        if self.is_mutable_collection("steps") and not self.is_initializing():
            bias.value = bias.value + 1
        self.sow("intermediates", "norm", jnp.sum(carry**2))
        return super().__call__(carry, x + jnp.broadcast_to(bias.value, x.shape))


OWN: dict[str, Any] = {
    "variable_axes": {"steps": -1, "intermediates": lift.Out(0)},
    "split_rngs": {"params": False, "steps": True},
}
RNGS = {"params": jax.random.key(0), "steps": jax.random.key(1)}


@pytest.mark.parametrize("lengths", [None, jnp.full(B, T)], ids=["none", "full"])
@pytest.mark.slow
def test_variables_of_each_step_are_those_of_flax(lengths: Any) -> None:
    ours, theirs = RNN(Own(H), **OWN), nn.RNN(Own(H), **OWN)
    variables = ours.init(RNGS, X)
    assert variables["steps"]["cell"]["bias"].shape == (F, T)
    assert_same(variables, theirs.init(RNGS, X))
    mutable = ["steps", "intermediates"]
    expected = theirs.apply(variables, X, mutable=mutable)
    assert_close(ours.apply(variables, X, seq_lengths=lengths, mutable=mutable), expected)


@pytest.mark.slow
def test_variables_of_a_step_that_no_row_has_stay_what_they_were() -> None:
    rnn = RNN(Own(H), **OWN, chunk=1)
    variables = rnn.init(RNGS, X)
    _, full = rnn.apply(variables, X, mutable=["steps", "intermediates"])
    _, made = rnn.apply(variables, X, seq_lengths=jnp.array([3, 3, 3]), mutable=["steps", "intermediates"])
    old, new = variables["steps"]["cell"]["bias"], made["steps"]["cell"]["bias"]
    npt.assert_array_equal(new[:, :3], old[:, :3] + 1)
    npt.assert_array_equal(new[:, 3:], old[:, 3:])
    (norms,), (expected,) = made["intermediates"]["cell"]["norm"], full["intermediates"]["cell"]["norm"]
    npt.assert_allclose(norms[:3], expected[:3], rtol=1e-5)
    npt.assert_array_equal(norms[3:], 0)


def test_metadata_of_variables_is_that_of_flax() -> None:
    def make(rnn: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return rnn(nn.SimpleCell(H, kernel_init=init))

    variables = make(RNN).init(jax.random.key(0), X, seq_lengths=LENGTHS)
    assert_same(variables, make(nn.RNN).init(jax.random.key(0), X))
    assert_close(make(RNN).apply(variables, X), make(nn.RNN).apply(variables, X))
    assert nn.get_partition_spec(variables) == nn.get_partition_spec(make(nn.RNN).init(jax.random.key(0), X))


# What is refused.


class Casting(nn.SimpleCell):
    @nn.compact
    def __call__(self, carry: jax.Array, x: jax.Array) -> Any:
        return carry.astype(jnp.bfloat16), x


class Clocked(nn.SimpleCell):
    def initialize_carry(self, rng: Any, input_shape: Any) -> Any:
        return {"h": super().initialize_carry(rng, input_shape), "t": jnp.int32(0)}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "shape": ({}, {"seq_lengths": LENGTHS[:2]}, ArgumentError, r"batch shape of the inputs, \(3,\), but are"),
    "dtype": ({}, {"seq_lengths": LENGTHS.astype(jnp.float32)}, ArgumentTypeError, r"must be ints, got float32\[3\]"),
    "mask": ({}, {"seq_lengths": LENGTHS > 2}, ArgumentTypeError, "From a bool mask"),
    "large": ({}, {"seq_lengths": [1, 6, 2]}, ArgumentError, "between 0 and the 5 steps of the inputs"),
    "negative": ({}, {"seq_lengths": np.array([1, -1, 2])}, ArgumentError, "but one is -1"),
    "axes": ({}, {"inputs": X[0, 0]}, ArgumentError, r"\[\*batch, T, \*features\]"),
    "cast": ({"cell": Casting(H)}, {"seq_lengths": LENGTHS}, CarryError, r"`Casting.__call__` \(.*test_flax_rnn.py"),
    "clock": ({"cell": Clocked(H)}, {"seq_lengths": LENGTHS}, ArgumentError, r"carry\[\"t\"\] is int32\[\]"),
    "ragged": ({}, {"seq_lengths": [[1], [1, 2], 3]}, ArgumentTypeError, r"must be ints, got"),
    "split": ({"split_rngs": {"params": True}}, {}, BodyError, "values that must be the same in every step"),
    "class": ({"cell": nn.SimpleCell}, {}, ArgumentTypeError, "Pass an instance"),
    "list": ({}, {"inputs": [[1.0]]}, ArgumentError, "Give one array with at least 2 axes"),
    "chunk": ({"chunk": "auto"}, {}, ArgumentTypeError, "`chunk` must be an int"),
    "own": ({"cell": Own(H), **OWN}, {"seq_lengths": LENGTHS}, ArgumentError, "Initialize without `seq_lengths`"),
}


@pytest.mark.parametrize(("fields", "given", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(fields: Any, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        RNN(**{"cell": nn.SimpleCell(H), **fields}).init(RNGS, **{"inputs": X, **given})
    assert type(caught.value) is error


def test_compact_is_refused_to_a_cell_that_draws() -> None:
    rnn = RNN(Dropped(H), compact=True, split_rngs={"params": False, "dropout": True})
    variables = rnn.init(jax.random.key(0), X, seq_lengths=LENGTHS)
    rnn.apply(variables, X, seq_lengths=LENGTHS)
    with pytest.raises(ArgumentError, match="`compact` and rngs cannot be combined"):
        rnn.apply(variables, X, seq_lengths=LENGTHS, rngs={"dropout": jax.random.key(0)})
