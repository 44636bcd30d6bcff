"""The recipes of docs/recipes compute what the same programs by hand, or those of peers, compute: gradients too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import as_numpy
from test_docs import ROOT, as_users_run_it, blocks_of

import treescan
from benchmarks.recipes import installed, problems
from examples.recipes import (
    agents,
    decoding,
    linear_attention,
    parallel_series,
    ppo,
    rollout,
    segments,
    speculative,
    state_space,
)

__all__ = ["as_users_run_it"]  # a fixture
NAMES = (
    "bidirectional GRU with CTC, padded", "bidirectional GRU with CTC, packed", "R2D2's replay", "GAE", "V-trace",
    "recurrent PPO", "Kalman filter", "Kalman filter and RTS smoother", "HMM, forward and backward", "HMM filter",
    "HMM, all rows whole", "RTS smoother, all rows whole", "greedy decoding", "beam search", "a descent that stops",
    "nested recomputation", "thinning", "CTC over padded frames", "a GRU with resets", "gated linear attention",
    "gated linear attention, in chunks", "gated linear attention, in chunks, by division",
    "gated linear attention, by mask_scan",
)  # fmt: skip
OF_PEERS = {"HMM filter": "distrax", "HMM, all rows whole": "dynamax", "RTS smoother, all rows whole": "dynamax"}


def assert_equal(got, want, tolerance):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        mine, other = as_numpy(mine), as_numpy(other)
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance * max(1, np.abs(other).max(initial=0)))


@pytest.fixture(scope="module")
def recipes():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return list(problems(small=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("default")  # of what peers import
def test_a_recipe_equals_its_reference(recipes, name):
    if name in OF_PEERS and not installed(OF_PEERS[name]):
        pytest.skip(f"{OF_PEERS[name]} cannot be imported here")
    found = [problem for problem in recipes if problem.name == name]
    assert found
    for problem in found:
        assert_equal(problem.value(True)(), problem.value(False)(), problem.tolerance)
        if problem.differentiable:
            assert_equal(problem.gradient(True)(), problem.gradient(False)(), 10 * problem.tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_every_recipe_is_compared(recipes):
    assert {problem.name for problem in recipes} <= set(NAMES)


@pytest.mark.parametrize("length", [1, 4])
def test_a_smoother_equals_the_normal_distribution_of_all_states(length):
    """Of states and observations together, conditioned on the entries that were seen."""
    random = np.random.default_rng(0)
    a, c = 0.9 * np.eye(2) + 0.1 * random.normal(size=(2, 2)), random.normal(size=(2, 2))
    q, r = np.array([[0.3, 0.1], [0.1, 0.2]]), np.array([[0.5, 0.2], [0.2, 0.4]])
    ys = random.normal(size=(4, 1, 2))
    ys[1, 0, 0] = ys[2, 0] = np.nan
    system = state_space.System(*(jnp.asarray(leaf, jnp.float32) for leaf in (a, q, c, r)))
    first = state_space.Belief(jnp.ones((1, 2)), jnp.eye(2)[None])
    lengths = jnp.array([length])
    found = state_space.filtered(system, first, jnp.asarray(ys, jnp.float32), lengths)
    smoothed = state_space.smoothed(system, found, lengths)

    n = 2 * length
    mean, cov, m, p = np.zeros(n), np.zeros((n, n)), np.ones(2), np.eye(2)
    for t in range(length):
        mean[2 * t : 2 * t + 2] = m
        block = p
        for s in range(t, length):
            cov[2 * s : 2 * s + 2, 2 * t : 2 * t + 2] = block
            cov[2 * t : 2 * t + 2, 2 * s : 2 * s + 2] = block.T
            block = a @ block
        m, p = a @ m, a @ p @ a.T + q
    seen = ~np.isnan(ys[:length, 0]).reshape(-1)
    look = np.kron(np.eye(length), c)[seen]
    error = ys[:length, 0].reshape(-1)[seen] - look @ mean
    spread = look @ cov @ look.T + np.kron(np.eye(length), r)[np.ix_(seen, seen)]
    gain = cov @ look.T @ np.linalg.inv(spread)
    want = (mean + gain @ error).reshape(length, 2)
    np.testing.assert_allclose(smoothed.mean[:length, 0], want, rtol=1e-4, atol=1e-5)
    want_cov = cov - gain @ look @ cov
    blocks = [want_cov[2 * t : 2 * t + 2, 2 * t : 2 * t + 2] for t in range(length)]
    np.testing.assert_allclose(smoothed.cov[:length, 0], blocks, rtol=1e-4, atol=1e-5)
    assert not np.any(smoothed.mean[length:])
    log_likelihood = -0.5 * (
        error @ np.linalg.solve(spread, error) + np.linalg.slogdet(spread)[1] + seen.sum() * np.log(2 * np.pi)
    )
    np.testing.assert_allclose(found.log_likelihood.sum(), log_likelihood, rtol=1e-4)


# The same in parallel.


def ragged_series():
    """Series of 7, 5, 1 and 0 steps, whose padding is NaN as entries are that are missing."""
    random = np.random.default_rng(0)
    a, c = 0.9 * np.eye(3) + 0.1 * random.normal(size=(3, 3)), random.normal(size=(2, 3))
    q, r = np.diag([0.1, 0.2, 0.3]), np.array([[0.5, 0.2], [0.2, 0.4]])
    mean, cov = random.normal(size=(4, 3)), np.stack([np.diag(v) for v in random.uniform(0.5, 1.5, (4, 3))])
    ys, lengths = random.normal(size=(7, 4, 2)), np.array([7, 5, 1, 0])
    ys[2, 0, 1] = ys[3, 1] = np.nan
    ys[np.arange(7)[:, None] >= lengths] = np.nan
    return (a, q, c, r), (mean, cov), ys, lengths


def in_parallel(system, first, ys, lengths):
    found, after = parallel_series.filtered(system, first, ys, lengths)
    return found, parallel_series.smoothed(system, found, after, lengths)


def test_a_smoother_in_parallel_equals_a_loop_over_each_series():
    (a, q, c, r), (means, covs), ys, lengths = ragged_series()
    as_floats = lambda leaves: [jnp.asarray(leaf, jnp.float32) for leaf in leaves]  # noqa: E731
    system, first = state_space.System(*as_floats((a, q, c, r))), state_space.Belief(*as_floats((means, covs)))
    found, smoothed = jax.jit(in_parallel)(system, first, jnp.asarray(ys, jnp.float32), jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        m, p, passed = means[row], covs[row], []
        for t in range(length):
            seen = ~np.isnan(ys[t, row])
            h, error = c[seen], ys[t, row][seen] - c[seen] @ m
            spread = h @ p @ h.T + r[np.ix_(seen, seen)]
            gain = p @ h.T @ np.linalg.inv(spread)
            log_likelihood = -0.5 * (error @ np.linalg.solve(spread, error) + np.linalg.slogdet(2 * np.pi * spread)[1])
            m, p = m + gain @ error, p - gain @ h @ p
            passed.append((m, p))
            m, p = a @ m, a @ p @ a.T + q
            np.testing.assert_allclose(found.updated.mean[t, row], passed[-1][0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.updated.cov[t, row], passed[-1][1], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.log_likelihood[t, row], log_likelihood, rtol=1e-4, atol=1e-5)
        for t in reversed(range(length)):
            here, spread = passed[t][0], passed[t][1]
            ahead = a @ spread @ a.T + q
            gain = spread @ a.T @ np.linalg.inv(ahead)
            m, p = here + gain @ (m - a @ here), spread + gain @ (p - ahead) @ gain.T
            np.testing.assert_allclose(smoothed.mean[t, row], m, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(smoothed.cov[t, row], p, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_smoother_in_parallel_is_that_of_the_one_in_sequence():
    system, first, ys, lengths = ragged_series()
    ys, lengths = jnp.asarray(ys, jnp.float32), jnp.asarray(lengths)
    half = lambda cov: (cov + cov.mT) / 2  # noqa: E731

    def in_sequence(system, first, ys, lengths):
        found = state_space.filtered(system, first, ys, lengths)
        return found, state_space.smoothed(system, found, lengths)

    def loss(run, given):
        (a, q, c, r), (mean, cov) = given
        system, first = state_space.System(a, half(q), c, half(r)), state_space.Belief(mean, half(cov))
        found, smoothed = run(system, first, ys, lengths)
        valid = jnp.arange(7)[:, None] < lengths
        return jnp.where(valid, found.log_likelihood, 0.0).sum() + sum(jnp.sin(x).sum() for x in smoothed)

    given = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (system, first))
    mine, wanted = (jax.jit(jax.grad(functools.partial(loss, run)))(given) for run in (in_parallel, in_sequence))
    assert_equal(mine, wanted, 1e-4)


STEPS, ROWS = 12, 3


def trajectory():
    """With a termination and a time limit in the same step, and one of each in the last; what does not count is NaN."""
    rng = np.random.default_rng(0)
    numbers = (rng.normal(size=(STEPS, ROWS)).astype("f") for _ in range(4))
    rewards, values, finals, ratios = numbers
    terminated, truncated = (rng.random((STEPS, ROWS)) < 0.25 for _ in range(2))
    terminated[4, 0] = truncated[4, 0] = terminated[-1, 0] = truncated[-1, 1] = True
    truncated[-1, 0] = terminated[-1, 1] = terminated[-1, 2] = truncated[-1, 2] = False
    goes_on = ~(terminated | truncated) & (np.arange(STEPS) < STEPS - 1)[:, None]
    following = np.where(goes_on, np.concatenate([values[1:], finals[-1:]]), finals)
    following = np.where(terminated, np.nan, following)
    return agents.Trajectory(*map(jnp.asarray, (rewards, values, following, terminated, truncated, np.exp(ratios))))


@pytest.mark.parametrize("recipe", ["gae", "gae_by_hand", "vtrace", "vtrace_by_hand"])
def test_returns_equal_sums_over_each_episode(recipe):
    """Where an episode terminates, nothing follows; at a time limit, the value of its last observation does."""
    data, is_gae = trajectory(), recipe.startswith("gae")
    got = getattr(agents, recipe)(data, 0.9, *[0.8] * is_gae)
    rewards, values, following, terminated, truncated, ratios = map(np.asarray, data)
    for b in range(ROWS):
        later = 0.0
        for t in reversed(range(STEPS)):
            if terminated[t, b]:
                error, later = rewards[t, b] - values[t, b], 0.0
            else:
                error = rewards[t, b] + 0.9 * following[t, b] - values[t, b]
                later = 0.0 if truncated[t, b] else later
            later = error + 0.72 * later if is_gae else min(ratios[t, b], 1.0) * (error + 0.9 * later)
            np.testing.assert_allclose(got[t, b], later if is_gae else values[t, b] + later, rtol=1e-4, atol=1e-5)
    gradient = jax.grad(
        lambda rewards: getattr(agents, recipe)(data._replace(rewards=rewards), 0.9, *[0.8] * is_gae).sum()
    )
    assert np.isfinite(gradient(data.rewards)).all()


@pytest.mark.parametrize("ends", [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 1]])
def test_a_time_limit_does_not_change_the_advantages_of_exact_values(ends):
    rewards, values = jnp.ones((4, 1)), jnp.full((4, 1), 10.0)  # 1 / (1 - 0.9), which all later rewards sum to
    truncated = jnp.array(ends, bool)[:, None]
    data = agents.Trajectory(rewards, values, values, jnp.zeros_like(truncated), truncated, rewards)
    np.testing.assert_allclose(agents.gae(data, 0.9, 0.95), 0.0, atol=1e-5)
    np.testing.assert_allclose(agents.vtrace(data, 0.9), 10.0, rtol=1e-6)


@pytest.mark.slow
def test_ppo_learns_to_remember():
    """The cue of an episode's first step is asked for in its last: who guesses is right half of the time."""
    learner = ppo.make(jax.random.key(0), 32, 16)
    _, rewards = jax.jit(ppo.train, static_argnums=(2, 3, 4))(learner, jax.random.key(1), 100, 20, 4)
    best = 1 / ppo.EPISODE  # a step's mean reward where every answer is right
    assert rewards[:10].mean() < 0.5 * best < 0.8 * best < rewards[-10:].mean()


