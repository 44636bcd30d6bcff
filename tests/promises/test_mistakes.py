"""Mistakes of new users: what is only a warning or a note, what is no mistake, and whether the advice works.

The texts of the errors are in `test_errors.py`.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import treescan
import treescan.carries
from treescan import Remat, fold, fold_layers, fori, mask_scan, scan, scan_layers, while_scan
from treescan.integrations import nnx as of_nnx

pytestmark = pytest.mark.quick

H, XS = jnp.ones(3), jnp.ones((4, 3))
POLICIES = jax.checkpoint_policies


def both(run: Callable[[Any], Any]) -> Iterator[Callable[[Any], Any]]:
    yield run
    yield jax.jit(run)


# --- policies ---------------------------------------------------------------------------------------------------------


def named(h: Any, x: Any) -> Any:
    return checkpoint_name(jnp.sin(h), "sin") + x


def scanned(h: Any, x: Any) -> Any:
    return named(h, x), None


ONLY = Remat(policy=POLICIES.save_only_these_names("x"))
OFFLOADED = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["x"],
    names_which_can_be_offloaded=["sin"],
    offload_src="device",
    offload_dst="pinned_host",
)
POLICIES_OF_X = {
    "only": ONLY.policy,
    "all but": POLICIES.save_any_names_but_these("x"),
    "offloaded": OFFLOADED,
    "within another": POLICIES.save_from_both_policies(
        POLICIES.dots_saveable, POLICIES.save_only_these_names("x", "sin")
    ),
}


@pytest.mark.parametrize("policy", POLICIES_OF_X.values(), ids=POLICIES_OF_X)
def test_a_policy_with_a_name_that_the_body_does_not_have(policy: Any) -> None:
    for run in both(lambda h: scan(scanned, h, XS, remat=Remat(policy=policy))):
        text = r'the name "x", which no value in `scanned` .* has. It has the names "sin"'
        with pytest.warns(UserWarning, match=text):
            run(H)


def test_each_verb_warns_of_the_name() -> None:
    for run in (
        lambda h: fori(0, 4, lambda i, h: named(h, 1.0), h, remat=ONLY),
        lambda h: mask_scan(scanned, h, XS, lengths=jnp.array([1, 2, 3]), remat=ONLY),
        lambda h: while_scan(lambda h: jnp.sum(h) < 99, scanned, h, XS, remat=ONLY),
        lambda h: while_scan(lambda h: h < 99, scanned, h, XS, remat=ONLY),
        lambda h: scan_layers(lambda layer, h: scanned(h, layer), h, XS, remat=ONLY),
        lambda h: fold_layers([lambda layer, h: named(h, layer)] * 2, h, [XS, XS], remat=ONLY),
    ):
        with pytest.warns(UserWarning, match='refers to the name "x"'):
            run(H)


def test_a_body_without_names() -> None:
    with pytest.warns(UserWarning, match=r'It has no names. `jax.ad_checkpoint.checkpoint_name\(value, "x"\)` gives'):
        fold(lambda h, x: h + x, H, XS, remat=ONLY)


@jax.custom_vjp
def with_a_rule(h: Any) -> Any:
    return jnp.sin(h)


with_a_rule.defvjp(lambda h: (jnp.sin(h), checkpoint_name(jnp.cos(h), "x")), lambda cos, d: (cos * d,))

FINE: dict[str, Callable[[], Any]] = {
    "the name is there": lambda: fold(named, H, XS, remat=Remat(policy=POLICIES.save_only_these_names("sin"))),
    "in a function within": lambda: fold(lambda h, x: jax.jit(lambda h: checkpoint_name(h, "x"))(h), H, XS, remat=ONLY),
    "in one block of two": lambda: fold_layers(
        [lambda layer, h: named(h, layer), lambda layer, h: checkpoint_name(h, "x") + layer], H, [XS, XS], remat=ONLY
    ),
    "in a rule for derivatives": lambda: fold(lambda h, x: with_a_rule(h) + x, H, XS, remat=ONLY),
    "a policy of the user's own": lambda: fold(named, H, XS, remat=Remat(policy=lambda prim, *_, **__: False)),
}


@pytest.mark.parametrize("run", FINE.values(), ids=FINE)
def test_no_warning(run: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


# --- arguments by position --------------------------------------------------------------------------------------------


def is_called(made: Any) -> bool:
    """Whether users call it: a function, or settings."""
    return inspect.isfunction(made) or made.__module__ == "treescan._types"


@pytest.mark.parametrize(
    ("module", "name"),
    [(m, name) for m in (treescan, treescan.carries) for name in m.__all__ if is_called(getattr(m, name))],
)
def test_arguments_that_do_not_fit_the_parameters(module: Any, name: str) -> None:
    """Python's own words name neither what is missing as the user calls it, nor a cure."""
    called = getattr(module, name)
    known = inspect.signature(called).parameters.values()
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in known):
        with pytest.raises(treescan.errors.ArgumentTypeError, match=rf"^`{name}` needs `(.|\n)*Call it as\s+`{name}\("):
            called()
    if not any(p.kind is p.VAR_POSITIONAL for p in known):
        with pytest.raises(treescan.errors.ArgumentTypeError, match=rf"^`{name}` takes \((.|\n)*\n\n  \w"):
            called(*range(20))


