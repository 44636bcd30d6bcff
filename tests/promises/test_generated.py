"""Random typed programs: those that found something, a few more, and that the harness notices what it must.

`make fuzz CASES=n SEED=s` runs as many fresh ones as you like.
"""

import jax
import jax.numpy as jnp
import pytest
from generated import compare
from generated.compare import Failure, Refused, check
from generated.found import FOUND
from generated.options import draw_program
from generated.programs import Instruction, Leaf, Program, Seeded, Type, Value
from generated.shrink import shrink
from thin import parametrize

import treescan
from treescan._rows import find_rows

pytestmark = pytest.mark.filterwarnings("ignore")


@parametrize("program", FOUND)
def test_what_was_found_once(program):
    check(program)


EVERY_DAY = (1, 10, 22, 33, 53, 56, 57, 87, 91, 157, 172, 253, 300, 383, 434, 572, 643, 1204, 1329, 2044)
"""Of some hundred those that run most of the package between them: what else runs few statements, they run."""


def numbered(place, number):
    """One in four is traced where there are many devices, for which some operations have other forms."""
    marks = [*([] if number in EVERY_DAY else [pytest.mark.slow]), *([] if place % 4 else [pytest.mark.devices])]
    return pytest.param(number, marks=marks)


@pytest.mark.parametrize("number", [numbered(*each) for each in enumerate([*EVERY_DAY, *range(100, 124)])])
def test_a_few_programs(number):
    try:
        check(draw_program(Seeded(f"everyday {number}")))
    except Refused:
        pytest.skip("refused")


# The harness itself.

H, X, W = Value("h0", Type(True, (3,))), Value("x0", Type(True, (3,))), Value("w0", Type(False, (3, 3)))
SMALL = Program(
    batch=(2,),
    dtype="float64",
    steps=5,
    carry=(Leaf(H),),
    xs=(Leaf(X),),
    weights=(Leaf(W, None),),
    body=(
        Instruction(Value("v0", Type(True, (3,))), "{0} @ {1}", ("h0", "w0")),
        Instruction(Value("v1", Type(True, (3,))), "jnp.sin({0})", ("v0",)),
        Instruction(Value("v2", Type(True, (3,))), "jnp.tanh({0} + {1})", ("v0", "x0")),
    ),
    nxt=("v2",),
    ys=(Leaf(Value("v2", Type(True, (3,)))),),
    save=("all",),
    fill=(0,),
    options=(("chunk", "2"),),
)


def test_the_same_seed_draws_the_same_program():
    assert draw_program(Seeded("a 1")) == draw_program(Seeded("a 1")) != draw_program(Seeded("a 2"))


def test_a_program_is_its_own_repr():
    assert eval(repr(SMALL), vars(compare) | globals()) == SMALL


def _patched(monkeypatch, change):
    verb = treescan.mask_scan
    monkeypatch.setattr(treescan, "mask_scan", lambda f, init, xs, **options: change(verb, f, init, xs, options))


def _read(verb, f, init, xs, options):
    final, ys = verb(f, init, xs, **options)
    return (final[0] + 0 * jnp.sum(xs[0]),), ys


WRONG = {
    "carry": lambda verb, f, init, xs, o: jax.tree.map(lambda a: a * (1 + 1e-6), verb(f, init, xs, **o)),
    "gradient": lambda verb, f, init, xs, o: verb(lambda c, x: f(jax.lax.stop_gradient(c), x), init, xs, **o),
    "of the padding": _read,
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_noticed(monkeypatch, change):
    _patched(monkeypatch, change)
    with pytest.raises(Failure):
        check(SMALL)


CONTRACT = {
    "valid by multiplication": ("{0} + 0 * jnp.sum({0} * {1}.astype(dtype)[..., None], axis=(0,))", ("x0", "valid")),
    "an inner while": ("{0} + 0 * halved({1})", ("x0", "x0")),
    "custom_vjp": ("own_vjp({0})", ("x0",)),
    "an effect": ("observed({0})", ("x0",)),
}
"""Bodies whose padded rows see good values in the forward pass too, by what of them shows otherwise."""


@pytest.mark.parametrize("name", CONTRACT)
def test_what_the_contract_of_mask_scan_excludes(monkeypatch, name):
    text, reads = CONTRACT[name]
    body = (*SMALL.body[:2], Instruction(Value("v2", Type(True, (3,))), text, reads))
    last = Instruction(Value("v3", Type(True, (3,))), "jnp.tanh({0} + {1})", ("v0", "v2"))
    program = SMALL.replace(body=(*body, last), nxt=("v3",), valid="valid" in reads, padding="inf", mode=("value",))
    check(program)
    monkeypatch.setattr(find_rows, "_see_own_values", lambda *_: True)
    if name in ("custom_vjp", "an effect"):  # no step of these is run in place, whatever the contract says
        check(program)
    else:
        with pytest.raises(Failure, match="not finite"):
            check(program)


def test_a_foreign_exception_is_a_failure_and_a_refusal_is_not(monkeypatch):
    def broken(verb, f, init, xs, options):
        raise ValueError("Incompatible shapes")

    with pytest.raises(Refused):
        check(SMALL.replace(options=(("chunk", "-1"),)))
    _patched(monkeypatch, broken)
    with pytest.raises(Failure, match="ValueError"):
        check(SMALL)


@pytest.mark.slow
def test_what_fails_is_made_smaller(monkeypatch):
    _patched(monkeypatch, WRONG["gradient"])
    with pytest.raises(Failure) as caught:
        check(SMALL)
    smaller, failure = shrink(SMALL, caught.value, seconds=60)
    assert len(smaller.body) < len(SMALL.body) and not smaller.ys and failure.kind == "wrong gradient"
