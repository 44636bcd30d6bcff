"""Exceptions, warnings, and the one renderer that every message goes through.

The code that finds a cause raises it as a `Fault`, without context. The public verb catches it, adds its own name, the
body and the place of the body, and raises the public exception: see `explain`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import types
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.errors

from ._avals import PyTree, describe_leaf, describe_traced, exact_int, is_weak
from ._text import advice, indented, table, wrap
from ._tree import leaves_with_path

_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
STEP_WORDS = {
    "step": "step",
    "init": "init",
    "unit": "step",
    "length": "length",
    "the_carry": "the carry",
    "a_carry": "a carry",
    "xs": "xs",
    "leaves_of_xs": "leaves of xs",
    "arrays_as_xs": "arrays as xs",
    "all_whole": "every leaf of xs has {in_axes} None",
    "axis_none": "With None, every step receives the whole leaf",
    "mask": "the lengths or masks",
    "rows_of_init": "its rows are not those of the lengths or masks. `init` needs one entry for each row of the batch "
    "(`packed.rows` of them for a `Packed`), and the lengths or the mask must be for the same rows.",
    "rows_of_x": "pass the lengths or the mask of exactly these rows.",
    "batch_first": "pass `time_axis=1`",
    "all_rows": "",
    "of_axes": "",
    "in_axes": "in_axes",
    "out_axes": "out_axes",
}
MASK_WORDS = {**STEP_WORDS, "in_axes": 'time_axis["xs"]', "out_axes": 'time_axis["ys"]'}
RAGGED_WORDS = {
    **STEP_WORDS,
    "of_axes": ", an option of `treescan.mask_scan`,",
    "batch_first": "pass `in_axes=1`",
}
STREAM_WORDS = {
    **RAGGED_WORDS,
    "rows_of_x": "pass the lengths of exactly these rows. Or perhaps the batch leads, [B,T,...]: {batch_first}.",
    "batch_first": "swap these axes of the source, `source.swapaxes(0, 1)`",
}
HELPER_WORDS = {**STEP_WORDS, "batch_first": "swap these axes of each leaf, `leaf.swapaxes(0, 1)`"}
WHILE_WORDS = {
    **STEP_WORDS,
    "length": "max_length",
    "mask": "the condition",
    "rows_of_init": "the condition has other rows: let it return one bool for each row of `init`.",
    "rows_of_x": "the carry and the condition have other rows.",
    "batch_first": "pass `in_axes=1`",
    "all_rows": " To stop all rows together, reduce the condition to one bool, `jnp.any(...)` or `jnp.all(...)`. If "
    "it has a last axis of 1, drop that: `[..., 0]`.",
}
LAYER_WORDS = {**STEP_WORDS, "step": "block", "init": "x", "unit": "layer", "the_carry": "x", "a_carry": "an x"}
CHUNK_WORDS = {
    **STEP_WORDS,
    "step": "f",
    "unit": "chunk",
    "axis_none": "With None, every chunk receives the whole leaf",
}
GROUP_WORDS = {
    **STEP_WORDS,
    "xs": "what is scanned over",
    "leaves_of_xs": "variables and arguments",
    "arrays_as_xs": "arrays to scan over",
    "all_whole": "nothing is scanned over",
}
_F = TypeVar("_F", bound=Callable[..., object])
_T = TypeVar("_T")


class TreescanError(Exception):
    """Base class of every error that treescan raises on purpose."""


class ArgumentError(TreescanError, ValueError):
    """An argument of a verb is out of range, conflicts with another, or does not fit the data."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a verb has the wrong type."""