# A rollout that ends episodes.


def value(state):
    return 3.0 * jnp.sqrt(state.level)


def objective(p, carry, steps):
    """Rewards and advantages of a rollout, of which the gradient is taken through all steps."""
    _, played = rollout.rollout(p, carry, steps)
    values, following = value(played.state), value(played.final)
    ends = played.terminated, played.truncated
    data = agents.Trajectory(played.reward, values, following, *ends, jnp.ones_like(values))
    return (agents.gae(data, 0.9, 0.8) + played.reward).sum(), played


def of_row(p, key, steps):
    """The same for one row, with Python's own branches: only what is used is computed."""
    state, begins, told, total = None, True, [], 0.0
    for t in range(steps):
        for_reset, for_action = jax.random.split(jax.random.fold_in(key, t))
        state = rollout.reset(for_reset) if begins else state
        after, reward, terminated = rollout.move(state, rollout.act(p, state, for_action))
        begins = bool(terminated) or int(after.played) == rollout.LIMIT
        error = reward - value(state) + (0.0 if terminated else 0.9 * value(after))
        told.append((state.level, reward, bool(terminated), begins, error))
        total, state = total + reward, after
    later = 0.0
    for *_, ends, error in reversed(told):
        later = error + (0.0 if ends else 0.72 * later)
        total = total + later
    return total, [each[:4] for each in told]


