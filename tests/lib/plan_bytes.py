"""Plans of gradients over layers and steps, with the bytes that `plan_remat` predicts and those that XLA plans."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import treescan
from treescan import Remat
from treescan.types import RematPlan

Types = Any
PLANS = [
    None,
    Remat(),
    Remat(levels=2),
    Remat(levels=3),
    Remat("everything_saveable", levels=2),
    Remat("dots_saveable"),
    Remat("dots_saveable", levels=2),
    Remat(levels=2, chunk=2),
]


def mlp(layer, x):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def sine(layer, x):
    return x + jnp.sin(x @ layer["up"]) @ layer["down"]


def plain(layer, x):
    return jnp.tanh(x @ layer["w"])


def _norm(x, scale):
    mean = jnp.mean(jnp.square(x), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * (1 + scale[None, None])


def transformer(layer, x):
    h = _norm(x, layer["scale_0"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, layer[name]) for name in "qkv")
    places = jnp.arange(x.shape[1])
    logits = jnp.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(places[:, None] >= places[None], logits, -1e9), -1)
    x = x + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", weights, v), layer["o"])
    h = _norm(x, layer["scale_1"])
    return x + (jax.nn.gelu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]


def _of(**shapes: tuple[int, ...]) -> Types:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def mlp_stack(count: int, width: int) -> Types:
    return _of(up=(count, width, 4 * width), down=(count, 4 * width, width))


def plain_stack(count: int, width: int) -> Types:
    return _of(w=(count, width, width))


def transformer_stack(count: int, width: int) -> Types:
    heads, inside = (count, width, 4, width // 4), (count, width, 4 * width)
    out, down = (count, 4, width // 4, width), (count, 4 * width, width)
    scales = {f"scale_{i}": (count, width) for i in range(2)}
    return _of(q=heads, k=heads, v=heads, o=out, gate=inside, up=inside, down=down, **scales)


@dataclasses.dataclass(frozen=True)
class Case:
    """One plan of one gradient. `run(remat)` is a function of x and layers, `plan(remat)` its plan."""

    name: str
    remat: Any
    x: Types
    layers: Types
    run: Callable[..., Any]
    plan: Callable[[Any], RematPlan]

    @property
    def predicted(self) -> int:
        return self.plan(self.remat).needed_bytes

    @property
    def compiled(self) -> int:
        return compiled(lambda *given: self.run(*given, remat=self.remat), self.x, self.layers)


def compiled(run: Callable[..., Any], *given: Types) -> int:
    """The bytes that the gradient with respect to all arguments needs beside these and itself."""
    places = tuple(range(len(given)))
    gradient = jax.grad(lambda *given: sum(map(jnp.sum, jax.tree.leaves(run(*given)))), places)
    return jax.jit(gradient).lower(*given).compile().memory_analysis().temp_size_in_bytes


def layers_case(name: str, blocks: Any, x: tuple[int, ...], layers: Types, remat: Any) -> Case:
    x = jax.ShapeDtypeStruct(x, jnp.float32)
    return Case(
        name,
        remat,
        x,
        layers,
        lambda x, layers, remat: treescan.fold_layers(blocks, x, layers, remat=remat),
        lambda remat: treescan.plan_remat(blocks, x, layers=layers, remat=remat, pair=False),
    )


def steps_case(name: str, steps: int, rows: int, width: int, remat: Any) -> Case:
    """A recurrence over steps with shared weights."""
    x, weights = jax.ShapeDtypeStruct((rows, width), jnp.float32), _of(w=(width, width))

    def run(x, weights, remat):
        return treescan.fold(lambda h, _: jnp.tanh(h @ weights["w"]), x, length=steps, remat=remat)

    def plan(remat):
        found = []

        def look(weights):
            step = lambda h, _: jnp.tanh(h @ weights["w"])  # noqa: E731
            found.append(treescan.plan_remat(step, x, length=steps, remat=remat, pair=False))

        jax.eval_shape(look, weights)
        return found[0]

    return Case(name, remat, x, weights, run, plan)


def cases() -> Iterator[Case]:
    """72 plans: parameters and activations large and small, levels, policies, remainders, patterns, shared weights."""
    for remat in PLANS:
        yield layers_case("large parameters", plain, (16, 256), plain_stack(128, 256), remat)
        yield layers_case("large parameters, two products", mlp, (16, 128), mlp_stack(64, 128), remat)
        yield layers_case("large activations", mlp, (512, 32), mlp_stack(64, 32), remat)
        yield layers_case("both", mlp, (512, 128), mlp_stack(16, 128), remat)
        yield layers_case("a prime number of layers", mlp, (128, 64), mlp_stack(37, 64), remat)
        yield layers_case("transformer", transformer, (2, 64, 64), transformer_stack(16, 64), remat)
        pattern, stacks = [mlp, mlp, sine], [mlp_stack(16, 64) for _ in range(3)]
        yield layers_case("pattern", pattern, (128, 64), stacks, remat)
        yield layers_case("pattern with a rest", pattern, (128, 64), [mlp_stack(17, 64), *stacks[1:]], remat)
        yield steps_case("recurrence", 256, 64, 128, remat)
