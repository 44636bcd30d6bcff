"""What a user sees of an error's way: their own frames, and one frame of the library a verb call, that of the verb."""

import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import treescan

pytestmark = pytest.mark.quick

PACKAGE = Path(treescan.__file__).parent
XS, ROWS, LENGTHS = jnp.arange(3.0), jnp.ones((3, 2)), jnp.array([3, 1])

MODES: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "eager": lambda run: run(jnp.ones(())),
    "jit": lambda run: jax.jit(run)(jnp.ones(())),
    "vmap": lambda run: jax.vmap(run)(jnp.ones(2)),
    "grad": lambda run: jax.grad(run)(jnp.ones(())),
    "jit_of_grad_of_vmap": lambda run: jax.jit(jax.grad(lambda ones: jax.vmap(run)(ones).sum()))(jnp.ones(2)),
    "disable_jit": lambda run: without_jit(run),
}

VERBS: dict[str, tuple[str, Callable[[Callable[..., Any], Any], Any]]] = {
    "scan": ("scan", lambda body, one: treescan.scan(body, one, XS)),
    "scan_length_0": ("scan", lambda body, one: treescan.scan(body, one, None, 0)),
    "scan_key": ("scan", lambda body, one: treescan.scan(body, one, XS, key=jax.random.key(0))),
    "scan_axes": ("scan", lambda body, one: treescan.scan(body, one, ROWS, in_axes=1, out_axes=-1)),
    "fold": ("fold", lambda body, one: treescan.fold(body, one, XS)),
    "accumulate": ("accumulate", lambda body, one: treescan.accumulate(body, one, XS)),
    "fori": ("fori", lambda body, one: treescan.fori(0, 3, body, one)),
    "scan_layers": ("scan_layers", lambda body, one: treescan.scan_layers(body, one, XS)),
    "fold_layers": ("fold_layers", lambda body, one: treescan.fold_layers(body, one, XS, remat="step")),
    "pattern": ("fold_layers", lambda body, one: treescan.fold_layers([body, body], one, (XS, XS[:2]))),
    "mask_scan": ("mask_scan", lambda body, one: treescan.mask_scan(body, one * jnp.ones(2), ROWS, lengths=LENGTHS)),
}


class MyError(Exception):
    """An exception of the user's own."""


def without_jit(run: Callable[[Any], Any]) -> Any:
    with jax.disable_jit():
        return run(jnp.ones(()))


def returns_none(*args: Any, **keywords: Any) -> None:
    """A body that no verb accepts."""


def raises(*args: Any, **keywords: Any) -> Any:
    raise MyError("mine")


def raises_from(*args: Any, **keywords: Any) -> Any:
    try:
        raise ValueError("the cause")
    except ValueError as cause:
        raise MyError("mine") from cause


def raises_during(*args: Any, **keywords: Any) -> Any:
    try:
        raise ValueError("the context")
    except ValueError:
        raise MyError("mine")  # noqa: B904, the implicit chain is what is tested


def caught(verb: str, body: Callable[..., Any], mode: str = "eager") -> BaseException:
    def call(one: Any) -> Any:
        return VERBS[verb][1](body, one)

    with pytest.raises((treescan.TreescanError, MyError)) as info:
        MODES[mode](call)
    return info.value


