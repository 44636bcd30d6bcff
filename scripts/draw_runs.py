"""Pictures of what runs where: a block of layers and what it is given, rows on devices, and the parts of a stream."""

from __future__ import annotations

from picture import WIDTH, Picture

# What a block of layers is given.


def block() -> Picture:
    """One layer of `scan_layers` with xs, state and args: what goes into the block, and what comes out."""
    picture = Picture(
        "block",
        268,
        "What a block is given, and what it returns",
        "The block of layer i is given its slices of the stacks, layers[i], xs[i] and state[i], the x of layer i - 1, "
        "and args, the same in all layers. It returns the x of the next layer, the new state[i], and an output y, "
        "which is ys[i].",
    )
    left, right, top, tall = 84, WIDTH - 80, 96, 74
    slices = (("layers[i]", 124), ("xs[i]", 202), ("state[i]", 280))
    picture.text(WIDTH / 2, 18, "slices for layer i", "bold", "middle")
    for name, x in slices:
        picture.box(x - 36, 30, 72, 30, "strong box")
        picture.text(x, 50, name, "small code", "middle")
        picture.arrow((x, 60), (x, top))
    picture.box(left, top, right - left, tall, "box")
    picture.text(WIDTH / 2, top + 32, "block(layer, x, x_i,", "small code", "middle")
    picture.text(WIDTH / 2, top + 50, "state_i, *args)", "small code", "middle")
    middle = top + tall / 2
    picture.text(left - 40, middle - 10, "x", "code", "middle")
    picture.arrow((left - 72, middle), (left, middle))
    picture.text(right + 40, middle - 10, "x", "code", "middle")
    picture.arrow((right, middle), (right + 72, middle))
    picture.text(4, top + tall + 36, "args: the same", "small")
    picture.text(4, top + tall + 54, "in all layers", "small")
    picture.arrow((100, top + tall + 32), (124, top + tall + 32), (124, top + tall))
    for name, x in (("ys[i]", 202), ("state[i]", 280)):
        picture.arrow((x, top + tall), (x, top + tall + 36))
        picture.box(x - 36, top + tall + 36, 72, 30, "strong box")
        picture.text(x, top + tall + 56, name, "small code", "middle")
    picture.text(241, top + tall + 86, "stacked again over the layers", "small", "middle")
    return picture


# Rows on devices.

DEVICES, ROWS, STEPS = 4, 2, 8


def devices() -> Picture:
    """A batch whose rows are split over devices: each runs all steps of its rows."""
    left, cell, tall, gap, top = 92, 32, 17, 10, 40
    height = DEVICES * (ROWS * tall + gap)
    picture = Picture(
        "devices",
        top + height + 34,
        "Rows that are split over devices",
        f"A batch of {DEVICES * ROWS} rows and {STEPS} steps, split over {DEVICES} devices: {ROWS} rows each. Each "
        "device runs all steps of its own rows, one after the other. All devices run the same program at the same "
        "time.",
    )
    picture.text(left, 16, "xs [T, rows, ...], split along rows", "bold")
    for device in range(DEVICES):
        y = top + device * (ROWS * tall + gap)
        picture.text(0, y + ROWS * tall / 2 + 5, f"device {device}", "small")
        for step in range(STEPS):
            for row in range(ROWS):
                kind = "strong box" if device % 2 else "soft box"
                picture.box(left + step * cell + 1, y + row * tall + 1, cell - 2, tall - 2, kind, round_=2)
        right = left + STEPS * cell
        picture.arrow((right + 6, y + ROWS * tall / 2), (WIDTH - 6, y + ROWS * tall / 2))
    for step in range(STEPS):
        picture.text(left + (step + 0.5) * cell, top - 6, str(step), "small", "middle")
    picture.text(left, top + height + 14, "steps: one after the other on each device", "small")
    return picture


# The parts of a stream.

PARTS, EVERY = 4, 2


def parts() -> Picture:
    """The parts of a stream over time: reading, running, handing over, and checkpoints."""
    left, wide, tall, top, apart = 84, 62, 28, 34, 46
    picture = Picture(
        "parts",
        234,
        "The parts of a stream over time",
        f"While the device runs a part, a thread reads the next one, and on_part receives the outputs of the one "
        f"before. After {EVERY} parts, once on_part has returned, a checkpoint is written. A run that is killed "
        "continues from there.",
    )
    lanes = (("read", 0, "box"), ("run", 1, "strong box"), ("on_part", 2, "soft box"))
    for number, (name, later, kind) in enumerate(lanes):
        y = top + number * apart
        picture.text(0, y + 19, name, "small code" if name == "on_part" else "small")
        for part in range(PARTS if later < 2 else PARTS - 1):
            x = left + (part + later) * wide
            if x + wide <= WIDTH:
                picture.box(x + 2, y, wide - 4, tall, kind)
                picture.text(x + wide / 2, y + 19, f"part {part}", "small", "middle")
    y = top + len(lanes) * apart
    picture.text(0, y + 19, "checkpoint", "small")
    saved = left + (EVERY + 2) * wide
    picture.arrow((saved - 14, y - apart + tall), (saved - 14, y + 14), (saved + 2, y + 14))
    picture.box(saved + 2, y, wide - 4, tall, "strong box")
    picture.text(saved + wide / 2, y + 19, f"{EVERY} parts", "small", "middle")
    picture.arrow((left, y + 46), (WIDTH - 6, y + 46))
    picture.text(0, y + 50, "time", "small")
    return picture