def test_a_rollout_that_ends_episodes_equals_a_loop_per_row():
    """Values and gradients; a level below zero, whose root has NaN for a derivative, ends an episode."""
    p, row_keys = rollout.Policy(jnp.float32(0.2), jnp.float32(1.0)), jax.random.split(jax.random.key(0), 3)
    gradient = jax.value_and_grad(objective, has_aux=True)
    (total, played), slopes = jax.jit(gradient, static_argnums=2)(p, rollout.start(row_keys), 16)
    assert played.terminated.any() and played.truncated.any()
    totals, expected = 0.0, jax.tree.map(jnp.zeros_like, p)
    for row, key in enumerate(row_keys):
        (one, told), own = jax.value_and_grad(of_row, has_aux=True)(p, key, 16)
        levels, rewards, terminated, ends = map(np.array, zip(*told, strict=True))
        np.testing.assert_allclose(played.state.level[:, row], levels, rtol=1e-5)
        np.testing.assert_allclose(played.reward[:, row], rewards, rtol=1e-5)
        assert (played.terminated[:, row] == terminated).all()
        assert ((played.terminated | played.truncated)[:, row] == ends).all()
        totals, expected = totals + one, jax.tree.map(jnp.add, expected, own)
    np.testing.assert_allclose(total, totals, rtol=1e-4)
    assert_equal(slopes, expected, 1e-3)


