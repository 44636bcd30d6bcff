"""What a user sees of an error's way: their own frames, and one frame of the library a verb call, that of the verb."""

import inspect
import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import treescan

pytestmark = pytest.mark.quick

PACKAGE = Path(treescan.__file__).parent
XS, ROWS, LENGTHS = jnp.arange(3.0), jnp.ones((3, 2)), jnp.array([3, 1])

MODES = {
    "eager": lambda run: run(jnp.ones(())),
    "jit": lambda run: jax.jit(run)(jnp.ones(())),
    "jit_of_grad_of_vmap": lambda run: jax.jit(jax.grad(lambda ones: jax.vmap(run)(ones).sum()))(jnp.ones(2)),
    "disable_jit": lambda run: without_jit(run),
}
VERBS = {
    "scan": ("scan", lambda body, one: treescan.scan(body, one, XS)),
    "scan_key": ("scan", lambda body, one: treescan.scan(body, one, None, 0, key=jax.random.key(0))),
    "scan_axes": ("scan", lambda body, one: treescan.scan(body, one, ROWS, in_axes=1, out_axes=-1)),
    "fold": ("fold", lambda body, one: treescan.fold(body, one, XS)),
    "accumulate": ("accumulate", lambda body, one: treescan.accumulate(body, one, XS)),
    "fori": ("fori", lambda body, one: treescan.fori(0, 3, body, one)),
    "scan_layers": ("scan_layers", lambda body, one: treescan.scan_layers(body, one, XS)),
    "pattern": ("fold_layers", lambda body, one: treescan.fold_layers([body, body], one, (XS, XS[:2]), remat="step")),
    "mask_scan": ("mask_scan", lambda body, one: treescan.mask_scan(body, one * jnp.ones(2), ROWS, lengths=LENGTHS)),
}


class MyError(Exception):
    """An exception of the user's own."""


def without_jit(run):
    with jax.disable_jit():
        return run(jnp.ones(()))


def returns_none(*args, **keywords):
    """A body that no verb accepts."""


def raises(*args, **keywords):
    raise MyError("mine")


def raises_from(*args, **keywords):
    try:
        raise ValueError("the cause")
    except ValueError as cause:
        raise MyError("mine") from cause


def raises_during(*args, **keywords):
    try:
        raise ValueError("the context")
    except ValueError:
        raise MyError("mine")  # noqa: B904, the implicit chain is what is tested


def caught(verb, body, mode="eager"):
    def call(one):
        return VERBS[verb][1](body, one)

    with pytest.raises((treescan.TreescanError, MyError)) as info:
        MODES[mode](call)
    return info.value


def frames(error):
    """The functions from the one that called a verb inwards, those of JAX in between included."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [name for name in names[names.index("call") + 1 :] if name != "<lambda>"]


def library_frames(error):
    walked = traceback.walk_tb(error.__traceback__)
    return [f.f_code.co_name for f, _ in walked if Path(f.f_code.co_filename).is_relative_to(PACKAGE)]


def is_chained(error):
    return error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verb", VERBS)
def test_an_error_has_one_frame_of_the_library(verb, mode):
    """The library's own ends in the verb, the user's passes through it, and no private module is printed."""
    name, _ = VERBS[verb]
    module = Path(inspect.getsourcefile(getattr(treescan, name)) or "").stem
    for body, kinds, inside in (
        (returns_none, (treescan.errors.BodyError, treescan.errors.CarryError), []),
        (raises, (MyError,), ["raises"]),
    ):
        error = caught(verb, body, mode)
        assert isinstance(error, kinds)
        assert library_frames(error) == [name]
        assert frames(error) == [name, *inside]
        assert not is_chained(error)
        printed = "".join(traceback.format_exception(error))
        files = map(Path, re.findall(r'File "([^"]*)"', printed))
        assert {file.stem for file in files if file.is_relative_to(PACKAGE)} == {module}
        assert "another exception" not in printed


@pytest.mark.parametrize(("outer", "inner"), [*zip(VERBS, [*VERBS][1:] + [*VERBS][:1], strict=True), ("scan", "scan")])
def test_nested_verbs_have_a_frame_each(outer, inner):
    expected = [VERBS[outer][0], "body", VERBS[inner][0]]

    def body_of(innermost):
        def body(*args, **keywords):
            return VERBS[inner][1](innermost, jnp.ones(()))

        return body

    assert frames(caught(outer, body_of(raises))) == [*expected, "raises"]
    error = caught(outer, body_of(returns_none))
    assert frames(error) == expected
    assert str(error).startswith("`returns_none` (")


@pytest.mark.parametrize(("verb", "mode"), [*(("scan", mode) for mode in MODES), ("mask_scan", "jit")])
@pytest.mark.parametrize(("body", "explicit"), [(raises_from, True), (raises_during, False)])
def test_error_of_the_user_keeps_its_chain(verb, mode, body, explicit):
    error = caught(verb, body, mode)
    assert isinstance(error.__context__, ValueError)
    assert error.__cause__ is (error.__context__ if explicit else None)
    assert error.__suppress_context__ is explicit


def test_the_exception_is_the_object_that_was_raised():
    mine = MyError("mine")

    def body(*args, **keywords):
        raise mine

    assert all(caught(verb, body) is mine for verb in VERBS)


def test_refused_arguments_end_in_the_verb_too():
    for call in (
        lambda: treescan.scan(returns_none, 0.0, XS, length=True),
        lambda: treescan.fold(returns_none, 0.0, XS, reversed=True),
        lambda: treescan.fori(0, 3.0, returns_none, 0.0),
        lambda: treescan.mask_scan(returns_none, 0.0, XS),
    ):
        with pytest.raises(treescan.errors.ArgumentError) as info:
            call()
        assert len(library_frames(info.value)) == 1
        assert not is_chained(info.value)


def test_a_failed_call_leaves_the_next_one_alone():
    fails = True

    def body(carry, x):
        if fails:
            raise MyError("mine")
        return carry + x, None

    with pytest.raises(MyError):
        treescan.scan(body, 0.0, XS)
    fails = False
    assert treescan.scan(body, 0.0, XS)[0] == 3.0