def test_what_is_given_by_name_is_not_missing() -> None:
    with pytest.raises(treescan.errors.ArgumentTypeError, match=r"^`scan` needs `init`"):
        scan(f=scanned)  # type: ignore[call-arg]


# --- names of settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "field", "advice"),
    [
        (Remat, "level", "Did you mean `levels`?"),
        (
            treescan.meters.Progress,
            "every",
            "`updates` is how many updates a run has. For one in every k steps: `updates=length // k`.",
        ),
        (Remat, "q", "Its options are budget, chunk, levels, offload, policy."),
    ],
)
def test_misspelt_fields(kind: Any, field: str, advice: str) -> None:
    with pytest.raises(treescan.errors.ArgumentTypeError) as caught:
        kind(**{field: 2})
    assert str(caught.value).split("\n\n  ") == [f"`{kind.__name__}` has no option `{field}`.", f"{advice}\n"]


WHILE = functools.partial(while_scan, lambda _: False)
FORMER: dict[str, tuple[str, str, tuple[Callable[..., Any], ...]]] = {
    "name": (
        "has no option",
        'Write the call in a `jax.named_scope`: `with jax.named_scope("..."):`.',
        (scan, fold, mask_scan, scan_layers, fold_layers, treescan.accumulate, treescan.stream, treescan.chunk_map),
    ),
    "carry_axes": ("has no option", '`row_axes={"carry": ...}` replaces it.', (mask_scan, WHILE)),
    "x_axes": ("has no option", '`row_axes={"x": ...}` replaces it.', (mask_scan, WHILE)),
    "y_axes": ("has no option", '`row_axes={"y": ...}` replaces it.', (mask_scan, WHILE)),
    "in_axes": ("takes no", '`time_axis={"xs": ...}` says where the steps are in xs.', (mask_scan,)),
    "out_axes": ("takes no", '`time_axis={"ys": ...}` says where the steps are in ys.', (mask_scan,)),
}


@pytest.mark.parametrize(("option", "verb"), [(each, verb) for each, (*_, verbs) in FORMER.items() for verb in verbs])
def test_options_of_earlier_versions(option: str, verb: Callable[..., Any]) -> None:
    given = {treescan.stream: {"part": 2}, treescan.chunk_map: {"chunk_size": 2}}.get(verb, {})
    operands = (XS,) if verb is treescan.chunk_map else (H, XS)
    says, cure, _ = FORMER[option]
    with pytest.raises(treescan.TreescanError) as caught:
        verb(scanned, *operands, **given, **{option: 1})
    text = " ".join(str(caught.value).split())
    assert f"{says} `{option}`" in text and text.endswith(cure)


