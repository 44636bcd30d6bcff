"""Custom carries: values in an `init` that store one thing and show the body another."""

from typing import TYPE_CHECKING

from .._lazy import on_first_use

if TYPE_CHECKING:
    from ._averages import (
        Ema as Ema,
        Moments as Moments,
        Statistics as Statistics,
        Window as Window,
        ema as ema,
        moments as moments,
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
    from ._sums import RunningSum as RunningSum, running_sum as running_sum
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "_averages": "Ema Moments Statistics Window ema moments window",
            "_base": "AbstractCarry as_seen carry_of read_tree write_tree",
            "_buffer": "Best Buffer best buffer",
            "_gradient": "Cast ClipGradient StopGradient cast clip_gradient stop_gradient",
            "_keys": "Keys keys",
            "_registry": "register_carry",
            "_sums": "RunningSum running_sum",
        },
        {  # what else these carries are called
            "`moments()`, with the mean and the variance": "mean std var variance statistics",
            "`ema(start, decay)`": "average moving_average exponential_moving_average",
        },
    )
