"""Find the price of a machine: the recipe's, else the list price of its chips.

Money is in decimals, so that sums do not drift by a cent.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.wording import plural


@dataclass(frozen=True)
class MachinePrice:
    """The price of a whole machine.

    Attributes:
        usd_per_hour: exact.
        source: "the recipe", or "list price of 2026-05, on demand: 8 x US$ 2.69".
    """

    usd_per_hour: Decimal
    source: str


def machine_price(stated: float | None, accelerator: Accelerator) -> MachinePrice | None:
    """Return the price of a whole machine: the recipe's price, else the catalog's; None if neither is known.

    Args:
        stated: the recipe's price, in US$ per hour.
    """
    if stated is not None:
        return MachinePrice(exact(stated), "the recipe")
    if accelerator.usd_per_chip_hour is None:
        return None
    chips = accelerator.chips
    return MachinePrice(
        exact(accelerator.usd_per_chip_hour) * chips,
        f"list price of {accelerator.price_date}, on demand: {plural(chips, 'chip')} at US$ "
        f"{accelerator.usd_per_chip_hour:.2f}",
    )


def serving_price(program: Program) -> MachinePrice | None:
    """Return the price of the whole serving machine; None if there is none, or if its price is unknown."""
    if program.serve_accelerator is None:
        return None
    return machine_price(program.recipe.cost.serve_usd_per_hour, program.serve_accelerator)


def exact(number: float) -> Decimal:
    """Convert a number by its shortest notation: 16.8 and not 16.800000000000000710..."""
    return Decimal(str(number))