@pytest.mark.parametrize(("verb", "most"), [(mask_scan, 18), (WHILE, 14), (scan_layers, 14), (fold_layers, 14)])
def test_how_many_options_a_verb_has(verb: Callable[..., Any], most: int) -> None:
    """Beside those of `jax.lax.scan`."""
    with pytest.raises(treescan.errors.ArgumentTypeError) as caught:
        verb(scanned, H, XS, qqq=1)
    options = set(str(caught.value).partition("Its options are")[2].replace(".", "").replace(",", "").split())
    options |= {p.name for p in inspect.signature(verb).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert options > {"reverse", "unroll", "key"}
    assert len(options - {"length", "reverse", "unroll"}) <= most


# --- lists ------------------------------------------------------------------------------------------------------------


def test_a_list_may_be_a_stack() -> None:
    weights = [jnp.ones((4, 3)), jnp.ones((4, 3))]
    assert fold_layers(lambda layer, h: h + layer[0] + layer[1], H, weights)[0] == 9
    assert fold(lambda h, x: h + x[0] * x[1], H, weights)[0] == 5


@pytest.mark.parametrize("is_list", [True, False])
def test_an_error_of_the_user_is_told_of_a_list_of_layers_alone(is_list: bool) -> None:
    def block(layer: Any, h: Any) -> Any:
        (only,) = layer if is_list else [h, h]
        return only

    with pytest.raises(ValueError, match="too many values") as caught:
        fold_layers(block, H, [jnp.ones((4, 3))] * 2 if is_list else jnp.ones((4, 3)))
    notes = getattr(caught.value, "__notes__", ())
    assert any("Did you forget `treescan.stack`?" in note for note in notes) is is_list


# --- modules of flax --------------------------------------------------------------------------------------------------


def test_a_dropout_in_init_works() -> None:
    def step(carry: Any, x: Any) -> Any:
        dropout, h = carry
        return (dropout, dropout(h) + x), h

    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    (dropout, _), hs = scan(step, (dropout, H), jnp.ones((8, 3)))
    assert len(np.unique(hs)) > 2  # its numbers differ from step to step


def tower(blocks: Any) -> Any:
    @of_nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x: Any, block: Any) -> Any:
        return jnp.tanh(block(x))

    return lambda x: run(x, blocks)


def test_a_module_of_nnx_jit_within_another_loop_is_told_of_init_which_works() -> None:
    blocks = treescan.init_layers(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)), jax.random.key(0), 2)

    @nnx.jit
    def run(blocks: Any, x: Any) -> Any:
        return while_scan(lambda x: jnp.sum(x) > 0, lambda x, _: (tower(blocks)(x), None), x, max_length=2).carry

    with pytest.raises(
        treescan.errors.ArgumentError, match=r"put the module into its `init`, .* argument of a `nnx.jit`"
    ):
        run(blocks, H)

    def step(carry: Any, _: Any) -> Any:
        return (carry[0], tower(carry[0])(carry[1])), None

    ended = while_scan(lambda carry: jnp.sum(jnp.abs(carry[1])) > 0, step, (blocks, H), max_length=2)
    by_hand = H
    for layer in (*treescan.unstack(blocks), *treescan.unstack(blocks)):
        by_hand = jnp.tanh(layer(by_hand))
    np.testing.assert_allclose(ended.carry[1], by_hand, rtol=1e-5)


class Recurrent(linen.Module):
    """Calls a module in the body of a plain verb."""

    statistics: bool = False

    @linen.compact
    def __call__(self, xs: Any) -> Any:
        dense = linen.Dense(3)
        if self.is_initializing():
            dense(xs[0])
        norm = linen.BatchNorm(use_running_average=False) if self.statistics else (lambda h: h)
        return fold(lambda h, x: norm(dense(h) + x), jnp.ones((2, 3)), xs)


