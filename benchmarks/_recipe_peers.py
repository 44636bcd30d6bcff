"""What rlax, distrax and dynamax compute of the data of the recipes; `pip install rlax distrax dynamax` has them."""

import importlib
import importlib.util
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from examples.recipes import agents, markov, state_space


def installed(name: str) -> bool:
    """Whether a peer can be imported on this release of JAX."""
    if importlib.util.find_spec(name) is None:
        return False
    try:
        _peer("dynamax.hidden_markov_model" if name == "dynamax" else name)
    except (ImportError, AttributeError):
        return False
    return True


def _peer(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def rlax_gae(data: agents.Trajectory, discount: float, trace: float) -> Array:
    """Advantages, [T, B]."""
    discounts = jnp.where(data.terminated, 0.0, discount)
    values = jnp.concatenate([data.values, data.next_values[-1:]])

    def one(rewards: Array, discounts: Array, values: Array) -> Array:
        return _peer("rlax").truncated_generalized_advantage_estimation(rewards, discounts, trace, values)

    return jax.vmap(one, 1, 1)(data.rewards, discounts, values)


def rlax_vtrace(data: agents.Trajectory, discount: float) -> Array:
    """Targets of the values, [T, B]."""
    discounts = jnp.where(data.terminated, 0.0, discount)
    errors = jax.vmap(lambda *row: _peer("rlax").vtrace(*row, stop_target_gradients=False), 1, 1)(
        data.values, data.next_values, data.rewards, discounts, data.ratios
    )
    return errors + data.values


def dynamax_hmm(chain: markov.Chain, evidence: Array) -> markov.Posterior:
    """Of rows that are all as long as the batch."""

    smoother = _peer("dynamax.hidden_markov_model").hmm_smoother

    def one(evidence: Array) -> tuple[Array, Array]:
        found = smoother(jnp.exp(chain.first), jnp.exp(chain.transition), evidence)
        return found.smoothed_probs, found.marginal_loglik

    return markov.Posterior(*jax.vmap(one, 1, (1, 0))(evidence))


def distrax_filter(chain: markov.Chain, means: Array, seen: Array, lengths: Array) -> tuple[Array, Array]:
    """Likelihoods [B] and chances [T, B, states] of numbers seen, normal around the means of the states.

    Its `forward_backward` gives zeros for rows that are shorter than the batch (0.1.9), so that there is nothing to
    compare with.
    """
    distrax = _peer("distrax")
    model = distrax.HMM(
        distrax.Categorical(logits=chain.first),
        distrax.Categorical(logits=chain.transition),
        distrax.Normal(means, jnp.ones_like(means)),
    )
    return jax.vmap(model.forward, (1, 0), (0, 1))(seen, lengths)


def dynamax_smoother(system: state_space.System, first: state_space.Belief, ys: Array) -> state_space.Belief:
    """Smoothed beliefs of rows that are all as long as the batch, and without gaps."""
    dynamax = _peer("dynamax.linear_gaussian_ssm")
    states, seen = system.a.shape[0], system.c.shape[0]
    params: Any
    params, _ = dynamax.LinearGaussianSSM(states, seen).initialize(
        jax.random.key(0),
        dynamics_weights=system.a,
        dynamics_covariance=system.q,
        emission_weights=system.c,
        emission_covariance=system.r,
    )

    def one(mean: Array, cov: Array, ys: Array) -> tuple[Array, Array]:
        found: Any = dynamax.lgssm_smoother(params._replace(initial=params.initial._replace(mean=mean, cov=cov)), ys)
        return found.smoothed_means, found.smoothed_covariances

    return state_space.Belief(*jax.vmap(one, (0, 0, 1), 1)(first.mean, first.cov, ys))
