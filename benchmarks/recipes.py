"""The recipes of `docs/recipes`, each against the same program by hand or of a peer.

`problems` is the one list of them: the tests compare values and gradients on small data, this suite times large ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import treescan
from benchmarks import _recipe_peers as peers
from benchmarks._harness import Comparison, Memory
from benchmarks._lstm import normal
from benchmarks._recipe_peers import installed
from examples.recipes import agents, before_after, decoding, linear_attention, markov, ppo, speech, state_space

TARGET = 1.1
BY_HAND = "by hand"
FOR_INFORMATION = ("dynamax", "distrax", "rlax", "jax.lax.scan")
"""Peers whose programs do less: they have no lengths, know nothing of gaps, or multiply chances that may underflow."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A recipe and its reference.

    Attributes:
        name: of the recipe.
        against: what the reference is, in words.
        ours: of `given`, the recipe's.
        reference: of `given` too, arrays that are equal to those of `ours`.
        given: the arguments of both; the first is what the gradient is of.
        differentiable: whether there is a gradient.
        tolerance: by how much results may differ, as a part of the largest entry.
        own_given: what `ours` is given instead of `given`, where the reference has its data in another form.
    """

    name: str
    against: str
    ours: Callable[..., Any]
    reference: Callable[..., Any]
    given: tuple[Any, ...]
    differentiable: bool = True
    tolerance: float = 1e-4
    own_given: tuple[Any, ...] | None = None

    def value(self, ours: bool) -> Callable[[], Any]:
        """Runs it, compiled."""
        program, given = self._chosen(ours)
        run = jax.jit(program)
        return lambda: run(*given)

    def gradient(self, ours: bool) -> Callable[[], Any]:
        """The gradient of a sum of squares of all that it returns, compiled."""
        program, given = self._chosen(ours)

        def loss(first: Any, *rest: Any) -> Array:
            leaves = jax.tree.leaves(program(first, *rest))
            squares = [jnp.square(leaf).mean() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
            return jnp.stack(squares).sum()

        run = jax.jit(jax.grad(loss))
        return lambda: run(*given)

    def _chosen(self, ours: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if ours:
            return self.ours, self.own_given or self.given
        return self.reference, self.given


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _compare(small=False)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with little data."""
    yield from _compare(small=True)


def _compare(small: bool) -> Iterator[Comparison]:
    for number, p in enumerate(problems(small)):
        target = None if small or p.against in FOR_INFORMATION else TARGET
        if number == 0:
            yield Comparison("control", "itself", p.value(False), p.value(False))
        yield Comparison(f"{p.name}, forward", p.against, p.value(True), p.value(False), target, tolerance=p.tolerance)
        if p.differentiable:
            mine, theirs = p.gradient(True), p.gradient(False)
            yield Comparison(f"{p.name}, gradient", p.against, mine, theirs, target, tolerance=10 * p.tolerance)


def problems(small: bool) -> Iterator[Problem]:
    """All recipes, with their references."""
    yield from _speech(small)
    yield from _agents(small)
    yield from _series(small)
    yield from _decoding(small)
    yield from _attention(small)
    yield from _before_after(small)


