"""What `mask_scan` runs of a padded batch: a picture, and one that moves.

Which chunks and which rows are run is what the library's own schedule says.
"""

from __future__ import annotations

import jax.numpy as jnp
from picture import WIDTH, Picture

import treescan
from treescan._rows.compact import spread_tiers
from treescan._rows.leaves import make_schedule

LENGTHS = (6, 3, 11, 1, 4, 7, 2, 0)
STEPS, CHUNK = 16, 4
TIERS = spread_tiers(len(LENGTHS))
ROW = 18  # the height of one


def tiers_and_orders() -> list[tuple[int, list[int]]]:
    """Of each chunk: how many rows `compact` runs, and all rows in its order."""
    valid = treescan.length_mask(jnp.array(LENGTHS), STEPS)
    schedule = make_schedule(valid, CHUNK, TIERS)
    assert schedule.order is not None
    branches = [int(branch) for branch in schedule.branch]
    orders: list[list[int]] = schedule.order.tolist()
    return [((0, *TIERS)[branch], order) for branch, order in zip(branches, orders, strict=True)]


def _draw_legend(picture: Picture, legend: float, data: str) -> None:
    """What the three kinds of boxes are."""
    for x, kind, says in ((0, "data", data), (110, "padding", "padding that is run"), (290, "absent", "not run")):
        picture.box(x + 1, legend - 13, 18, 16, kind, round_=2)
        picture.text(x + 26, legend, says)


# What is run, a chunk after the other.

SECONDS, SORTS, COLUMN = 2.6, 0.9, 0.3  # of a chunk; until its rows are in order; of a step


def compact() -> Picture:
    """What is run, chunk by chunk: with `chunk` alone, and with `compact`, which brings the rows together before."""
    chunks = tiers_and_orders()
    rows = len(LENGTHS)
    tiers = [tier for tier, _ in chunks]
    every = list(range(rows))
    plain = [(rows if tier else 0, every) for tier in tiers]
    first = 54
    second = first + rows * ROW + 72
    legend = second + rows * ROW + 30
    picture = Picture(
        "compact",
        legend + 8,
        "Chunks, and what compact does to them",
        f"{rows} rows of lengths {', '.join(map(str, LENGTHS))} in chunks of {CHUNK} steps, which run one after the "
        f"other. With chunk alone, a chunk runs all {rows} rows, or none if no row has a valid step in it. With "
        "compact, the rows that have a valid step in the chunk move to the top before it runs, and it runs on the "
        f"smallest tier that holds them: {', '.join(str(tier) for tier in tiers if tier)} rows. The last chunk is not "
        "run.",
    )
    for top, code, panel in ((first, f"chunk={CHUNK}", plain), (second, f"chunk={CHUNK}, compact=True", chunks)):
        runs = CHUNK * sum(live for live, _ in panel)
        picture.text(0, top - 38, code, "code")
        picture.text(WIDTH, top - 38, f"{runs} of {STEPS * rows} rows' steps are run", "", "end")
        for number, (live, order) in enumerate(panel):
            _draw_moving_chunk(picture, top, number, live, order)
    _draw_legend(picture, legend, "data")
    return picture


def _draw_moving_chunk(picture: Picture, top: float, number: int, live: int, order: list[int]) -> None:
    """A chunk: its rows come in their order, a frame is put around those that are run, and these are run."""
    cell, left, gap = 18, 46, 18
    x, begins = left + number * (CHUNK * cell + gap), number * SECONDS
    in_place = order == sorted(order)
    for place, row in enumerate(order):
        with picture.moving("moves", begins, by=(row - place) * ROW):
            if not number or not in_place:
                picture.text(x - 4, top + place * ROW + 13.5, str(row), "small", "end")
            for step in range(CHUNK):
                is_data = number * CHUNK + step < LENGTHS[row]
                kind = "data" if is_data else "padding" if place < live else "absent"
                with picture.moving("appears", begins + SORTS + COLUMN * (step + 1)):
                    picture.box(x + step * cell + 1, top + place * ROW + 1, cell - 2, ROW - 2, kind, round_=2)
    with picture.moving("appears", begins + SORTS):
        says = f"{live} row{'s' * (live > 1)}" if live else "not run"
        picture.text(x + CHUNK * cell / 2, top - 10, says, "small", "middle")
        if live:
            picture.box(x - 1, top - 2, CHUNK * cell + 2, live * ROW + 4, "frame", round_=4)


