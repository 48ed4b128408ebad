"""Reads GPU amounts as people type them: "4", "0.5", "none"."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from portal.errors import Invalid

NO_LIMIT = frozenset({"", "none", "no limit", "-", "–", "∞"})


def milli_of(text: str, field: str) -> int:
    """GPUs as thousandths. Raises Invalid for anything but a number from 0 up with at most three decimals."""
    try:
        amount = Decimal(text.strip().replace(",", "."))
    except InvalidOperation:
        raise Invalid(fields={field: f"“{text.strip()[:20]}” is not a number of GPUs."}) from None
    milli = amount * 1000
    if not amount.is_finite() or amount < 0 or milli != milli.to_integral_value() or milli > 10_000_000:
        raise Invalid(fields={field: "Give GPUs from 0 to 10,000, with at most three decimals."})
    return int(milli)


def limit_of(text: str, field: str) -> int | None:
    """As ``milli_of``; "none" (or nothing) means that there is no limit."""
    return None if text.strip().lower() in NO_LIMIT else milli_of(text, field)


def weight_of(text: str, field: str) -> float:
    """A weight from 0 up."""
    try:
        return float(text.strip().replace(",", "."))
    except ValueError:
        raise Invalid(fields={field: f"“{text.strip()[:20]}” is not a weight."}) from None


def whole_number_of(text: str, field: str) -> int:
    """A whole number, with its sign."""
    try:
        return int(text.strip().replace("−", "-"))
    except ValueError:
        raise Invalid(fields={field: f"“{text.strip()[:20]}” is not a whole number."}) from None


def shown_gpus(milli: int | None) -> str:
    """Thousandths as people read GPUs: "4", "0.5", "none"."""
    if milli is None:
        return "none"
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")
