"""What makes loops faster than the core alone. The core asks for it by these names, and knows nothing else of it.

The files are loaded when a call first asks. Each says at its top which steps need it, and how much they gain.
"""

from typing import TYPE_CHECKING

from .._lazy import on_first_use

if TYPE_CHECKING:
    from .in_bulk import (
        at_once as at_once,
        bytes_of_products as bytes_of_products,
        products_at_once as products_at_once,
        products_pay as products_pay,
        save_all_but_cheap as save_all_but_cheap,
        saving_step as saving_step,
    )
    from .in_place import InPlace as InPlace, write_in_place as write_in_place
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "in_bulk": "at_once bytes_of_products products_at_once products_pay save_all_but_cheap saving_step",
            "in_place": "InPlace write_in_place",
        },
    )