def test_a_linen_module_may_be_called_that_has_its_variables_and_changes_none() -> None:
    xs = jnp.ones((4, 2, 3))
    variables = Recurrent().init(jax.random.key(0), xs)
    h = jnp.ones((2, 3))
    for x in xs:
        h = linen.Dense(3).apply({"params": variables["params"]["Dense_0"]}, h) + x
    for run in both(lambda xs: Recurrent().apply(variables, xs)):
        np.testing.assert_allclose(run(xs), h, rtol=1e-5)
    with pytest.raises(treescan.errors.BodyError, match=r"made or changed variables of a flax\.linen module"):
        Recurrent(statistics=True).init(jax.random.key(0), xs)


# --- objects that JAX does not know -----------------------------------------------------------------------------------


class Settings:
    """Hashes by its identity, and holds no array."""

    rate: Any = 1.0


def rated(c: Any, x: Any) -> Any:
    settings = next(each for each in (*c, *x) if isinstance(each, Settings))
    return (c[0] + settings.rate, *c[1:]), None


HOLDING: dict[str, Callable[[Any], Any]] = {
    "init": lambda held: scan(rated, (0.0, held), (jnp.ones(4),))[0][0],
    "xs": lambda held: scan(rated, (0.0,), (jnp.ones(4), held))[0][0],
    "init of mask_scan": lambda held: mask_scan(rated, (0.0, held), (jnp.ones(4),), lengths=4)[0][0],
    "args": lambda held: fold_layers(lambda w, x, held: x + w * held.rate, 0.0, jnp.ones(4), args=(held,)),
}


@pytest.mark.parametrize("run", HOLDING.values(), ids=HOLDING)
@pytest.mark.parametrize("slots", [False, True])
def test_an_object_that_was_changed_is_not_served_from_a_cache(run: Callable[[Any], Any], slots: bool) -> None:
    held: Any = type("Slotted", (Settings,), {"__slots__": ("rate",)})() if slots else Settings()
    seen = []
    for rate in (1.0, 1.0, 3.0, jnp.float32(2.0) if run is HOLDING["args"] else 2.0):
        held.rate = rate
        seen.append(float(run(held)))
    assert seen == [4.0, 4.0, 12.0, 8.0]


def test_parts_of_an_object_are_looked_at_and_no_end_of_them_is_needed() -> None:
    held = Settings()
    held.rate, held.words = {1: [held], "a": held}, [str(i) for i in range(3000)]  # type: ignore[attr-defined]
    assert scan(lambda c, x: (c, x), held, XS)[0] is held
    held.rate[2] = [{"deep": Settings()}]
    held.rate[2][0]["deep"].rate = XS
    with pytest.raises(treescan.errors.ArgumentTypeError, match="holds arrays, but is not a pytree"):
        scan(lambda c, x: (c, x), held, XS)


def test_an_object_that_was_not_changed_is_not_traced_again() -> None:
    traces, counts, held = [], [], Settings()

    def step(c: Any, x: Any) -> Any:
        traces.append(x)
        return (c[0] + held.rate, c[1]), None

    for _ in range(3):
        scan(step, (0.0, held), jnp.ones(4))
        counts.append(len(traces))
    assert counts == [counts[0]] * 3


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "show": (
        lambda: fold(lambda c, x: c + x, 0.0, XS[0], progress=treescan.meters.Progress(show=lambda step, c: {"c": c})),
        "`show` of the `Progress`, called with the carry,",
    ),
    "reset_to": (
        lambda: mask_scan(lambda c, x: (c, x), 0.0, XS[0], resets=XS[0] > 2, reset_to=lambda: 0.0),
        "`reset_to`, called with `init`,",
    ),
    "init": (
        lambda: treescan.init_layers(lambda: 0.0, jax.random.key(0), 3),
        "`init` of `init_layers`, called with a key and `args`,",
    ),
}


@pytest.mark.parametrize(("run", "whose"), OTHERS.values(), ids=OTHERS)
def test_what_a_function_beside_the_body_raises_says_whose_it_is(run: Callable[[], Any], whose: str) -> None:
    with pytest.raises(TypeError, match="positional argument") as caught:
        run()
    assert f"{whose} raised this." in caught.value.__notes__
