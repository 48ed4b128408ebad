"""Reads amounts as people type them: "4", "0.5", "none". Digits are 0 to 9, decimals stand after a point."""

from __future__ import annotations

import re
from decimal import Decimal

from portal.errors import Invalid

NO_LIMIT = frozenset({"", "none", "no limit", "-", "–", "∞"})
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_WHOLE = re.compile(r"[+-]?[0-9]+")
LONGEST = 20
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def milli_of(text: str, field: str) -> int:
    """GPUs as thousandths. Raises Invalid for anything but a number from 0 up with at most three decimals."""
    milli = _decimal(text, field, "a number of GPUs") * 1000
    if milli < 0 or milli != milli.to_integral_value() or milli > 10_000_000:
        raise Invalid(fields={field: "Give GPUs from 0 to 10,000, with at most three decimals."})
    return int(milli)


def limit_of(text: str, field: str) -> int | None:
    """As ``milli_of``; "none" (or nothing) means that there is no limit."""
    return None if text.strip().lower() in NO_LIMIT else milli_of(text, field)


def weight_of(text: str, field: str) -> float:
    """A weight; its bounds are the service's."""
    return float(_decimal(text, field, "a weight"))


def seconds_of(text: str, field: str) -> float:
    """Seconds, or another unit by name: "90", "90 s", "30 min", "2 h", "7 d"."""
    number, unit = _parted(text)
    if unit not in SECONDS:
        raise Invalid(
            fields={field: f"“{text.strip()[:LONGEST]}” is no time; write it as in 45 s, 30 min, 2 h or 7 d."}
        )
    return float(_decimal(number, field, "a time")) * SECONDS[unit]


def shown_seconds(seconds: float) -> str:
    """Seconds in the largest unit in which they are whole: "7 d", "90 min", "45 s"."""
    for unit in ("d", "h", "min"):
        if seconds and seconds % SECONDS[unit] == 0:
            return f"{seconds / SECONDS[unit]:g} {unit}"
    return f"{seconds:g} s"


def number_of(text: str, field: str) -> float:
    """A number with or without decimals; its bounds are the service's."""
    return float(_decimal(text, field, "a number"))


def whole_number_of(text: str, field: str) -> int:
    """A whole number, with its sign."""
    return int(_digits(_WHOLE, text, field, "a whole number"))


def shown_gpus(milli: int | None) -> str:
    """Thousandths as people read GPUs: "4", "0.5", "none"."""
    if milli is None:
        return "none"
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


def _parted(text: str) -> tuple[str, str]:
    """A number and the unit behind it; seconds where none stands."""
    words = text.strip().lower()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz")
    return number.strip(), words[len(number) :] or "s"


def _decimal(text: str, field: str, what: str) -> Decimal:
    return Decimal(_digits(_DECIMAL, text, field, what))


def _digits(form: re.Pattern[str], text: str, field: str, what: str) -> str:
    words = text.strip().replace("−", "-")
    if "," in words and form.fullmatch(words.replace(",", "")):
        # it stands for the point in one country and parts the thousands in another
        raise Invalid(
            fields={field: "Write decimals with a point, as in 0.5, and thousands without a comma."}
        )
    if len(words) > LONGEST or not form.fullmatch(words):
        raise Invalid(fields={field: f"“{words[:LONGEST]}” is not {what}; use the digits 0 to 9."})
    return words
