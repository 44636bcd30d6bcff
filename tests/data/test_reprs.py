"""`Padded`, `Packed`, `WhileResult` and `RematPlan` show types, and few numbers, and stay what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan

pytestmark = pytest.mark.quick

SEQUENCES = [np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)]


def padded():
    return treescan.pad(SEQUENCES)


def packed():
    return treescan.pack(SEQUENCES)


def ended():
    init, xs = jnp.array([0.0, 1.0]), jnp.ones((5, 2))
    return treescan.while_scan(lambda c: c < 3, lambda c, x: (c + x, {"a": c}), init, xs)


REPRS = {
    padded: "Padded(data=float32[3,2,2], lengths=[3 2])",
    packed: "Packed(data=float32[5,1,2], mask=bool[5,1], resets=bool[5,1], "
    "index=PackIndex(row=[0 0], start=[0 3], length=[3 2]), init=None)",
    ended: "WhileResult(carry=[3. 3.], ys={'a': [[0. 1.] [1. 2.] [2. 0.] [0. 0.] [0. 0.]]}, steps=[3 2], "
    "stopped=[ True  True])",
}


@pytest.mark.parametrize("make", REPRS)
def test_arrays_are_shown_by_their_types_and_few_numbers_by_their_values(make):
    value = make()
    assert repr(value) == REPRS[make]
    html = value._repr_html_()
    assert type(value).__name__ in html and html.count("<tr>") >= 2
    first, *others = value
    assert first is value[0] and len(others) == len(value) - 1
    mapped = jax.tree.map(lambda leaf: leaf, value)
    assert type(mapped) is type(value) and repr(mapped) == repr(value)
    traced = []
    jax.jit(lambda value: traced.append(repr(value) + value._repr_html_()))(value)
    assert "float32[" in traced[0] and "Tracer" not in traced[0]


def test_a_deleted_leaf_is_shown_by_its_type():
    value = ended()
    value.carry.delete()
    assert "carry=float32[2]" in repr(value)


def test_a_tree_that_cannot_be_rebuilt_is_shown_by_its_kind():
    @jax.tree_util.register_pytree_node_class
    class Strict:
        def tree_flatten(self):
            return (jnp.ones(3),), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            assert not leaves or hasattr(leaves[0], "dtype") or type(leaves[0]) is object
            return cls()

    assert repr(padded()._replace(data=Strict())).startswith("Padded(data=Strict")


def test_html_is_escaped():
    assert "&lt;b&gt;" in padded()._replace(data={"<b>": jnp.ones(3)})._repr_html_()


def test_a_plan_is_shown_in_a_line():
    plan = treescan.plan_remat(lambda c, x: (c * x, None), 1.0, jnp.ones(5), remat="step")
    assert repr(plan) == "<RematPlan of Remat(levels=1): 28 B needed, 2 evaluations of each step>"
    assert "evaluations" in plan._repr_html_() and str(plan).startswith("remat=Remat(levels=1)")
