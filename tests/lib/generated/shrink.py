"""A failing program made smaller: fewer instructions, options, leaves and steps, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .compare import Failure, check
from .programs import Instruction, Program
from .smaller import smallest


def shrink(program: Program, failure: Failure, seconds: float) -> tuple[Program, Failure]:
    """The smallest that is found in so many seconds."""
    return smallest(program, failure, seconds, candidates, _fails)


def _fails(program: Program, failure: Failure) -> Failure | None:
    try:
        check(program)
    except Failure as found:
        return found if found.kind.split(":")[0] == failure.kind.split(":")[0] else None
    except Exception:  # a refusal, or the generator's own
        return None
    return None


def _live(program: Program) -> Program:
    """Without instructions that nothing reads."""
    wanted = {*program.nxt, *(leaf.name for leaf in program.ys)}
    kept: list[Instruction] = []
    for instruction in reversed(program.body):
        if instruction.value.name in wanted:
            kept.append(instruction)
            wanted |= set(instruction.reads)
    return program.replace(body=tuple(reversed(kept)))


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the boldest first."""
    live = _live(program)
    if len(live.body) < len(program.body):
        yield live
    for name, _ in program.options:
        yield program.replace(options=tuple(item for item in program.options if item[0] != name))
    simple = {"save": ("all",) * len(program.save), "fill": (0,) * len(program.fill), "outer": 0, "context": "jit"}
    simple |= {"padding": "zero", "dtype": "float64"}
    if program.flags != "none" and program.verb != "while_scan":
        simple["flags"] = "lengths"
    for name, value in simple.items():
        if getattr(program, name) != value:
            yield program.replace(**{name: value})
    for mode in (("value",), ("vjp",), ("jvp",)):
        if mode != program.mode and len(mode) <= len(program.mode) and program.mode != ("value",):
            yield program.replace(mode=mode)
    yield from _fewer_leaves(program)
    for instruction in reversed(program.body):
        yield from _without(program, instruction)
    if program.batch:
        for batch in ((), (1,), (2,)):
            if len(batch) < len(program.batch) or batch < program.batch:
                yield program.replace(batch=batch)
    for steps in (1, 2, 3, 4, program.steps - 1):
        if 0 < steps < program.steps:
            yield program.replace(steps=steps)
    for part in ("carry", "xs", "ys"):
        leaves = getattr(program, part)
        for i, leaf in enumerate(leaves):
            for change in ({"whole": False}, {"time": 0}, {"axis": 0}, {"custom": ""}):
                if (leaf.axis is None and "axis" in change) or all(getattr(leaf, k) == v for k, v in change.items()):
                    continue
                yield program.replace(**{part: (*leaves[:i], replace(leaf, **change), *leaves[i + 1 :])})


def _fewer_leaves(program: Program) -> Iterator[Program]:
    for i in range(len(program.ys)):
        rest = {
            name: value[:i] + value[i + 1 :] for name in ("ys", "save", "fill") if (value := getattr(program, name))
        }
        yield program.replace(**rest)
    read = {name.split("[")[0] for instruction in program.body for name in instruction.reads}
    read |= {leaf.name for leaf in program.ys}
    for i, leaf in enumerate(program.carry):
        if leaf.name not in (read | set(program.nxt[:i] + program.nxt[i + 1 :])) and len(program.carry) > 1:
            yield program.replace(
                carry=program.carry[:i] + program.carry[i + 1 :], nxt=program.nxt[:i] + program.nxt[i + 1 :]
            )
    used = read | set(program.nxt)
    for part in ("xs", "weights"):
        leaves = getattr(program, part)
        for i, leaf in enumerate(leaves):
            if leaf.name not in used and len(leaves) > 1:
                yield program.replace(**{part: leaves[:i] + leaves[i + 1 :]})


def _without(program: Program, instruction: Instruction) -> Iterator[Program]:
    """An earlier value of the same type in place of one."""
    own = instruction.value
    names = [leaf.value for leaf in (*program.carry, *program.xs, *program.weights) if not leaf.custom]
    for other in program.body:
        if other is instruction:
            break
        names.append(other.value)
    for value in names:
        a, b = value.type, own.type
        if (a.rows, a.shape, a.kind) == (b.rows, b.shape, b.kind):
            body = tuple(
                replace(i, reads=tuple(value.name if name == own.name else name for name in i.reads))
                for i in program.body if i is not instruction
            )  # fmt: skip
            nxt = tuple(value.name if name == own.name else name for name in program.nxt)
            ys = tuple(
                replace(y, value=replace(y.value, name=value.name)) if y.name == own.name else y for y in program.ys
            )
            smaller = program.replace(body=body, nxt=nxt, ys=ys)
            carry = tuple(
                replace(leaf, fixed=name == leaf.name and not leaf.custom)
                for leaf, name in zip(program.carry, nxt, strict=True)
            )
            yield smaller.replace(carry=carry)