class TracedArgumentError(ArgumentTypeError, jax.errors.ConcretizationTypeError):
    """An argument of a verb is traced, but must be a concrete value, because the program is compiled for it."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # JAX's own constructor takes the tracer, and writes another message


class BodyError(TreescanError, TypeError):
    """The body is not callable, or does not return what the verb expects."""


class CarryError(TreescanError, TypeError):
    """The body returned a carry whose structure or types differ from the carry it was given."""


class LayerError(TreescanError, ValueError):
    """Layers do not fit together, or stacks do not fit the blocks."""


class SignatureError(TreescanError, TypeError):
    """A value does not match its jaxtyping annotation in the body."""


class NonFiniteError(TreescanError, FloatingPointError):
    """A leaf of the carry became NaN or infinite, in a loop with `check_finite`.

    Attributes:
        record: what is known of that step, a `treescan.types.NonFinite`. `treescan.last_nonfinite()` may be that of
            another thread.
    """

    record: Any = None


class CheckpointError(TreescanError, OSError):
    """A checkpoint of a stream could not be written or read, or belongs to another run."""


class PluginError(TreescanError, TypeError):
    """A custom carry breaks the contract of `treescan.carries.AbstractCarry`, or a type is registered twice."""


class PluginWarning(UserWarning):
    """A distribution declares custom carries for treescan that could not be loaded. Scans continue without them."""


PUBLIC = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, TreescanError | UserWarning) and kind.__module__ == __name__
)
for _cls in PUBLIC:  # a traceback then reads `treescan.errors.CarryError`, the name under which users find it
    _cls.__module__ = "treescan.errors"


class Row(NamedTuple):
    """One line of an error's table: a leaf, what was expected, what came, and how the two differ."""

    leaf: str
    expected: str
    came: str
    note: str = ""


class Cure(NamedTuple):
    """What the user may do about one leaf: the advice, its kind, and the leaf."""

    text: str
    kind: str = ""
    leaf: str = ""


_MOST = 16
"""The rows that a table shows: a message fits on a screen."""


class Fault(Exception):
    """A cause without its context. Never leaves the package: `explain` turns it into `error`.

    Args:
        error: the public exception to raise.
        says: the headline. `{body}`, `{verb}` and `{call}`, which is both, `{step}`, `{init}`, `{unit}`, `{the_carry}`,
            `{a_carry}` and the other words of `STEP_WORDS` are, here and in cures, what only the verb knows.
        header: the titles of the table's columns, where there is a table.
        rows: the table, one row a leaf.
        cures: what the user may do about it, a paragraph each.
        carry_root: the name of the body's carry, where the rows are leaves of it.
        cause: the exception that it is about, raised by code which is neither the body's nor the package's.
        record: what a `NonFiniteError` is about.

    Attributes:
        body: the function that it is about, where the verb was given several.
    """

    def __init__(
        self,
        error: type[TreescanError],
        says: str,
        *cures: str | Cure,
        header: Sequence[str] = ("leaf", "expected", "is"),
        rows: Sequence[Row] = (),
        carry_root: str | None = None,
        cause: Exception | None = None,
        record: object = None,
    ) -> None:
        super().__init__(says)
        self.error = error
        self.says = says
        self.cures = tuple(Cure(cure) if isinstance(cure, str) else cure for cure in cures)
        self.header = header
        self.rows = rows
        self.carry_root = carry_root
        self.cause = cause
        self.record = record
        self.body: object = None

    def render(self, words: Mapping[str, str], init: PyTree = None) -> str:
        """The whole message, with words for its placeholders. Python scalars in `init` have their own advice."""
        weak = dict(self._weak_cures(init))  # what it says of a leaf replaces the plain advice to cast
        texts = [text for text, kind, leaf in self.cures if not (kind == "dtype" and leaf in weak)]
        says, cures, rows = self.says, [*texts, *weak.values()], list(self.rows)
        # A verb "over" a body is the call, which names the body. Other braces stay, because they may be the user's.
        for name, word in {"verb} over {body": "{call}", **words}.items():
            says, *cures = (text.replace(f"{{{name}}}", word) for text in (says, *cures))
            rows = [row._replace(expected=row.expected.replace(f"{{{name}}}", word)) for row in rows]
        headline = wrap(says, taken=len(f"treescan.errors.{self.error.__name__}: "))  # which Python prints before it
        if len(rows) > _MOST + 1:
            rows[_MOST:] = [Row(f"and {len(rows) - _MOST} more", "", "")]
        parts = [headline, *([table(self.header, rows)] if rows else []), *map(indented, cures)]
        return "\n\n".join(parts) + ("\n" if len(parts) > 1 else "")

    def _weak_cures(self, init: PyTree) -> Iterator[tuple[str, str]]:
        if self.carry_root is None:
            return
        bad = {row.leaf: row for row in self.rows if row.note == "dtype"}
        for path, leaf in leaves_with_path(self.carry_root, init):
            if path in bad and is_weak(leaf):
                dtype = bad[path].came.split("[")[0].lstrip("~")
                yield (
                    path,
                    f"{path}: {{init}} is weakly typed there, {describe_leaf(leaf)}, as Python scalars are. A weak "
                    f"type adopts the type that the {{step}} returns, once. It changed again: given "
                    f"{bad[path].expected}, it returns {bad[path].came}. "
                    f"Start from an array, `jnp.asarray({leaf}, jnp.{dtype})`, and keep its dtype.",
                )


