"""Error cases of `linear_scan`; see `error_cases.py`."""

import jax
import jax.numpy as jnp
from error_cases import LENGTHS, ROWS, case, on_mesh
from jax.sharding import PartitionSpec

import treescan
from treescan import linear_scan

A = jnp.full((3, 2, 4), 0.5)
SQUARE = jnp.ones((4, 4))


@on_mesh(less=("disable_jit", "vmap"))
def linear_split_steps(one):
    return linear_scan(0.5, jax.sharding.reshard(one * jnp.ones((4, 3)), PartitionSpec("rows")))


case()(
    linear_numbers=lambda one: linear_scan(0.5, [1.0, 2.0]),
    linear_of_nothing=lambda one: linear_scan(one, {}),
    linear_sizes_differ=lambda one: linear_scan(0.5, {"x": ROWS * one, "y": ROWS[:2]}),
    linear_mask_of_other_steps=lambda one: linear_scan(A, ROWS * one, mask=jnp.ones((2, 3), bool)),
    linear_fill=lambda one: linear_scan(A, ROWS * one, lengths=LENGTHS, fill=jnp.ones(4)),
    linear_lacks_two_axes=lambda one: linear_scan(jnp.ones((4, 5)), one * jnp.ones((9, 3, 4, 5))),
    linear_lacks_the_last_axis=lambda one: linear_scan(jnp.ones((3, 2)), ROWS * one),
    linear_truncate=lambda one: linear_scan(A, ROWS * one, truncate=4),
    linear_compact=lambda one: linear_scan(A, ROWS * one, compact=True),
    linear_discounts=lambda one: linear_scan(b=ROWS * one, discounts=A),
    linear_dones=lambda one: linear_scan(A, ROWS * one, dones=ROWS > 0, time_axis=1),
    linear_broadcast=lambda one: linear_scan({"x": A, "y": A[:, :, :3]}, {"x": ROWS * one, "y": ROWS}),
    linear_fewer_axes=lambda one: linear_scan(jnp.ones(4), SQUARE * one),
    linear_more_axes=lambda one: linear_scan(A[..., None], ROWS * one),
    linear_integers=lambda one: linear_scan({"h": A * one}, {"h": jnp.ones((3, 2, 4), jnp.int32)}),
    linear_of_a_body=lambda one: linear_scan(lambda h, x: (h + x, h), one * jnp.zeros(4), jnp.ones((3, 4))),
    linear_complex=lambda one: linear_scan(A + 1j, ROWS * one),
    linear_steps=lambda one: linear_scan(jnp.ones((4, 2, 4)), treescan.Padded(ROWS * one, LENGTHS)),
    linear_square=lambda one: linear_scan(jnp.ones((3, 2, 4, 3)), ROWS * one, matrix=True),
    linear_init=lambda one: linear_scan(A, ROWS * one, jnp.ones(4)),
    linear_batch_first=lambda one: linear_scan(A, ROWS * one, jnp.ones((3, 4))),
    linear_rows=lambda one: linear_scan(A, ROWS * one, lengths=jnp.array([3, 1, 2])),
    linear_prefix=lambda one: linear_scan({"x": A}, {"y": ROWS * one}),
    linear_method=lambda one: linear_scan(A, ROWS * one, method="associative"),
    linear_remat=lambda one: linear_scan(A, ROWS * one, remat=0),
    linear_remat_method=lambda one: linear_scan(A, ROWS * one, remat=2, method="chunked"),
    linear_save=lambda one: linear_scan(A, ROWS * one, save=2),
    linear_reset_to=lambda one: linear_scan(A, ROWS * one, reset_to=0.0),
    linear_both=lambda one: linear_scan(A, ROWS * one, lengths=LENGTHS, mask=jnp.ones((3, 2), bool)),
    linear_axis_name=lambda one: linear_scan(A, ROWS * one, axis_name=0),
    linear_axis_hold=lambda one: linear_scan(A, ROWS * one, axis_name="steps", fill="hold"),
    linear_axis_resets=lambda one: linear_scan(
        A, ROWS * one, axis_name="steps", resets=jnp.ones((3, 2), bool), reverse=True
    ),
    linear_padded_twice=lambda one: linear_scan(A, treescan.Padded(ROWS * one, LENGTHS), lengths=LENGTHS),
)
