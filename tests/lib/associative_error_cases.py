"""Error cases of `associative_scan`; see `error_cases.py`."""

import jax
import jax.numpy as jnp
from error_cases import LENGTHS, ROWS, case, named, on_mesh
from jax.sharding import PartitionSpec

import treescan
from treescan import associative_scan


def add(before, here):
    return jax.tree.map(jnp.add, before, here)


summed = named("summed", lambda before, here: jnp.sum(before + here, 0))
as_pair = named("as_pair", lambda before, here: (before, here))
PACKED = treescan.pack([jnp.ones((2, 4))], init=[jnp.ones(4)])


@on_mesh(less=("disable_jit", "vmap"))
def associative_split_steps(one):
    return associative_scan(add, jax.sharding.reshard(one * jnp.ones((4, 3)), PartitionSpec("rows")))


case()(
    associative_no_operator=lambda one: associative_scan(ROWS * one, ROWS),
    associative_of_nothing=lambda one: associative_scan(add, {}),
    associative_numbers=lambda one: associative_scan(add, [1.0, 2.0]),
    associative_sizes_differ=lambda one: associative_scan(add, {"x": ROWS * one, "y": ROWS[:2]}),
    associative_of_one_element=lambda one: associative_scan(summed, ROWS * one),
    associative_of_a_pair=lambda one: associative_scan(as_pair, ROWS * one),
    associative_rows=lambda one: associative_scan(add, ROWS * one, lengths=jnp.array([3, 1, 2])),
    associative_init=lambda one: associative_scan(add, ROWS * one, jnp.ones(4)),
    associative_init_twice=lambda one: associative_scan(add, PACKED._replace(data=PACKED.data * one), 0.0),
    associative_fill=lambda one: associative_scan(add, ROWS * one, lengths=LENGTHS, fill=jnp.ones(4)),
    associative_keys=lambda one: associative_scan(add, (ROWS * one, jax.random.split(jax.random.key(0), len(ROWS)))),
    associative_axis=lambda one: associative_scan(add, ROWS * one, axis=1),
    associative_reset_to=lambda one: associative_scan(add, ROWS * one, reset_to=0.0),
    associative_padded_twice=lambda one: associative_scan(add, treescan.Padded(ROWS * one, LENGTHS), lengths=LENGTHS),
)