def test_a_rollout_goes_on_where_the_one_before_it_stopped():
    p, row_keys = rollout.Policy(jnp.float32(0.2), jnp.float32(1.0)), jax.random.split(jax.random.key(1), 3)
    _, whole = rollout.rollout(p, rollout.start(row_keys), 10)
    carry, first = rollout.rollout(p, rollout.start(row_keys), 7)
    _, second = rollout.rollout(p, carry, 3)
    for every, *parts in zip(*map(jax.tree.leaves, (whole, first, second)), strict=True):
        np.testing.assert_array_equal(every, np.concatenate(parts))


# Layers over packed rows.

IDS = np.array([[0, 3, 3, 3, 1, 0, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0, 4]])
SPANS = [(0, 1, 4), (0, 4, 5), (0, 6, 10), (1, 0, 6), (1, 6, 10), (2, 9, 10)]


def attended(heads):
    """Attention over one sequence, [steps, heads, features], by loops in Python."""
    query, key, value = (list(part) for part in heads)
    rates = 10_000.0 ** -(np.arange(2) / 2)

    def turned(x, position):
        pairs = [
            (x[:, i] * np.cos(position * r) - x[:, i + 2] * np.sin(position * r),
             x[:, i + 2] * np.cos(position * r) + x[:, i] * np.sin(position * r)) for i, r in enumerate(rates)
        ]  # fmt: skip
        return jnp.stack([pair[0] for pair in pairs] + [pair[1] for pair in pairs], axis=-1)

    out = []
    for t, q in enumerate(query):
        scores = [jnp.exp((turned(q, t) * turned(key[s], s)).sum(-1) / 2.0) for s in range(t + 1)]
        weighted = sum(score[:, None] * value[s] for s, score in enumerate(scores))
        out.append(weighted / sum(scores)[:, None])
    return jnp.stack(out)


