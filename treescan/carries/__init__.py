"""Custom carries: values in an `init` that store one thing and show the body another."""

from ._averages import (
    Ema as Ema,
    Moments as Moments,
    Statistics as Statistics,
    Sum as Sum,
    Window as Window,
    ema as ema,
    moments as moments,
    sum_ as sum_,
    window as window,
)
from ._base import (
    AbstractCarry as AbstractCarry,
    as_seen as as_seen,
    carry_of as carry_of,
    read_tree as read_tree,
    write_tree as write_tree,
)
from ._buffer import Best as Best, Buffer as Buffer, best as best, buffer as buffer
from ._gradient import (
    Cast as Cast,
    ClipGradient as ClipGradient,
    StopGradient as StopGradient,
    cast as cast,
    clip_gradient as clip_gradient,
    stop_gradient as stop_gradient,
)
from ._keys import Keys as Keys, keys as keys
from ._registry import register_carry as register_carry
