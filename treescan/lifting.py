"""`lift`, a scan over functions that keep collections of variables, as flax modules do; and roles of collections."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

if TYPE_CHECKING:
    from ._extras.lift.groups import In as In, Out as Out
    from ._extras.lift.lift import lift as lift
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "_extras.lift.groups": "In Out",
            "_extras.lift.lift": "lift",
        },
    )
