"""What users of chex bring along: dataclasses as carries, assertions in bodies, and its counting of traces."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify
from thin import parametrize

import treescan
from treescan._body.carry import _types_agree, agree

XS = jnp.arange(12.0).reshape(6, 2)
INIT = jnp.zeros(2)


@pytest.mark.parametrize("kind", [{}, {"frozen": True}, {"mappable_dataclass": False}], ids=str)
def test_a_dataclass_is_carried_and_its_fields_are_named_in_errors(kind):
    @chex.dataclass(**kind)
    class State:
        h: chex.Array
        steps: chex.Array

    def step(carry, x):
        return State(h=carry.h + x, steps=carry.steps + 1), carry.h

    init = State(h=INIT, steps=jnp.zeros(2, jnp.int32))
    for final, _ in (treescan.scan(step, init, XS), treescan.mask_scan(step, init, XS, lengths=jnp.array([6, 6]))):
        assert isinstance(final, State)
        chex.assert_trees_all_equal(final, State(h=XS.sum(0), steps=jnp.array([6, 6], jnp.int32)))
    with pytest.raises(treescan.errors.CarryError, match=r"c\.h +float32\[2\] +float16\[2\] +dtype"):
        treescan.scan(lambda c, x: (State(h=c.h.astype(jnp.float16), steps=c.steps), x), init, XS)


def not_negative(carry, x):
    checkify.check(jnp.all(x >= 0), "negative")
    return carry + x, x


def masked(**options):
    given = options if "resets" in options else {"lengths": jnp.array([6, 6]), **options}
    return lambda body, xs: treescan.mask_scan(body, INIT, xs, **given)


WITH_CHECKS = {
    "scan": lambda body, xs: treescan.scan(body, INIT, xs),
    "fori": lambda body, xs: treescan.fori(0, 6, lambda i, c: body(c, xs[i])[0], INIT),
    "while_scan": lambda body, xs: treescan.while_scan(lambda c: c[0] < 1e9, body, INIT, xs).carry,
    "fold_layers": lambda body, xs: treescan.fold_layers(lambda x, c: body(c, x)[0], INIT, xs),
    "remat": lambda body, xs: treescan.scan(body, INIT, xs, remat="nested"),
    "save": lambda body, xs: treescan.scan(body, INIT, xs, save="last"),
    "mask_scan": masked(),
    "compact": masked(chunk=2, compact=True),
    "resets": masked(resets=jnp.zeros((6, 2), bool)),
}


def checked(verb, body, xs):
    error, result = checkify.checkify(jax.jit(lambda xs: verb(body, xs)))(xs)
    return error.get(), result


@parametrize("verb", WITH_CHECKS)
def test_a_check_of_values_is_made_in_each_step(verb):
    error, _ = checked(verb, not_negative, XS)
    assert error is None
    error, _ = checked(verb, not_negative, XS.at[4].set(-1.0))
    assert "negative" in error


@parametrize("verb", {name: verb for name, verb in WITH_CHECKS.items() if name != "while_scan"})
def test_checks_are_kept_under_a_gradient_outside_of_them(verb):
    def loss(xs):
        error, result = checkify.checkify(lambda xs: verb(not_negative, xs))(xs)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(result)), error

    (_, error), gradient = jax.value_and_grad(loss, has_aux=True)(XS.at[4].set(-1.0))
    assert "negative" in error.get()
    chex.assert_tree_all_finite(gradient)


def test_checkify_goes_around_the_gradient_of_while_scan():
    """Its rule for derivatives runs the checks once more; JAX functionalizes no rule that is called from outside."""

    def loss(xs):
        return jnp.sum(WITH_CHECKS["while_scan"](not_negative, xs))

    bad = XS.at[4].set(-1.0)
    assert "negative" in checkify.checkify(jax.grad(loss))(bad)[0].get()
    with pytest.raises(ValueError, match="not functionalized"):
        jax.grad(lambda xs: checkify.checkify(loss)(xs)[1])(bad)


@parametrize("options", {"skipped": {}, "compact": {"chunk": 2, "compact": True}})
def test_padding_sets_off_no_check(options):
    verb, padding = masked(lengths=jnp.array([4, 3]), **options), XS.at[4:].set(-1.0).at[3, 1].set(-1.0)
    assert checked(verb, not_negative, padding)[0] is None
    assert "negative" in checked(verb, not_negative, padding.at[3, 0].set(-1.0))[0]


def test_padding_sets_off_no_check_of_floats():
    run = jax.jit(lambda xs: masked(lengths=jnp.array([4, 4]))(lambda c, x: (c + jnp.log(x + 1), x), xs))
    for xs, alarmed in ((XS.at[4:].set(-3.0), False), (XS.at[3].set(-3.0), True)):
        error, _ = checkify.checkify(run, errors=checkify.float_checks)(xs)
        assert (error.get() is not None) == alarmed


def test_elements_of_vmap_that_have_ended_set_off_no_check():
    def one(xs, length):
        return treescan.mask_scan(not_negative, jnp.zeros(2), xs, lengths=jnp.full(2, length))

    xs = jnp.stack([XS, XS.at[2:].set(-1.0)])
    for lengths, alarmed in ((jnp.array([6, 2]), False), (jnp.array([6, 3]), True)):
        error, _ = checkify.checkify(jax.vmap(one))(xs, lengths)
        assert (error.get() is not None) == alarmed


@pytest.fixture
def no_verdict_is_kept():
    _types_agree.cache_clear()
    yield
    _types_agree.cache_clear()


@pytest.mark.parametrize("assertion", ["assert_trees_all_equal_structs", "assert_trees_all_equal_shapes_and_dtypes"])
def test_chex_decides_what_a_step_may_return(assertion, monkeypatch, no_verdict_is_kept):
    monkeypatch.setattr(chex, assertion, lambda *trees: chex.assert_equal(0, 1))
    given = {"h": INIT}
    assert not agree(given, {"h": INIT + 1})
    monkeypatch.undo()
    _types_agree.cache_clear()
    assert agree(given, {"h": INIT + 1})


def test_chex_is_asked_once_for_the_same_types(monkeypatch, no_verdict_is_kept):
    asked = []
    monkeypatch.setattr(chex, "assert_trees_all_equal_shapes_and_dtypes", lambda *trees: asked.append(trees))
    for _ in range(2):
        jax.make_jaxpr(lambda xs: treescan.scan(lambda c, x: (c + x, x), INIT, xs))(XS)
    assert len(asked) == 1


@pytest.mark.parametrize("returned", [{"h": jnp.zeros(3)}, {"h": INIT, "more": INIT}])
def test_a_change_of_the_carry_is_refused_where_assertions_are_off(returned, no_verdict_is_kept):
    chex.disable_asserts()
    try:
        with pytest.raises(treescan.errors.CarryError, match="differs from the one it was given"):
            treescan.scan(lambda c, x: (returned, x), {"h": INIT}, XS)
    finally:
        chex.enable_asserts()
