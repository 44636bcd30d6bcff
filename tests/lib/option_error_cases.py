"""Cases of `test_errors.py` about options of strangers."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from clip_option import Clip, ClipRows
from error_cases import case

from treescan import mask_scan, scan, scan_layers, while_scan
from treescan.options import Option, Slot

XS = jnp.arange(4.0)
SCALE: Slot[Any] = Slot("scale")
OF_ROWS: Slot[Any] = Slot("mylib.scale", rows=True)


def step(carry, x):
    return carry + x, x


def scanned(one, *options, **others):
    return scan(step, one, XS, options=list(options), **others)


@dataclass(frozen=True)
class Doing(Option):
    """Does what a test says."""

    what: Any

    def __call__(self, step, consts, state, feed):
        return self.what(step(consts, state, feed))


class DoingOutside(Doing):
    around = ClipRows.around


@dataclass(frozen=True)
class Feeding(Option):
    """Feeds what a test says."""

    slot: Any
    value: Any = (1.0, 2.0, 3.0, 4.0)

    def __call__(self, step, consts, state, feed):
        return step(consts, state, feed)

    def feeds(self, length):
        return {self.slot: jnp.array(self.value)} if self.slot else [self.value]


class Reading(Option):
    """Does what a test says with what it is fed."""

    SLOT: Any = Slot("mylib.noise", rows=False)

    def __call__(self, step, consts, state, feed):
        state, y = step(consts, state, feed)
        return state + self.SLOT.of(feed), y


class Keyed(Reading):
    def __call__(self, step, consts, state, feed):
        return step(consts, state + feed.key, feed)


class WithoutConsts(Option):
    def __call__(self, step, state, feed):
        return step(state, feed)


class CallsWithoutConsts(Option):
    def __call__(self, step, consts, state, feed):
        return step(state, feed)


class Elsewhere(Clip):
    around = "mask"


rows = {"lengths": jnp.array([4, 1])}

case()(
    options_not_in_a_list=lambda one: scan(step, one, XS, options=Clip(1.0)),
    options_a_text=lambda one: scan(step, one, XS, options="clip"),
    option_not_called=lambda one: scanned(one, Clip),
    option_that_is_none=lambda one: scanned(one, Clip(1.0), lambda step: step),
    option_around_nothing=lambda one: scanned(one, Elsewhere(1.0)),
    option_without_hash=lambda one: scanned(one, Clip(jnp.ones(3))),
    option_returns_no_pair=lambda one: scanned(one, Doing(lambda result: result[0])),
    option_changes_the_state=lambda one: scanned(one, Doing(lambda result: (result[0][None], result[1]))),
    option_changes_y=lambda one: scanned(one, DoingOutside(lambda result: (result[0], (result[1],) * 2))),
    option_without_consts=lambda one: scanned(one, WithoutConsts()),
    option_calls_step_without_consts=lambda one: scanned(one, CallsWithoutConsts()),
    option_reads_a_slot_that_nobody_feeds=lambda one: scanned(one, Reading()),
    option_reads_what_no_feed_has=lambda one: scanned(one, Keyed()),
    option_feeds_a_list=lambda one: scanned(one, Feeding(None)),
    option_feeds_a_name=lambda one: scanned(one, Feeding("scale")),
    option_feeds_too_few=lambda one: scanned(one, Feeding(SCALE, (1.0, 2.0))),
    options_of_one_slot=lambda one: scanned(one, Feeding(SCALE), Feeding(Slot("scale"))),
    option_around_the_mask_of_while_scan=lambda one: while_scan(
        lambda carry: carry < 3, step, one, XS, options=[ClipRows(1.0)]
    ),
    option_around_the_mask_of_a_pattern=lambda one: scan_layers(
        [lambda x, h: (h + x, x)] * 2, one, [XS, XS], options=[ClipRows(1.0)]
    ),
    option_whose_slot_has_other_rows=lambda one: mask_scan(
        step, one * jnp.ones(2), jnp.ones((4, 2)), options=[Feeding(OF_ROWS, ((1.0,) * 3,) * 4)], **rows
    ),
    option_whose_slot_may_have_rows=lambda one: mask_scan(
        step, one * jnp.ones(2), jnp.ones((4, 2)), options=[Feeding(SCALE)], compact=True, **rows
    ),
)