Misuse = functools.partial(Fault, ArgumentError)
TypeMisuse = functools.partial(Fault, ArgumentTypeError)
TracedMisuse = functools.partial(Fault, TracedArgumentError)
BodyFault = functools.partial(Fault, BodyError)
CarryFault = functools.partial(Fault, CarryError)
LayerFault = functools.partial(Fault, LayerError)
PluginFault = functools.partial(Fault, PluginError)
CheckpointFault = functools.partial(Fault, CheckpointError)


def expect(
    holds: object, name: str, kind: str, given: object, *cures: str, error: type[TreescanError] = ArgumentTypeError
) -> None:
    """Refuses an argument that is not of its kind, an `ArgumentTypeError` if nothing else is said.

    Args:
        holds: whether it is.
        name: the argument's.
        kind: what it must be, as in "a string or None".
        given: what it is.
        cures: what the user may do about it.
        error: the public exception.
    """
    if not holds:
        raise Fault(error, f"{{call}}: `{name}` must be {kind}, got {describe_traced(given)}.", *cures)


def expect_one_of(
    given: object, name: str, allowed: Sequence[object], *cures: str, error: type[TreescanError] = ArgumentTypeError
) -> None:
    """Refuses an argument that is none of those that are allowed; see `expect`."""
    *most, last = [f'"{each}"' if isinstance(each, str) else str(each) for each in allowed]
    known = isinstance(given, str | bool | None) and given in allowed
    expect(known, name, f"{', '.join(most)} or {last}", given, *cures, error=error)


def expect_int(
    given: object,
    name: str,
    cure: str,
    *,
    kind: str = "an int",
    least: int | None = None,
    small: str = "",
    error: type[TreescanError] = ArgumentTypeError,
) -> int:
    """An argument that must be an exact int.

    Args:
        given: the argument.
        name: its name.
        cure: what the user may do about another type.
        kind: what it must be, in words.
        least: the smallest that is allowed, if there is one.
        small: what the user may do about a smaller one.
        error: the public exception for another type.
    """
    number = exact_int(given)
    expect(number is not None, name, kind, given, cure, error=error)
    assert number is not None
    if least is not None:
        expect(number >= least, name, f"at least {least}", number, small, error=ArgumentError)
    return number


def explain(
    error: Exception, name: str, body: object = None, init: PyTree = None, words: Mapping[str, str] = STEP_WORDS
) -> Exception:
    """The exception that the user of the verb `name` sees. Without a body, there is no `{body}` to name.

    A `Fault` becomes its public error, with the body named and no trace of the package's inside. Any other exception
    is the user's own: it stays the same object, less the package's frames in its traceback. The verb raises the
    result outside of its `except` block, so that nothing is chained to it.
    """
    if isinstance(error, Fault):
        about = body if error.body is None else error.body
        named = describe_body(about)
        call = f"`{name}`" if about is None else f"`{name}` over {named}"
        known = {**words, "verb": f"`{name}`", "body": named, "call": call}
        explained = error.error(error.render(known, init))
        explained.add_note(more_about(error.error))
        if isinstance(explained, NonFiniteError):
            explained.record = error.record
        if error.cause is not None:
            explained.__cause__ = error.cause.with_traceback(_without_inner_frames(error.cause.__traceback__))
        return explained
    return error.with_traceback(_without_inner_frames(error.__traceback__))


def more_about(kind: type[Exception]) -> str:
    """The command that explains a kind of error or warning."""
    return f"More about it: python -m treescan explain {kind.__name__}"