def convolved(kernel, x):
    """A convolution of one sequence, [steps, features], by loops in Python."""
    taps = list(enumerate(kernel[::-1]))
    return jnp.stack([sum(weights * x[t - k] for k, weights in taps if t >= k) for t in range(len(x))])


OVER_ROWS = {
    "attention": (lambda kernel, packed: segments.attend(packed), lambda kernel, heads: attended(heads), 0.0),
    "convolution": (lambda kernel, packed: segments.convolve(packed, kernel), convolved, np.nan),
    "shifts": (lambda kernel, packed: segments.convolve_at_once(packed, kernel), convolved, np.nan),
}


@pytest.mark.parametrize("name", OVER_ROWS)
def test_a_layer_over_packed_rows_is_that_of_each_sequence_alone(name):
    """Values and gradients, with padding before, between and after sequences. That of the convolution is NaN."""
    layer, alone, padding = OVER_ROWS[name]
    random = np.random.default_rng(0)

    def numbers(*shape):
        given = random.normal(size=(*IDS.shape, *shape)).astype("f")
        return jnp.where(IDS.reshape(*IDS.shape, *[1] * len(shape)) > 0, given, padding)

    data = segments.Heads(*(numbers(2, 4) for _ in range(3))) if name == "attention" else numbers(2)
    kernel, weights = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((3, 2), (*IDS.shape, 1)))

    def packed_loss(kernel, data, ids):
        packed = treescan.Packed.from_segment_ids(data, ids, time_axis=1, num_segments=7)
        ys = layer(kernel, packed).swapaxes(0, 1)
        weighted = jnp.cos(ys.reshape(*IDS.shape, -1)) * weights
        return jnp.where(ids[..., None] > 0, weighted, 0.0).sum()

    def loss_of_each(kernel, data):
        cut = [jax.tree.map(lambda leaf, r=r, a=a, b=b: leaf[r, a:b], data) for r, a, b in SPANS]
        outs = [alone(kernel, part) for part in cut]
        pairs = zip(SPANS, outs, strict=True)
        return sum((jnp.cos(ys.reshape(b - a, -1)) * weights[r, a:b]).sum() for (r, a, b), ys in pairs)

    want = jax.jit(jax.value_and_grad(loss_of_each, (0, 1)))(kernel, data)
    gradient = jax.value_and_grad(packed_loss, (0, 1))
    assert_equal(jax.jit(gradient)(kernel, data, IDS), want, 1e-5)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (kernel, data, IDS))
    mapped = jax.jit(jax.vmap(gradient))(*twice)
    assert_equal(mapped, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), want), 1e-5)
    with jax.disable_jit():
        assert_equal(packed_loss(kernel, data, IDS), want[0], 1e-5)


