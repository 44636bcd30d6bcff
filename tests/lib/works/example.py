"""What the table's examples are made of: a small cell, its state, and the forms in which each option is given."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from treescan.carries import Ema, ema

from . import plain

T, D = 5, 2
DECAY = 0.25


class State(NamedTuple):
    h: Float[Array, "*rows d"]
    n: Int[Array, "*rows"]
    act: Any = None


class X(NamedTuple):
    a: Float[Array, "*rows d"]
    b: Float[Array, "*rows d"]


class Y(NamedTuple):
    h: Float[Array, "*rows d"]
    n: Int[Array, "*rows"]


class Form(NamedTuple):
    """One way to give an option.

    Attributes:
        option: the option's name, or what the body or the data is like.
        options: what is passed to the verb, by name.
        how: what the body and the data are like, for the program.
        free: whether it changes the cost alone, and no value.
    """

    option: str
    options: Mapping[str, Any] = {}
    how: frozenset[str] = frozenset()
    free: bool = False


Given = dict[str, jax.Array]
Program = Callable[[Any, Mapping[str, Any], frozenset[str], Given], Any]


class Verb(NamedTuple):
    """A verb of the table.

    Attributes:
        program: `program(lib, options, how, given)` calls the verb of `lib`, which is treescan or `plain`.
        forms: by the name that the table shows.
        given: the numbers that the program computes with, and is differentiated by.
        alone: forms that are tried under a few transforms, and not in pairs.
        brief: whether every option is: the program is that of another verb, less or more of its outputs.
    """

    program: Program
    forms: Mapping[str, Form]
    given: Given
    alone: frozenset[str] = frozenset()
    brief: bool = False


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), jnp.float32)


def same(value: Any) -> Any:
    return value


def has(*names: str) -> frozenset[str]:
    return frozenset(names)


# The cell.


def cell(
    w: Any, state: State, term: Any, how: frozenset[str], key: Any = None, valid: Any = None, first: Any = None
) -> tuple[State, Y]:
    """One step: an array that is multiplied by weights, and a count."""
    linear = "linear" in how
    act = state.act or (same if linear else jnp.tanh)
    h = state.h * jnp.broadcast_to(w[0], state.h.shape) if "apart" in how else state.h @ w
    h = act(h if term is None else h + term)
    if key is not None:
        h = h * jnp.broadcast_to(1 + jax.random.uniform(key, (D,)), h.shape)
    if valid is not None:
        h = h * jnp.where(valid, 2.0, 1.0)[..., None]
    if first is not None:
        h = h * jnp.where(first, 3.0, 1.0)[..., None]
    return state._replace(h=h, n=state.n + 1), Y(2 * h if linear else h * h, state.n)


def body_of(
    function: Callable[..., Any], count: int, how: frozenset[str], types: Mapping[str, Any], name: str = "step"
) -> Any:
    """A body of `count` arguments, of these types, that takes the keywords that its call passes, and no others."""
    arguments, keywords = "abcde"[:count], [key for key in ("key", "valid", "first") if key in how]
    taken = ", ".join([*arguments, *(["*", *keywords] if keywords else [])])
    passed = ", ".join([*arguments, *(f"{key}={key}" for key in keywords)])
    made = eval(compile(f"lambda function: lambda {taken}: function({passed})", __file__, "eval"))(function)
    made.__name__ = made.__qualname__ = name
    if "annotated" in how:
        made.__annotations__ = dict(types)
    return made


def start(given: Given, how: frozenset[str], count: Any) -> State:
    """The carry: with a function in it, if the example asks for one."""
    act = (same if "linear" in how else jnp.sin) if "static" in how else None
    return State(given["h"], count, act)


def carried(lib: Any, body: Any, init: State, how: frozenset[str]) -> tuple[Any, State]:
    """The body and the init, with a custom carry if the example asks for one: by hand where the meaning is plain."""
    if "ema" not in how:
        return body, init
    if lib is plain:
        bodies = [plain.averaged(one, DECAY) for one in body] if isinstance(body, list) else plain.averaged(body, DECAY)
        return bodies, init
    return body, init._replace(h=ema(init.h, DECAY))


def values(tree: Any) -> Any:
    """The result with a custom carry's average in its place."""
    return jax.tree.map(
        lambda node: node.value if isinstance(node, Ema) else node, tree, is_leaf=lambda node: isinstance(node, Ema)
    )


def flag(given: Given) -> Any:
    """A bool that is traced wherever `given` is, and is another one for the second of two mapped examples."""
    return jnp.sum(given["w"]) > 0


KEY = jax.random.key(7)