@contextlib.contextmanager
def noted(whose: str) -> Generator[None]:
    """Adds to what a function of the user's raises, other than a body, which one that is."""
    try:
        yield
    except (Fault, TreescanError):
        raise
    except Exception as error:
        error.add_note(f"{whose} raised this.")
        raise


@contextlib.contextmanager
def speaking_of(body: object) -> Generator[None]:
    """Faults that are found within are about this one of the functions that a verb was given."""
    try:
        yield
    except Fault as fault:
        fault.body = body
        raise


_VERBS: set[types.CodeType] = set()


def verb(function: _F) -> _F:
    """Marks a public function whose frame stays in tracebacks: the one frame that a user sees of this package."""
    shown = named_options(function)
    code = getattr(shown, "__code__", None)
    assert isinstance(code, types.CodeType)
    _VERBS.add(code)
    return shown


def is_verb(function: object) -> bool:
    """Whether a callable is one of those that `verb` has marked."""
    return getattr(function, "__code__", None) in _VERBS


def named_options(function: _F) -> _F:
    """Explains what a public function raises. Arguments that it does not take are refused, with those that are meant.

    A function that takes `**options` refuses unknown ones itself. Of others, `ELSEWHERE` in the module of the function
    says which function takes them. The frame of the function is taken out of tracebacks, as the wrapper has one, of the
    same name.
    """
    known = list(inspect.signature(function).parameters.values())
    own = int(bool(known) and known[0].name in ("self", "cls"))
    known = known[own:]
    options = {f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name for p in known if p.kind is not p.POSITIONAL_ONLY}
    name = function.__qualname__.rsplit("<locals>.", 1)[-1].removesuffix(".__init__")
    checks = any(p.kind is p.VAR_KEYWORD for p in known)

    def call(*args: object, **kwargs: object) -> object:
        try:
            for option in () if checks else kwargs.keys() - options:
                elsewhere = function.__globals__.get("ELSEWHERE", {}).get(option)
                cure = elsewhere or advice(option, options, kwargs.get("time_axis", 0))
                raise TypeMisuse(f"{{verb}} has no option `{option}`.", cure)
            return function(*args, **kwargs)
        except Exception as error:
            trace = error.__traceback__
            is_unfit = isinstance(error, TypeError) and trace is not None and trace.tb_next is None  # Python refused it
            explained = explain(
                _unfit(known, name, len(args) - own, kwargs, error) if is_unfit else error, name, words=HELPER_WORDS
            )
        raise explained

    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return cast("_F", functools.wraps(function)(call))


