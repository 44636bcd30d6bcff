"""Types that verbs return, for annotations: nobody makes their values."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

if TYPE_CHECKING:
    from ._extras.describe.description import Description as Description
    from ._extras.describe.measured import Measurements as Measurements
    from ._extras.stream.run import Part as Part
    from ._options.finite.case import NonFinite as NonFinite
    from ._options.finite.check import FiniteReport as FiniteReport
    from ._remat.budget import RematPlan as RematPlan
    from ._verbs.while_scan import WhileResult as WhileResult
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "_extras.describe.description": "Description",
            "_extras.describe.measured": "Measurements",
            "_extras.stream.run": "Part",
            "_options.finite.case": "NonFinite",
            "_options.finite.check": "FiniteReport",
            "_remat.budget": "RematPlan",
            "_verbs.while_scan": "WhileResult",
        },
    )