# Gradients per step, of the guide on debugging.


@pytest.mark.parametrize("reverse", [False, True])
def test_zeros_receive_what_a_loop_of_pullbacks_has_at_each_step(reverse):
    """Of rows of 5, 2 and 0 steps; the root of zero, in step 1 of the second, has an infinite derivative."""
    (block,) = (b for b in blocks_of((ROOT / "docs/guides/debugging.md").read_text()) if b.title == "zeros.py")
    namespace = {"jax": jax, "jnp": jnp}
    exec(block.code, namespace)

    def step(w, h, x):
        return jnp.tanh(h * w + jnp.sqrt(x * w[0]))

    w, lengths, steps = jnp.array([0.5, 0.8]), [5, 2, 0], 5
    xs = (1.0 + jnp.arange(30.0).reshape(steps, 3, 2) / 10).at[1, 1, 0].set(0.0).at[2:, 1].set(jnp.nan)

    def loss(zeros):
        shifted = functools.partial(namespace["with_zeros"](step), w)
        h, _ = treescan.mask_scan(
            lambda h, x: (shifted(h, x), None),
            jnp.ones((3, 2)),
            (xs, zeros),
            lengths=jnp.array(lengths),
            reverse=reverse,
            row_axes={"x": (0, (None, 0))},
        )
        return h.sum()

    of_w, of_h = jax.grad(loss)((jnp.zeros((steps, 2)), jnp.zeros((steps, 3, 2))))
    want_w, want_h = np.zeros((steps, 2)), np.zeros((steps, 3, 2))
    for row, length in enumerate(lengths):
        order = range(length)[:: -1 if reverse else 1]
        h, back = jnp.ones(2), {}
        for t in order:
            h, back[t] = jax.vjp(functools.partial(lambda x, w, h: step(w, h, x), xs[t, row]), w, h)
        cotangent = jnp.ones(2)
        for t in reversed(order):
            own, cotangent = back[t](cotangent)
            want_w[t] += own
            want_h[t, row] = cotangent
    np.testing.assert_allclose(of_w, want_w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_h, want_h, rtol=1e-4, atol=1e-6)
    assert np.flatnonzero(~np.isfinite(of_w).all(1)) == [1]


# Linear attention.

LENGTHS = (8, 3, 0)


def of_attention(*names):
    """Arrays [8, 3, 2, width], by name; padding is NaN."""
    random = np.random.default_rng(0)
    padding = np.arange(8)[:, None] >= np.array(LENGTHS)
    found = {name: random.normal(size=(8, 3, 2, 5 if name == "v" else 4)) for name in names}
    for name, each in found.items():
        each[...] = -np.abs(each) if name == "log_a" else 1 / (1 + np.exp(-each)) if name in ("a", "rate") else each
        each[padding] = np.nan
    return [jnp.asarray(each, jnp.float32) for each in found.values()]


def by_steps(step, *given):
    """A loop over each row and head: `step(S, ...) -> (S, o)`; zeros in padding."""
    out = jnp.zeros(given[2].shape)
    for row, length in enumerate(LENGTHS):
        for head in range(2):
            state = None
            for t in range(length):
                state, o = step(state, *(each[t, row, head] for each in given))
                out = out.at[t, row, head].set(o)
    return out


def gated_step(state, q, k, v, log_a):
    state = jnp.outer(k, v) + (0 if state is None else jnp.exp(log_a)[:, None] * state)
    return state, state.T @ q


def rwkv7_step(state, q, k, v, a, out, rate):
    state = jnp.outer(v, k) + (0 if state is None else state @ (jnp.diag(a) - jnp.outer(out, rate * out)))
    return state, state @ q


