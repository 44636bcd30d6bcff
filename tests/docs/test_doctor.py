"""`python -m treescan doctor`: fits of made-up measurements, its texts, and the programs that show faults."""

import json

import jax
import jax.numpy as jnp
import pytest

import treescan
from treescan.__main__ import main
from treescan._doctor import examine as examining
from treescan._doctor.copies import copies_in_loops
from treescan._doctor.faults import FAULTS
from treescan._doctor.growth import GROWTHS, Found, measure
from treescan._doctor.lines import Line, fit
from treescan._doctor.report import Report, duration

CLEAR, NOISY = Line(1.0, 2e-6, 1.9e-6, 2.1e-6), Line(1.0, 2e-6, 1e-6, 3.5e-6)
NOTHING = Line(0.0, 0.0, 0.0, 0.0)
MACHINE = {"jax": "jax 1.2.3", "device": "1 x cpu", "system": "Linux x86_64"}


def test_a_line_is_found_again():
    places = (1.0, 4.0, 16.0)
    line = fit(places, [[3 + 2 * x + shift for x in places] for shift in (0.0, 0.5, -0.5, 8.0)])
    assert line == Line(pytest.approx(3.25), *[pytest.approx(2.0)] * 3)
    assert not line.is_noisy


def test_quartiles_are_those_of_the_slopes_of_rounds():
    line = fit((0.0, 1.0), [[0.0, float(slope)] for slope in range(1, 9)])
    assert (line.slope, line.low, line.high) == (4.5, 3.0, 6.0)
    assert line.is_noisy


def test_one_slow_round_changes_little():
    rounds = [[float(x) for x in (1, 2, 3)] for _ in range(7)] + [[1.0, 2.0, 900.0]]
    line = fit((1.0, 2.0, 3.0), rounds)
    assert line.slope == pytest.approx(1.0)
    assert not line.is_noisy


def test_what_does_not_grow_is_too_noisy_to_tell():
    assert fit((1.0, 2.0), [[1.0, 1.1], [1.1, 1.0], [1.0, 1.0], [1.0, 1.05]]).is_noisy


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (4.5e-5, "45 us"), (3.94e-9, "3.94 ns"), (0.0, "0 ns")]
)
def test_times_have_three_digits(seconds, text):
    assert duration(seconds) == text


def report(line=CLEAR):
    copies = [(fault, number) for fault, number in zip(FAULTS, (0, 0, 1, 3), strict=True)]
    return Report(MACHINE, [Found("a step", line, NOTHING), Found("a branch, per step", CLEAR, NOTHING)], copies)


def test_the_text():
    assert str(report()).splitlines()[:6] == [
        "jax 1.2.3, 1 x cpu, Linux x86_64",
        "",
        "The cost of one more:",
        "                       time   half of the rounds   memory",
        "  a step               2 us   1.9 us to 2.1 us     0 B",
        "  a branch, per step   2 us   1.9 us to 2.1 us     0 B",
    ]
    text = " ".join(str(report()).split())
    assert "Faults of this XLA: 2 of 4 known ones." in text
    assert "a branch that returns its carry unchanged copies it (3 in the loop that shows it)" in text
    assert "Not found: small bfloat16 outputs copy their whole stack; small float32 outputs" in text
    assert "noisy" not in text


def test_it_says_so_where_the_machine_is_too_noisy():
    assert "  a step               too noisy   1 us to 3.5 us" in str(report(NOISY))
    assert "too noisy to measure the time of 1 of 2" in str(report(NOISY))


def test_lines_are_at_most_78_columns(monkeypatch):
    monkeypatch.setattr(treescan._layout, "WIDTH", 78)
    assert max(map(len, str(report(NOISY)).splitlines())) <= 78


def test_as_data():
    data = json.loads(report(NOISY).as_json())
    assert data["machine"] == MACHINE
    assert data["growth"][0]["seconds"] == {"each": 2e-6, "low": 1e-6, "high": 3.5e-6, "noisy": True}
    assert [fault["copies"] for fault in data["faults"]] == [0, 0, 1, 3]


# What is read off programs.

HLO = """\
HloModule one

%inner (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %copy.1 = f32[8,4]{1,0} copy(%p)
}

%outside (p: f32[8,4]) -> f32[8,4] {
  ROOT %copy.2 = f32[8,4]{1,0} copy(%p)
}

%body (t: (f32[8,4])) -> (f32[8,4]) {
  %copy.3 = f32[4]{0} copy(%x)
  %f = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%inner
}

%condition (t: (f32[8,4])) -> pred[] {
  ROOT %c = pred[] constant(false)
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %copy.4 = f32[8,4]{1,0} copy(%a)
  %g = f32[8,4]{1,0} fusion(%copy.4), kind=kLoop, calls=%outside
  %w = (f32[8,4]{1,0}) while(%t), condition=%condition, body=%body
}
"""


def test_copies_are_counted_where_a_loop_calls_them():
    assert copies_in_loops(HLO, (8, 4)) == 1
    assert copies_in_loops(HLO.replace("f32[8,4]{1,0} copy", "f32[8,4]{1,0} add"), (8, 4)) == 0
    assert copies_in_loops(HLO, (8, 4), "bfloat16") == 0


def test_a_loop_that_copies_its_carry_is_found_and_one_that_does_not_is_not():
    def copies(step):
        def program(carry):
            return treescan.scan(lambda carry, i: (step(carry, i), None), carry, jnp.arange(32))[0]

        two = jnp.zeros((32, 16)), jnp.ones((32, 16))
        text = jax.jit(program).lower(two).compile().as_text()
        return copies_in_loops(text, (32, 16))

    assert copies(lambda carry, i: (carry[0].at[i].set(1.0), carry[1])) == 0
    assert copies(lambda carry, i: (carry[1], carry[0])) > 0  # the two swap their places


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_programs_of_faults_are_programs(fault):
    assert isinstance(fault.copies(), int)
    out = jax.eval_shape(fault.program, jax.ShapeDtypeStruct((256, 64), fault.dtype))
    assert (out.shape, out.dtype) == ((256, 64), fault.dtype)


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda growth: growth.name)
def test_loops_differ_in_one_thing(growth):
    programs = [str(jax.make_jaxpr(growth.program(number))(jnp.ones(64))) for number in growth.numbers]
    assert len(set(programs)) == len(programs)


def test_memory_is_known_without_a_clock():
    (saved,) = measure(0.0, [growth for growth in GROWTHS if growth.name == "a step, differentiated"], least=1)
    assert saved.bytes.slope == 64 * 4  # cosines of 64 numbers


def test_the_command_has_status_0_and_both_forms(monkeypatch, capsys):
    monkeypatch.setattr("treescan.__main__.examine", lambda: report())
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{report()}\n"
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"][0]["copies"] == 0
    assert examining.SECONDS <= 30
