"""What the tables of primitives say of every primitive of JAX, those included that are in none of them.

Whether a value may be computed again, in another rounding, is decided by the names of primitives. So each name that JAX
has is either in a table with examples (`test_primitives.py`), or named here with what it does. A release of JAX with a
new primitive fails here until somebody has said so.
"""

import jax.extend.core.primitives as jax_primitives
from primitive_cases import ENTRIES

from treescan._faster.products import _OF_EACH_STEP, _SELECT, ELEMENTWISE
from treescan._remat.checkpoint import _CHOOSE, _COMPARE, _JUMP, _MOVES, _RANK

# fmt: off
HOLD = frozenset({
    "call", "custom_linear_solve", "eval_jaxpr", "reduce", "reduce_window", "scatter", "select_and_scatter",
    "xla_pmap",
})
# fmt: on
"""They hold others, in which choices are looked for."""

# fmt: off
CONTINUOUS = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cholesky", "conj",
    "cumlogsumexp", "cumprod", "digamma", "eigh", "hessenberg", "householder_product", "igamma", "igamma_grad_a",
    "igammac", "lgamma", "log2", "lu", "nextafter", "one_minus_square", "polygamma", "polynomial", "qr",
    "reduce_window_sum", "regularized_incomplete_beta", "scatter-add", "scatter-mul", "svd", "triangular_solve",
    "tridiagonal", "tridiagonal_solve", "zeta",
})
# fmt: on
"""Of one input they return what may be computed twice: a pivot or a sign that another rounding changes goes with the
factors that it belongs to."""

# fmt: off
DISCRETE = frozenset({
    "axis_index", "clz", "population_count", "random_bits", "random_fold_in", "random_seed", "random_split",
    "random_unwrap", "random_wrap", "reduce_xor", "rng_bit_generator", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "threefry2x32",
})
# fmt: on
"""Their inputs are no floating-point numbers."""

# fmt: off
DRAW = frozenset({
    "random_gamma", "rng_uniform",
})
# fmt: on
"""They are functions of a key, or of a state that XLA holds."""

# fmt: off
MOVE = frozenset({
    "after_all", "all_gather", "all_to_all", "create_token", "device_put", "dynamic_update_slice", "empty2", "get",
    "name", "ppermute", "psum", "ragged_all_to_all", "sharding_constraint", "swap",
})
# fmt: on
"""They move what they are given, or sum it."""

SAID = HOLD | CONTINUOUS | DISCRETE | DRAW | MOVE


def names_of_jax() -> set[str]:
    return {getattr(jax_primitives, each).name for each in dir(jax_primitives) if each.endswith("_p")}


def test_somebody_has_said_of_each_primitive_of_jax_what_it_does():
    assert names_of_jax() - ENTRIES.keys() - SAID == set()
    assert not SAID & ENTRIES.keys()


def test_what_neither_decides_nor_chooses_is_in_none_that_says_so():
    others = CONTINUOUS | DISCRETE | DRAW | MOVE
    assert not others & (_CHOOSE | _COMPARE | _JUMP | _RANK)


def test_names_of_maxima_and_minima_are_choices():
    found = {
        name for name in names_of_jax() | ENTRIES.keys() if {"max", "min"} & set(name.replace("-", "_").split("_"))
    }
    assert found <= _CHOOSE | {"argmax", "argmin"}


def test_a_table_that_is_not_sure_takes_the_safe_side():
    """What may be moved out of a step, or computed in another, is listed; all else stays where it is."""
    assert _SELECT <= _OF_EACH_STEP
    assert ELEMENTWISE <= _OF_EACH_STEP
    assert not _MOVES & (CONTINUOUS | DRAW | {"add", "mul", "dot_general", "reduce_sum"})
    assert not _OF_EACH_STEP & (DRAW | {"random_bits", "psum", "all_gather", "ppermute", "axis_index"})
