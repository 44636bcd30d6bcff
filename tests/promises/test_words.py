"""Loops under words of two to five transformations of JAX: those that found something, and a few more.

`make fuzz CASES=n SEED=s` runs as many fresh ones as you like.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from generated.programs import Seeded
from generated.words.found import FOUND, IN_OUR_WORDS, KINDS
from generated.words.programs import Program, Refused, Skipped, Wrong, check, draw_program, shrink, why_not
from generated.words.transformations import LETTERS
from generated.words.verbs import OPTIONS
from thin import parametrize

import treescan

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.quick]


@parametrize("program", FOUND)
def test_what_was_found_once(program):
    check(program)


@parametrize("program", IN_OUR_WORDS)
def test_what_may_be_refused_fails_in_our_words(program):
    with contextlib.suppress(Refused):
        check(program)


EVERY_DAY = [
    Program("matmul", ("cond of each row", "y is x"), "mask_scan", (), ("jit", "grad w", "vmap x")),
    Program("gated", ("tokens",), "mask_scan", ("chunk=8",), ("AOT", "jvp", "vmap w", "checkpoint"), nan=True),
    Program("decaying", ("valid",), "mask_scan", ("compact",), ("jit", "vjp of some", "custom_jvp"), nan=True),
    Program("decaying", ("key",), "while_scan", ("remat=step",), ("export", "grad h", "in cond")),
    Program("decaying", (), "rows_while_scan", ("fill=7",), ("jit", "in while_loop", "in map", "jvp w")),
    Program(
        "of x", (), "linear_scan", ("lengths",), ("jit", "in scan", "grad x", "vmap w-h-x", "custom_vjp"), nan=True
    ),
    Program("number", (), "linear_scan", ("resets",), ("checkify", "jit")),
    Program("decaying", (), "scan", ("save=last",), ("jit", "linearize", "in treescan.while_scan", "vmap h")),
    Program("decaying", (), "scan", ("remat=step",), ("disable_jit", "jit")),
    Program("matmul", (), "fold", ("lengths",), ("debug_nans", "grad"), nan=True),
    Program("decaying", ("psum of the mesh",), "fori", (), ("jit", "shard_map", "jvp x")),
    Program("decaying", ("y of integers",), "scan_layers", ("remat=step",), ("jit", "hessian", "in treescan.scan")),
    Program("largest", (), "fold_layers", ("reverse",), ("jit", "jvp h", "in treescan.scan, remat")),
]
"""Quick ones that have each verb and each transformation between them and those above."""


@pytest.mark.parametrize("program", EVERY_DAY, ids=lambda program: f"{program.verb}, {' of '.join(program.word)}")
def test_each_verb_and_each_transformation(program):
    check(program)


def test_those_are_all_verbs_and_all_transformations():
    programs = [*EVERY_DAY, *FOUND.values()]
    assert {program.verb for program in programs} == {*OPTIONS}
    assert {letter for program in programs for letter in program.word} == {*LETTERS}
    assert not any(map(why_not, programs))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_a_few_programs(number):
    try:
        check(draw_program(Seeded(f"words everyday {number}")))
    except (Refused, Skipped) as why:
        pytest.skip(str(why))


@parametrize("programs", KINDS)
def test_the_faults_of_these_kinds_are_among_what_is_drawn(programs):
    assert not any(map(why_not, programs))


# The harness itself.

SMALL = Program("matmul", ("y is x",), "mask_scan", ("chunk=8",), ("jit", "grad"))


def test_the_same_seed_draws_the_same_program():
    assert draw_program(Seeded("a 1")) == draw_program(Seeded("a 1")) != draw_program(Seeded("a 2"))


def test_a_program_is_its_own_repr():
    assert eval(repr(SMALL)) == SMALL


def _patched(monkeypatch, change):
    verb = treescan.mask_scan
    monkeypatch.setattr(treescan, "mask_scan", lambda f, init, xs, **options: change(verb, f, init, xs, options))


def _raises(verb, f, init, xs, options):
    raise ValueError("Incompatible shapes")


WRONG = {
    "values": lambda verb, f, init, xs, o: jax.tree.map(lambda a: a + jnp.ones((), a.dtype), verb(f, init, xs, **o)),
    "gradients": lambda verb, f, init, xs, o: verb(lambda c, x: f(jax.lax.stop_gradient(c), x), init, xs, **o),
    "errors": _raises,
}


@parametrize("change", WRONG)
def test_what_is_wrong_is_noticed(change, monkeypatch):
    _patched(monkeypatch, change)
    with pytest.raises(Wrong):
        check(SMALL)


def test_a_refusal_is_no_failure(monkeypatch):
    _patched(monkeypatch, lambda verb, f, init, xs, o: verb(f, init, xs, **o, no_option=1))
    with pytest.raises(Refused):
        check(SMALL)


@pytest.mark.slow
def test_what_fails_is_made_smaller(monkeypatch):
    _patched(monkeypatch, WRONG["gradients"])
    with pytest.raises(Wrong) as caught:
        check(SMALL)
    smaller, wrong = shrink(SMALL, caught.value)
    assert smaller.word == ("grad",) and not smaller.parts and not smaller.options and wrong.kind == "wrong numbers"
