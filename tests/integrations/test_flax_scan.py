"""`treescan.integrations.flax.scan` against `flax.linen.scan`: variables, outputs and gradients of the same models."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_models import MODELS, XS, Block, Cell, H, Model, layers, recurrent
from oracle import is_inexact
from thin import parametrize

from treescan.integrations.flax import scan

Result = dict[str, Any]
KEYS = {name: jax.random.key(seed) for seed, name in enumerate(("params", "dropout"))}


def keys_of(case: Model) -> dict[str, Any]:
    return {name: KEYS[name] for name in case.streams}


def at_apply(case: Model) -> dict[str, Any]:
    return {"rngs": {name: key for name, key in keys_of(case).items() if name != "params"}, "mutable": case.mutable}


def loss(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return sum((jnp.sum(jnp.sin((k + 2) * leaf)) for k, leaf in enumerate(leaves)), start=jnp.float32(0))


def merged(floats: Any, variables: Any) -> Any:
    return jax.tree.map(lambda f, v: v if f is None else f, floats, variables, is_leaf=lambda node: node is None)


def with_gradient(case: Model, using: Callable[..., Any]) -> Result:
    """Variables that are made, what `apply` returns, and the gradient by all floats: one program."""
    module = case.build(using)

    def everything(inputs: tuple[Any, ...]) -> Result:
        made, variables = module.init_with_output(keys_of(case), *inputs)
        floats = jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, (variables, inputs))

        def of_floats(floats: Any) -> tuple[jax.Array, Any]:
            given, args = merged(floats, (variables, inputs))
            applied = module.apply(given, *args, **at_apply(case))
            return loss(applied), applied

        gradient, applied = jax.grad(of_floats, has_aux=True)(floats)
        return {"made": made, "variables": variables, "applied": applied, "gradient": gradient}

    return jax.jit(everything)(case.inputs)


def step_by_step(case: Model, using: Callable[..., Any]) -> Result:
    """The same without `jax.jit`, and without the gradient; and what a second call returns, of what the first did."""
    module = case.build(using)
    made, variables = module.init_with_output(keys_of(case), *case.inputs)
    applied = module.apply(variables, *case.inputs, **at_apply(case))
    changed = {**variables, **applied[1]} if case.mutable else variables
    again = module.apply(changed, *case.inputs, **at_apply(case))
    return {"made": made, "variables": variables, "applied": applied, "again": again}


def disabled(case: Model, using: Callable[..., Any]) -> Result:
    """Loops that are Python's, in which each step counts keys on. Variables are made by flax's: `apply` is asked."""
    variables = case.build(nn.scan).init(keys_of(case), *case.inputs)
    with jax.disable_jit():
        return {"applied": case.build(using).apply(variables, *case.inputs, **at_apply(case))}


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structures, boxes and names of axes among them, types and values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


DAILY = ("in_and_out", "changed_broadcast", "transformed_data")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in DAILY else pytest.mark.slow) for name, case in MODELS.items()],
)
def test_is_flax_s_scan(case: Model) -> None:
    assert_same(with_gradient(case, scan), with_gradient(case, nn.scan))


EAGER = ("residual_stack", "filters_that_deny", "in_and_out")


@parametrize("case", {name: MODELS[name] for name in EAGER})
def test_is_flax_s_scan_without_jit(case: Model) -> None:
    assert_same(step_by_step(case, scan), step_by_step(case, nn.scan))


@pytest.mark.parametrize("name", [*EAGER, "changed_broadcast"])
def test_with_jit_disabled(name: str) -> None:
    assert_same(disabled(MODELS[name], scan), disabled(MODELS[name], nn.scan))


# Names of axes.


@pytest.mark.parametrize("name", ["partitioned", "logically_partitioned"])
def test_axis_names_are_added_and_removed(name: str) -> None:
    case, seen = MODELS[name], list[Any]()

    def note(variables: Any, rngs: Any) -> Any:
        seen.append(nn.get_partition_spec(variables[2]))
        return variables, rngs

    def noting(target: Any, **options: Any) -> Any:
        return scan(target, **options, data_transform=note)

    variables = case.build(noting).init(KEYS, H)
    (spec,) = [spec for spec in jax.tree.leaves(nn.get_partition_spec(variables)) if "mlp" in spec]
    assert tuple(spec) == (("layers", "embed", "mlp") if name == "partitioned" else ("embed", "layers", "mlp"))
    seen.clear()
    case.build(noting).apply(variables, H)
    assert all("layers" not in spec and "mlp" in spec for spec in jax.tree.leaves(seen[0]) if spec)


# Traces.


def counted(target: Any, calls: list[None]) -> Any:
    """The same module class, or partial of one, which notes when Python runs it."""

    class Counted(getattr(target, "func", target)):
        @nn.compact
        def __call__(self, *args: Any) -> Any:
            calls.append(None)
            return super().__call__(*args)

    return functools.partial(Counted, **getattr(target, "keywords", {}))


LOOPS = {
    "recurrent": (recurrent, (H, XS), Cell, {}),
    "layers": (layers, (H,), Block, {}),
    "layers_with_keys": (layers, (H,), functools.partial(Block, rate=0.5), {"dropout": True}),
}


def traces_of(name: str, using: Callable[..., Any], call: str) -> int:
    """How often `call`, "init" or "apply", runs the body."""
    build, inputs, target, split = LOOPS[name]
    calls: list[None] = []
    module = build(using, counted(target, calls), split_rngs={"params": name != "recurrent", **split})
    variables = module.init(KEYS, *inputs)
    before = len(calls)
    jax.eval_shape(functools.partial(module.apply, rngs={"dropout": KEYS["dropout"]}), variables, *inputs)
    return before if call == "init" else len(calls) - before


@pytest.mark.parametrize(
    ("name", "call", "expected"),
    [("recurrent", "init", 1), ("recurrent", "apply", 1), ("layers", "apply", 1), ("layers_with_keys", "apply", 2)],
)
def test_the_body_is_traced_once_unless_it_reads_keys(name: str, call: str, expected: int) -> None:
    assert traces_of(name, scan, call) == expected
    assert traces_of(name, nn.scan, call) == 2