def delta_step(state, q, k, v, beta):
    """The delta rule as its authors write it: what the state has at k is replaced, by a part of beta."""
    state = jnp.zeros((5, 4)) if state is None else state
    state = state - beta * jnp.outer(state @ k - v, k)
    return state, state @ q


def deltanet(q, k, v, beta, n):
    v, betas = linear_attention.blank(n, v, jnp.broadcast_to(beta[..., None], k.shape))
    return linear_attention.rwkv7(q, k, betas[..., :1] * v, jnp.ones_like(k), k, betas, n)


OF_ATTENTION = {
    "gated": (linear_attention.gated, gated_step, ("q", "k", "v", "log_a")),
    "gated in chunks": (
        functools.partial(linear_attention.gated_in_chunks, chunk=4), gated_step, ("q", "k", "v", "log_a")
    ),
    "gated in chunks, by division": (
        functools.partial(linear_attention.gated_in_chunks, chunk=2, within=linear_attention.within_by_division),
        gated_step, ("q", "k", "v", "log_a"),
    ),
    "rwkv7": (linear_attention.rwkv7, rwkv7_step, ("q", "k", "v", "a", "out", "rate")),
    "deltanet": (deltanet, delta_step, ("q", "k", "v", "rate")),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_linear_attention_equals_a_loop_over_each_row_and_head(name):
    layer, step, names = OF_ATTENTION[name]
    given = of_attention(*names)
    given = [*given[:3], given[3][..., 0]] if name == "deltanet" else given
    valid = (jnp.arange(8)[:, None] < jnp.array(LENGTHS))[..., None, None]

    def with_gradient(run):
        def loss(*given):
            found = jnp.where(valid, run(*given), 0.0)
            return jnp.sin(found).sum(), found

        return jax.jit(jax.value_and_grad(loss, tuple(range(len(given))), has_aux=True))(*given)

    (_, mine), gradient = with_gradient(lambda *given: layer(*given, jnp.array(LENGTHS)))
    (_, wanted), slopes = with_gradient(functools.partial(by_steps, step))
    assert_equal(mine, wanted, 1e-4)
    assert_equal(gradient, slopes, 1e-4)


# Speculative decoding.


@pytest.mark.parametrize("draft", ["itself", "another", "a coarse copy"])
def test_speculative_decoding_writes_the_greedy_text(draft):
    width, symbols, most, steps, ahead = 8, 7, 4, 12, 3

    def decoder(key):
        shapes = (symbols, width), (width, 3 * width), (width, 4 * width), (4 * width, width)
        keys = jax.random.split(jax.random.key(key), 4)
        return decoding.Decoder(*(jax.random.normal(k, s) * width**-0.5 * 2 for k, s in zip(keys, shapes, strict=True)))

    large = decoder(0)
    coarse = jax.tree.map(lambda leaf: jnp.round(4 * leaf) / 4, large)
    small = {"itself": large, "another": decoder(1), "a coarse copy": coarse}[draft]
    prompts = treescan.pad([np.array(text) for text in ([1, 2, 3, 4], [5], [6, 2], [3, 3, 1])])
    read = jax.jit(decoding.read, static_argnames="steps")
    writing, drafts = (read(p, prompts, steps=most + steps) for p in (large, small))
    room = most + steps
    wanted = jax.jit(functools.partial(decoding.greedy, steps=room))(large, writing)
    start = speculative.Speculating(*writing, drafts.cache)
    found = jax.jit(functools.partial(speculative.speculate, ahead=ahead, rounds=room))(large, small, start)
    for row in range(4):
        text = [int(token) for token in np.asarray(found.ys)[:, row].reshape(-1) if token >= 0]
        assert text == [int(token) for token in np.asarray(wanted.ys)[:, row] if token >= 0]
        if draft == "itself":
            assert found.steps[row] == -(-len(text) // (ahead + 1))
    assert found.steps.max() <= wanted.steps.max()