def _lengths(rows: int, most: int) -> Array:
    lengths = np.random.default_rng(0).integers(max(most // 4, 1), most + 1, rows)
    lengths[0] = most
    return jnp.asarray(lengths, jnp.int32)


def _speech(small: bool) -> Iterator[Problem]:
    rows, most, features, hidden, symbols = (3, 12, 4, 5, 6) if small else (32, 256, 40, 96, 29)
    lengths = _lengths(rows, most)
    data = [np.asarray(normal(n, (int(length), features))) for n, length in enumerate(lengths)]
    cells = [
        speech.Gru(
            normal(n, (features, 3 * hidden)) * features**-0.5,
            normal(n + 1, (hidden, 3 * hidden)) * hidden**-0.5,
            jnp.zeros(3 * hidden),
        )
        for n in (0, 2)
    ]
    model = speech.Model(cells[0], cells[1], normal(4, (2 * hidden, symbols)) * hidden**-0.5)
    spoken = most // 6
    symbols_of = np.random.default_rng(1).integers(1, symbols, (rows, spoken))
    counts = np.minimum(np.asarray(lengths) // 3, spoken)
    labels = speech.Labels(jnp.asarray(symbols_of), jnp.asarray(np.arange(spoken) >= counts[:, None], jnp.float32))
    padded, packed = treescan.pad(data), treescan.pack(data, length=most)
    given = (model, padded.data, lengths, labels)
    name = "bidirectional GRU with CTC"
    yield Problem(f"{name}, padded", BY_HAND, speech.padded, speech.by_hand, given, own_given=(model, padded, labels))
    yield Problem(f"{name}, packed", BY_HAND, speech.packed, speech.by_hand, given, own_given=(model, packed, labels))


def _agents(small: bool) -> Iterator[Problem]:
    steps, rows, hidden = (12, 3, 4) if small else (120, 64, 128)
    network = agents.Network(
        normal(0, (16, hidden)) / 4, normal(1, (hidden, hidden)) * hidden**-0.5, normal(2, (hidden, 6)) * hidden**-0.5
    )
    ends = normal(3, (steps, rows)) > 1.5
    data = agents.Replayed(normal(4, (rows, hidden)), normal(5, (steps, rows, 16)), agents.begins_of(ends))
    burn_in = steps // 3
    yield Problem(
        "R2D2's replay",
        BY_HAND,
        functools.partial(agents.r2d2, burn_in=burn_in),
        functools.partial(agents.r2d2_by_hand, burn_in=burn_in),
        (network, data),
    )
    steps = 20 if small else 1024
    ends = normal(3, (steps, rows)) > 2
    ratios = jnp.exp(0.2 * normal(6, (steps, rows)))
    values, last = normal(8, (steps, rows)), normal(9, (1, rows))
    after, never = jnp.concatenate([values[1:], last]), jnp.zeros_like(ends)
    trajectory = agents.Trajectory(normal(7, (steps, rows)), values, after, ends, never, ratios)

    def of_rewards(function: Callable[..., Array], *options: float) -> Callable[[Array], Array]:
        return lambda rewards: function(trajectory._replace(rewards=rewards), *options)

    given = (trajectory.rewards,)
    gae = of_rewards(agents.gae, 0.99, 0.95)
    yield Problem("GAE", BY_HAND, gae, of_rewards(agents.gae_by_hand, 0.99, 0.95), given)
    vtrace = of_rewards(agents.vtrace, 0.99)
    yield Problem("V-trace", BY_HAND, vtrace, of_rewards(agents.vtrace_by_hand, 0.99), given)
    if installed("rlax"):
        yield Problem("GAE", "rlax", gae, of_rewards(peers.rlax_gae, 0.99, 0.95), given)
        yield Problem("V-trace", "rlax", vtrace, of_rewards(peers.rlax_vtrace, 0.99), given)
    games, hidden, updates, steps = (4, 8, 2, 12) if small else (64, 64, 10, 60)
    learner = ppo.make(jax.random.key(0), games, hidden)
    sizes = {"updates": updates, "steps": steps, "epochs": 4}
    yield Problem(
        "recurrent PPO",
        BY_HAND,
        functools.partial(ppo.train, **sizes),
        functools.partial(ppo.by_hand, **sizes),
        (learner, jax.random.key(1)),
        differentiable=False,
        tolerance=1e-2,  # ten updates of adam, each of a gradient that is rounded otherwise
    )


def _series(small: bool) -> Iterator[Problem]:
    steps, rows, state, seen_count = (9, 3, 3, 2) if small else (256, 32, 6, 3)
    lengths = _lengths(rows, steps)
    system = state_space.System(
        a=0.9 * jnp.eye(state) + 0.05 * normal(0, (state, state)),
        q=0.1 * jnp.eye(state),
        c=normal(1, (seen_count, state)),
        r=jnp.eye(seen_count),
    )
    eye = jnp.broadcast_to(jnp.eye(state), (rows, state, state))
    belief = state_space.Belief(jnp.zeros((rows, state)), eye)
    ys = normal(2, (steps, rows, seen_count))
    ys = jnp.where(normal(3, (steps, rows, seen_count)) > 1, jnp.nan, ys)
    given = (system, belief, ys, lengths)
    ours, by_hand = state_space.filtered, state_space.filtered_by_hand
    yield Problem("Kalman filter", BY_HAND, ours, by_hand, given)

    def both(filtered: Any, smoothed: Any) -> Callable[..., Any]:
        return lambda system, first, ys, lengths: smoothed(system, filtered(system, first, ys, lengths), lengths)

    yield Problem(
        "Kalman filter and RTS smoother",
        BY_HAND,
        both(ours, state_space.smoothed),
        both(by_hand, state_space.smoothed_by_hand),
        given,
    )
    states = 4 if small else 64
    chain = _normalised(markov.Chain(normal(5, (states,)), normal(6, (states, states))))
    evidence = normal(7, (steps, rows, states))
    given = (chain, evidence, lengths)
    yield Problem("HMM, forward and backward", BY_HAND, markov.posterior, markov.by_hand, given)
    if installed("distrax"):
        means, seen = normal(8, (states,)), normal(9, (steps, rows))

        def of_numbers(chain: markov.Chain, seen: Array, lengths: Array) -> tuple[Array, Array]:
            evidence = jax.scipy.stats.norm.logpdf(seen[..., None], means)
            return markov.forward(_normalised(chain), evidence, lengths)

        def distrax_filter(chain: markov.Chain, seen: Array, lengths: Array) -> tuple[Array, Array]:
            return peers.distrax_filter(_normalised(chain), means, seen, lengths)

        yield Problem("HMM filter", "distrax", of_numbers, distrax_filter, (chain, seen, lengths))
    if installed("dynamax"):
        whole = jnp.full_like(lengths, steps)

        def posterior(chain: markov.Chain, evidence: Array) -> markov.Posterior:
            return markov.posterior(_normalised(chain), evidence, whole)

        def dynamax_hmm(chain: markov.Chain, evidence: Array) -> markov.Posterior:
            return peers.dynamax_hmm(_normalised(chain), evidence)

        yield Problem("HMM, all rows whole", "dynamax", posterior, dynamax_hmm, (chain, evidence))

        def smoothed(system: Any, first: Any, ys: Array) -> Any:
            system, first = _symmetric(system, first)
            return state_space.smoothed(system, state_space.filtered(system, first, ys, whole), whole)

        def dynamax_smoother(system: Any, first: Any, ys: Array) -> Any:
            return peers.dynamax_smoother(*_symmetric(system, first), ys)

        given = (system, belief, normal(2, (steps, rows, seen_count)))
        yield Problem("RTS smoother, all rows whole", "dynamax", smoothed, dynamax_smoother, given)


def _normalised(chain: markov.Chain) -> markov.Chain:
    """So that gradients do not depend on what a program makes of chances that do not add up to 1."""
    return jax.tree.map(jax.nn.log_softmax, chain)


def _symmetric(system: state_space.System, first: state_space.Belief) -> tuple[state_space.System, state_space.Belief]:
    """So that gradients do not depend on what a program makes of covariances that are not symmetric."""

    def half(cov: Array) -> Array:
        return (cov + cov.swapaxes(-1, -2)) / 2

    return system._replace(q=half(system.q), r=half(system.r)), first._replace(cov=half(first.cov))


def _decoding(small: bool) -> Iterator[Problem]:
    rows, most, steps, width = (3, 4, 6, 8) if small else (32, 64, 128, 128)
    symbols = 11 if small else 512
    decoder = decoding.Decoder(
        normal(0, (symbols, width)),
        normal(1, (width, 3 * width)) * width**-0.5,
        normal(2, (width, 4 * width)) * width**-0.5,
        normal(3, (4 * width, width)) * width**-0.5,
    )
    texts = np.random.default_rng(0)
    prompts = treescan.pad([texts.integers(1, symbols, int(length)) for length in _lengths(rows, most)])
    writing = jax.jit(decoding.read, static_argnames="steps")(decoder, prompts, steps=most + steps)

    def greedy(p: Any, writing: Any) -> Any:
        result = decoding.greedy(p, writing, steps)
        return result.ys, result.steps

    by_hand = functools.partial(decoding.greedy_by_hand, steps=steps)
    given = (decoder, writing)
    yield Problem("greedy decoding", BY_HAND, greedy, by_hand, given, differentiable=False)
    few: decoding.Writing = jax.tree.map(lambda leaf: leaf[:8], writing)
    given = (decoder, few)

    def beam(p: Any, writing: Any) -> Any:
        state = decoding.beam(p, writing, 4, steps // 2)
        return state.texts, state.score

    def beam_by_hand(p: Any, writing: Any) -> Any:
        state = decoding.beam_by_hand(p, writing, 4, steps // 2)
        return state.texts, state.score

    yield Problem("beam search", BY_HAND, beam, beam_by_hand, given, differentiable=False)


def _attention(small: bool) -> Iterator[Problem]:
    steps, heads, width, chunk = (12, 2, 3, 4) if small else (2_048, 4, 64, 16)
    q, k, v = (normal(n, (steps, 1, heads, width)) for n in range(3))
    log_a, whole = -0.1 * jax.nn.softplus(normal(3, q.shape)), jnp.full(1, steps)

    def step(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_a = x
        state = jnp.exp(log_a)[..., None] * state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    def by_scan(q: Array, k: Array, v: Array, log_a: Array, _: Array) -> Array:
        return jax.lax.scan(step, jnp.zeros((1, heads, width, width)), (q, k, v, log_a))[1]

    given, name = (q, k, v, log_a, whole), "gated linear attention"
    yield Problem(name, "jax.lax.scan", linear_attention.gated, by_scan, given)
    in_chunks = functools.partial(linear_attention.gated_in_chunks, chunk=chunk)
    yield Problem(f"{name}, in chunks", "jax.lax.scan", in_chunks, by_scan, given)
    divided = functools.partial(
        in_chunks, chunk=4 * chunk if not small else chunk, within=linear_attention.within_by_division
    )
    yield Problem(f"{name}, in chunks, by division", "jax.lax.scan", divided, by_scan, given)

    def masked(q: Array, k: Array, v: Array, log_a: Array, n: Array) -> Array:
        init = jnp.zeros((1, heads, width, width))
        return treescan.mask_scan(step, init, (q, k, v, log_a), lengths=n)[1]

    yield Problem(f"{name}, by mask_scan", "jax.lax.scan", masked, by_scan, given)


def _before_after(small: bool) -> Iterator[Problem]:
    import flax.linen as nn

    n = 3 if small else 32
    matrix = jnp.eye(n) + 0.1 * normal(0, (n, n)) * n**-0.5
    problem = before_after.Problem(matrix, normal(1, (n,)), jnp.zeros(n))
    most = 64 if small else 1024
    given = (problem,)
    ours = functools.partial(before_after.descent, most=most)
    by_hand = functools.partial(before_after.descent_by_hand, most=most)
    yield Problem("a descent that stops", "a scan of cond", ours, by_hand, given)
    sizes, grid = ((3, 4), 4) if small else ((32, 32), 128)
    wave = before_after.Wave(normal(2, (grid, grid)), jnp.zeros((grid, grid)))
    ours = functools.partial(before_after.nested, sizes=sizes)
    by_hand = functools.partial(before_after.nested_by_hand, sizes=sizes)
    yield Problem("nested recomputation", "scans of checkpointed scans", ours, by_hand, (jnp.float32(0.1), wave))
    chains, length = (3, 12) if small else (16, 4096)
    place = normal(3, (chains, 8))
    walker = before_after.Walker(place, -0.5 * jnp.square(place).sum(-1))
    keys = jax.random.split(jax.random.key(0), length)
    ours = functools.partial(before_after.thinned, thinning=4)
    by_hand = functools.partial(before_after.thinned_by_hand, thinning=4)
    yield Problem("thinning", "writes into an array", ours, by_hand, (walker, keys), differentiable=False)
    rows, frames, symbols, spoken = (3, 12, 5, 3) if small else (32, 512, 32, 60)
    lengths = _lengths(rows, frames)
    labels = jnp.asarray(np.random.default_rng(2).integers(1, symbols, (rows, spoken)))
    counts = jnp.minimum(lengths // 3, spoken).astype(jnp.int32)
    logits = normal(4, (frames, rows, symbols))

    def optax_ctc(logits: Array, lengths: Array, labels: Array, counts: Array) -> Array:
        import optax

        gone = (jnp.arange(frames) >= lengths[:, None]).astype(jnp.float32)
        label_gone = (jnp.arange(spoken) >= counts[:, None]).astype(jnp.float32)
        return optax.ctc_loss(logits.swapaxes(0, 1), gone, labels, label_gone)

    given = (logits, lengths, labels, counts)
    yield Problem("CTC over padded frames", "optax", before_after.ctc, optax_ctc, given)
    steps, rows, width = (10, 3, 4) if small else (256, 64, 128)
    params = nn.GRUCell(width).init(jax.random.key(0), jnp.zeros((rows, width)), jnp.zeros((rows, 32)))
    begins = normal(6, (steps, rows)) > 2
    xs = normal(5, (steps, rows, 32))

    def with_width(function: Callable[..., Array]) -> Callable[..., Array]:
        return lambda params, xs: function(params, width, xs, begins)

    ours, by_hand = with_width(before_after.gru), with_width(before_after.gru_by_hand)
    yield Problem("a GRU with resets", "flax.linen.scan", ours, by_hand, (params, xs))