# The same, to try with other lengths: docs/javascripts/skipped.js draws it again as this does.

FROM, CELL, TALL, OVER = 36, 22, 27, 58  # where the steps begin, how wide one is, and where the rows are


def rows_that_run(lengths: tuple[int, ...], steps: int, chunk: int, *, compact: bool) -> list[tuple[int, list[int]]]:
    """Of each chunk: its number of steps, and the rows that it runs on."""
    size, rows = min(chunk, steps), len(lengths)
    every = list(range(rows))
    schedule = make_schedule(treescan.length_mask(jnp.array(lengths), steps), size, TIERS if compact else (rows,))
    order = [every] * len(schedule.branch) if schedule.order is None else schedule.order.tolist()
    counts = (0, *TIERS) if compact else (0, rows)
    found = []
    for number, branch in enumerate(schedule.branch.tolist()):
        long = min(size, steps - number * size)
        count = counts[branch] if long == size or not branch else rows  # steps that are left over run on all rows
        found.append((long, sorted(order[number][:count])))
    return found


def skipped() -> Picture:
    """The steps that run, row by row; with JavaScript, for any lengths."""
    rows, data = len(LENGTHS), sum(LENGTHS)
    chunks = rows_that_run(LENGTHS, STEPS, CHUNK, compact=False)
    runs = sum(long * len(ran) for long, ran in chunks)
    under = OVER + rows * TALL
    bar, legend = under + 36, under + 78
    every = rows * STEPS
    picture = Picture(
        "skipped",
        legend + 8,
        "The share of steps that run",
        f"{rows} rows of lengths {', '.join(map(str, LENGTHS))} in {STEPS} steps, chunk={CHUNK}. "
        f"The chunks run on {', '.join(str(len(ran)) for _, ran in chunks)} rows. {runs} of {every} steps run, and "
        f"{data} of these are data.",
    )
    picture.text(0, 16, f"chunk={CHUNK}", "code")
    picture.text(WIDTH, 16, f"{round(100 * runs / every)} % run: {runs} of {every} steps", "", "end")
    picture.text(FROM - 6, OVER - 8, "row", "small", "end")
    for step in range(0, STEPS, 4):
        said = f"step {step}" if not step else str(step)
        picture.text(FROM + step * CELL + 2, OVER - 8, said, "small")
    for row in range(rows):
        y = OVER + row * TALL
        picture.text(FROM - 10, y + 18, str(row), "small", "end")
        begin = 0
        for long, ran in chunks:
            for step in range(begin, begin + long):
                kind = "data" if step < LENGTHS[row] else "padding" if row in ran else "absent"
                picture.box(FROM + step * CELL + 2, y + 3, CELL - 4, TALL - 6, kind, round_=2)
            begin += long
    picture.text(FROM - 6, under + 17, "rows", "small", "end")
    begin = 0
    for long, ran in chunks:
        x = FROM + begin * CELL
        picture.line((x, OVER - 2), (x, under + 20))
        picture.text(x + long * CELL / 2, under + 17, str(len(ran)), "small", "middle")
        begin += long
    picture.line((FROM + begin * CELL, OVER - 2), (FROM + begin * CELL, under + 20))
    x = 1.0
    for kind, count in (("data", data), ("padding", runs - data), ("absent", every - runs)):
        if count:
            wide = count * (WIDTH - 2) / every
            picture.box(x, bar, wide, 16, kind, round_=0)
            x += wide
    for x, kind, says in (
        (0, "data", f"data: {data}"),
        (104, "padding", f"padding that runs: {runs - data}"),
        (290, "absent", f"not run: {every - runs}"),
    ):
        picture.box(x + 1, legend - 13, 18, 16, kind, round_=2)
        picture.text(x + 26, legend, says, "small")
    return picture