def frames(error: BaseException) -> list[str]:
    """The functions from the one that called a verb inwards, those of JAX in between included."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return names[names.index("call") + 1 :]


def library_frames(error: BaseException) -> list[str]:
    walked = traceback.walk_tb(error.__traceback__)
    return [f.f_code.co_name for f, _ in walked if Path(f.f_code.co_filename).is_relative_to(PACKAGE)]


def is_chained(error: BaseException) -> bool:
    return error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)


def modules_printed(error: BaseException) -> set[str]:
    """The modules of the library that a printed traceback names."""
    printed = "".join(traceback.format_exception(error))
    assert "another exception" not in printed
    files = re.findall(r'File "([^"]*)"', printed)
    return {Path(file).stem for file in files if Path(file).is_relative_to(PACKAGE)}


OTHERS = list(MODES)[1:]
IN_TURNS = [(verb, mode) for i, verb in enumerate(VERBS) for mode in ("eager", OTHERS[i % len(OTHERS)])]


@pytest.mark.parametrize(("verb", "mode"), IN_TURNS)
def test_errors_show_the_verb_and_what_the_user_wrote(verb: str, mode: str) -> None:
    name, _ = VERBS[verb]
    module = Path(inspect.getsourcefile(getattr(treescan, name)) or "").stem
    of_library, of_user = caught(verb, returns_none, mode), caught(verb, raises, mode)
    assert isinstance(of_library, treescan.BodyError | treescan.CarryError)
    assert library_frames(of_library) == [name]
    for error, shown in ((of_library, [name]), (of_user, [name, "raises"])):
        assert [f for f in frames(error) if f != "<lambda>"] == shown
        assert not is_chained(error)
        assert modules_printed(error) == {module}


@pytest.mark.parametrize(("outer", "inner"), list(zip(VERBS, [*list(VERBS)[3:], *list(VERBS)[:3]], strict=True)))
def test_nested_verbs_have_a_frame_each(outer: str, inner: str) -> None:
    expected = [VERBS[outer][0], "body", VERBS[inner][0]]

    def body_of(innermost: Callable[..., Any]) -> Callable[..., Any]:
        def body(*args: Any, **keywords: Any) -> Any:
            return VERBS[inner][1](innermost, jnp.ones(()))

        return body

    assert [f for f in frames(caught(outer, body_of(raises))) if f != "<lambda>"] == [*expected, "raises"]
    error = caught(outer, body_of(returns_none))
    assert [f for f in frames(error) if f != "<lambda>"] == expected
    assert str(error).startswith("`returns_none` (")


@pytest.mark.parametrize(("verb", "mode"), [("scan", "eager"), ("scan_key", "jit"), ("mask_scan", "grad")])
@pytest.mark.parametrize(("body", "explicit"), [(raises_from, True), (raises_during, False)])
def test_error_of_the_user_keeps_its_chain(verb: str, mode: str, body: Callable[..., Any], explicit: bool) -> None:
    error = caught(verb, body, mode)
    assert isinstance(error.__context__, ValueError)
    assert error.__cause__ is (error.__context__ if explicit else None)
    assert error.__suppress_context__ is explicit


@pytest.mark.parametrize("verb", VERBS)
def test_the_exception_is_the_object_that_was_raised(verb: str) -> None:
    mine = MyError("mine")

    def body(*args: Any, **keywords: Any) -> Any:
        raise mine

    assert caught(verb, body) is mine


@pytest.mark.parametrize(
    "call",
    [
        lambda: treescan.scan(returns_none, 0.0, XS, length=True),
        lambda: treescan.fold(returns_none, 0.0, XS, reversed=True),
        lambda: treescan.accumulate(returns_none, 0.0, XS, in_axes=1),
        lambda: treescan.fori(0, 3.0, returns_none, 0.0),
        lambda: treescan.mask_scan(returns_none, 0.0, XS),
    ],
)
def test_refused_arguments_end_in_the_verb_too(call: Callable[[], Any]) -> None:
    with pytest.raises(treescan.ArgumentError) as info:
        call()
    assert len(library_frames(info.value)) == 1
    assert not is_chained(info.value)


def test_a_failed_call_leaves_the_next_one_alone() -> None:
    fails = True

    def body(carry: Any, x: Any) -> Any:
        if fails:
            raise MyError("mine")
        return carry + x, None

    with pytest.raises(MyError):
        treescan.scan(body, 0.0, XS)
    fails = False
    assert treescan.scan(body, 0.0, XS)[0] == 3.0
