"""Custom carries: values in an `init` that store one thing and show the body another."""

from ._base import (
    AbstractCarry as AbstractCarry,
    as_seen as as_seen,
    carry_of as carry_of,
    read_tree as read_tree,
    write_tree as write_tree,
)
from ._best import Best as Best, best as best
from ._buffer import Buffer as Buffer, buffer as buffer
from ._cast import Cast as Cast, cast as cast
from ._ema import Ema as Ema, ema as ema
from ._gradient import (
    ClipGradient as ClipGradient,
    StopGradient as StopGradient,
    clip_gradient as clip_gradient,
    stop_gradient as stop_gradient,
)
from ._keys import Keys as Keys, keys as keys
from ._moments import Moments as Moments, Statistics as Statistics, moments as moments
from ._registry import register_carry as register_carry
from ._sum import Sum as Sum, sum_ as sum_
from ._window import Window as Window, window as window