def _unfit(
    known: Sequence[inspect.Parameter], name: str, given: int, kwargs: Mapping[str, object], error: Exception
) -> Fault:
    """What is raised in place of Python's words where arguments do not fit the parameters of a public function."""
    first = [p for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes = ", ".join(p.name for p in first if p.name[0] != "_")
    options = [p.name for p in known if p.kind is p.KEYWORD_ONLY]
    needed = [p.name for p in known if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if given > len(first):
        cure = f"Did you mean `{options[0]}=...`?" if options else f"Call it as `{name}({takes})`."
        by_name = ", and all options by name" if options or any(p.kind is p.VAR_KEYWORD for p in known) else ""
        return TypeMisuse(f"{{verb}} takes ({takes}) by position{by_name}.", _IN_ONE.get(name, cure))
    missing = [p.name for p in first[given:] if p.default is p.empty and p.name not in kwargs]
    missing += [option for option in needed if option not in kwargs]
    says = f"needs {', '.join(f'`{each}`' for each in missing)}" if missing else str(error).partition("() ")[2]
    call = [*(p.name for p in first if p.name[0] != "_"), *(f"*{p.name}" for p in known if p.kind is p.VAR_POSITIONAL)]
    call += [f"{option}=..." for option in needed]
    others = sorted(kwargs.keys() - {p.name for p in known})
    meant = [f"It has no option `{each}`. {cure}" for each in others if "Did" in (cure := advice(each, missing))]
    return TypeMisuse(f"{{verb}} {says}.", f"Call it as `{name}({', '.join(call)})`.", *meant)


def named_fields(kind: type[_T]) -> type[_T]:
    """Explains what the constructor of a dataclass of settings raises, as `named_options` does of a function."""
    init: Any = named_options(kind.__init__)
    setattr(kind, "__init__", init)  # noqa: B010, an assignment that type checkers refuse
    return kind


_IN_ONE = {name: f"Give one list: `{name}([first, second])`." for name in ("stack", "pad", "pack")}
_IN_ONE["chunk_map"] = "Several inputs are one tree: `chunk_map(lambda both: f(*both), (xs, ys), chunk_size)`."


def _without_inner_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Drops the package's frames, except those of inner verbs (called by a body that scans)."""
    kept: types.TracebackType | None = None
    for tb in reversed(list(walk_traceback(traceback))):
        if not is_package_frame(tb.tb_frame) or (tb is not traceback and tb.tb_frame.f_code in _VERBS):
            kept = types.TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return kept


def walk_traceback(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    """The entries of a traceback, outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def is_package_frame(frame: types.FrameType) -> bool:
    """Whether a frame runs treescan's own code."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def is_library_file(filename: str) -> bool:
    """Whether a file is treescan's own or JAX's."""
    return filename.startswith((_PACKAGE, _JAX))


def is_jax_frame(frame: types.FrameType) -> bool:
    """Whether a frame runs JAX's code."""
    return frame.f_code.co_filename.startswith(_JAX)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warns at the line of the user's that called the verb. A category of treescan's own is explained elsewhere."""
    more = "" if category is UserWarning else f"\n{more_about(category)}"
    warnings.warn(f"{wrap(message)}{more}", category, stacklevel=_level_of_user() - 1)


def _level_of_user() -> int:
    """How far up the innermost frame is that is neither the package's nor a library's, counted from 1."""
    level, frame = 1, inspect.currentframe()
    libraries = ("jax", "contextlib")
    while frame and (is_package_frame(frame) or frame.f_globals.get("__name__", "").split(".")[0] in libraries):
        level, frame = level + 1, frame.f_back
    return level


def is_from_jax(function: object) -> bool:
    """Whether a callable is JAX's: a jitted function, one with custom derivatives or under a checkpoint."""
    code = getattr(function, "__code__", None)
    module = type(function).__module__.split(".")[0]
    return module in ("jax", "jaxlib") if code is None else code.co_filename.startswith(_JAX)


def accepts(function: Callable[..., object], count: int) -> bool:
    """Whether a callable may be called with so many positional arguments and nothing else, as far as that is known."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # there is no signature
        return True
    return True


def describe_body(body: object) -> str:
    """Names a body and where it was written, as in `` `step` (model.py:42)``; of several each, once."""
    if isinstance(body, list | tuple):
        return ", ".join(dict.fromkeys(map(describe_body, body))) or "no body"
    inner = body
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner) if callable(inner) else inner
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", getattr(inner, "__name__", None))
    if code is None and callable(inner) and not isinstance(inner, type):
        code = getattr(inspect.unwrap(type(inner).__call__), "__code__", None)
    if name is None:
        name = type(inner).__qualname__ if callable(inner) else repr(inner)
    name = name.rsplit("<locals>.", 1)[-1]
    if code is None or code.co_filename.startswith(_JAX):  # a body from JAX itself has no place in the user's code
        return f"`{name}`"
    return f"`{name}` ({shorten(code.co_filename)}:{code.co_firstlineno})"


def shorten(filename: str) -> str:
    """A path relative to the working directory if it is below it, else unchanged."""
    here = os.getcwd() + os.sep
    return filename[len(here) :] if filename.startswith(here) else filename


def in_own_words(error: Exception) -> Exception:
    """The error, or a `Fault` in its place if JAX refuses to map a branch whose body has a side effect."""
    if not isinstance(error, NotImplementedError) or "not supported in vmap-of-cond" not in str(error):
        return error
    return Misuse(
        "{verb} over {body}: JAX does not map a branch with a side effect, for example a "
        "`jax.experimental.io_callback`. Under `jax.vmap`, this loop branches for each element.",
        "Pass the batch as rows, without `jax.vmap`. In `while_scan`, rows stop independently if the condition returns "
        "one bool for each row. `mask_scan`, `fold` and `accumulate` take `lengths` for a batch.",
        "Or use `jax.debug.callback` or `jax.pure_callback`, which JAX maps.",
        cause=error,
    )
