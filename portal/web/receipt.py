"""A fair share's sum for people: each step of a receipt as a sentence with its amount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from portal.selectors.receipts import Receipt
from portal.web.words import gpu_amount


@dataclass(frozen=True)
class Line:
    """One step: its name, what it was made of, and what it adds, in GPUs."""

    name: str
    words: str
    amount: str


@dataclass(frozen=True)
class Sum:
    """A receipt, replayed."""

    receipt: Receipt
    lines: list[Line]

    @property
    def total(self) -> str:
        """What the steps add up to, GPUs."""
        return amount(sum(step["amount_milli"] for step in self.receipt.steps))

    @property
    def verdict(self) -> str:
        """What that means for the project now."""
        receipt = self.receipt
        held, share = receipt.allocated_milli, receipt.fair_share_milli
        if held < receipt.guaranteed_milli:
            return "It holds less than its guarantee, so its jobs go first."
        if held < share:
            return "It holds less than its share, so it may start more, and ask borrowed GPUs back."
        if held > share:
            return "It holds more than its share: what is beyond its guarantee may be asked back."
        return "It holds its share; more starts only on GPUs that nobody else is entitled to."


def sums_of(receipts: list[Receipt]) -> list[Sum]:
    """The receipts as sentences."""
    return [Sum(receipt, _lines(receipt)) for receipt in receipts]


def amount(milli: float) -> str:
    """GPUs with at most two decimals."""
    return gpu_amount(round(milli / 10) * 10)


def percent(part: float) -> str:
    """A part of 1 in percent, three figures; what is hardly anything says so."""
    return "next to nothing" if part < 0.0005 else f"{100 * part:.3g} %"


def _lines(receipt: Receipt) -> list[Line]:
    lines, rounds = [], 0
    for step in receipt.steps:
        rounds += step["kind"] == "round"
        name, words = _step(step["kind"], step["numbers"], rounds)
        lines.append(Line(name, words, amount(step["amount_milli"])))
    return lines


def _step(kind: str, numbers: dict[str, Any], rounds: int) -> tuple[str, str]:
    known = {key: value for key, value in numbers.items() if isinstance(value, int | float)}
    match kind:
        case "guaranteed" if {"guaranteed", "requestable"} <= set(known):
            return "Guaranteed", (
                f"{amount(known['guaranteed'])} guaranteed, of which it can use "
                f"{amount(min(known['guaranteed'], known['requestable']))}"
            )
        case "round" if {"rest", "weight", "usage", "part", "need"} <= set(known):
            return f"Round {rounds}", (
                f"{amount(known['rest'])} left; weight {known['weight']:g} and past use "
                f"{percent(known['usage'])} make its part {percent(known['part'])}; "
                f"it needs {amount(known['need'])} more"
            )
        case "remainder" if {"rest", "fraction"} <= set(known):
            return "Remainder", (
                f"{amount(known['rest'])} left over by rounding down to whole GPUs; "
                f"{amount(known['fraction'])} of its part was cut off"
            )
    return kind.capitalize(), ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in known.items())
