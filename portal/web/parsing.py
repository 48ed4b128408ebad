"""Parses amounts and times as people type them: "4", "0.5", "none". ASCII digits, decimal point."""

from __future__ import annotations

import datetime as dt
import re
from decimal import Decimal

from django.utils.translation import gettext as _

from portal.errors import InvalidRequest

NO_LIMIT = frozenset({"", "none", "no limit", "-", "–", "∞"})
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_WHOLE = re.compile(r"[+-]?[0-9]+")
MAX_DIGITS = 20
LOCAL_FORMAT = "%Y-%m-%dT%H:%M"
"""The format of a ``datetime-local`` input."""
UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def parse_gpu_milli(text: str, field: str) -> int:
    """Parse GPUs, from 0 up with at most three decimals, as thousandths. Raise InvalidRequest."""
    milli = _decimal(text, field, _("“{text}” is not a number of GPUs; use the digits 0 to 9.")) * 1000
    if milli < 0 or milli != milli.to_integral_value() or milli > 10_000_000:
        raise InvalidRequest(fields={field: _("Enter GPUs from 0 to 10,000, with at most three decimals.")})
    return int(milli)


def parse_gpu_limit(text: str, field: str) -> int | None:
    """Parse as ``parse_gpu_milli``; "none" or nothing means no limit."""
    return None if text.strip().lower() in NO_LIMIT else parse_gpu_milli(text, field)


def parse_weight(text: str, field: str) -> float:
    """Parse a weight; the service checks its range."""
    return float(_decimal(text, field, _("“{text}” is not a weight; use the digits 0 to 9.")))


def parse_duration_s(text: str, field: str) -> float:
    """Parse seconds, or another named unit: "90", "90 s", "30 min", "2 h", "7 d"."""
    number, unit = _split_unit(text)
    if unit not in UNIT_SECONDS:
        raise InvalidRequest(
            fields={
                field: _("“{text}” is not a time; write it as in 45 s, 30 min, 2 h or 7 d.").format(
                    text=text.strip()[:MAX_DIGITS]
                )
            }
        )
    return (
        float(_decimal(number, field, _("“{text}” is not a time; use the digits 0 to 9.")))
        * UNIT_SECONDS[unit]
    )


def format_duration_input(seconds: float) -> str:
    """Format seconds in the largest unit without a fraction: "7 d", "90 min", "45 s"."""
    for unit in ("d", "h", "min"):
        if seconds and seconds % UNIT_SECONDS[unit] == 0:
            return f"{seconds / UNIT_SECONDS[unit]:g} {unit}"
    return f"{seconds:g} s"


def parse_local_time(text: str, field: str, zone: dt.tzinfo) -> dt.datetime:
    """Parse date and time of a ``datetime-local`` input in the user's time zone. Raise InvalidRequest."""
    try:
        return dt.datetime.strptime(text[:16], LOCAL_FORMAT).replace(tzinfo=zone).astimezone(dt.UTC)
    except (ValueError, OverflowError) as error:
        message = _("Enter a date and a time, such as 2026-05-12T08:00.")
        raise InvalidRequest(fields={field: message}) from error


def parse_number(text: str, field: str) -> float:
    """Parse a number with or without decimals; the service checks its range."""
    return float(_decimal(text, field, _("“{text}” is not a number; use the digits 0 to 9.")))


def parse_integer(text: str, field: str) -> int:
    return int(_digits(_WHOLE, text, field, _("“{text}” is not a whole number; use the digits 0 to 9.")))


def format_gpu_input(milli: float | None) -> str:
    """Format thousandths as GPUs: "4", "0.5", "none"."""
    if milli is None:
        return "none"
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


def _split_unit(text: str) -> tuple[str, str]:
    """Return number and unit; seconds by default."""
    words = text.strip().lower()
    number = words.rstrip("abcdefghijklmnopqrstuvwxyz")
    return number.strip(), words[len(number) :] or "s"


def _decimal(text: str, field: str, message: str) -> Decimal:
    return Decimal(_digits(_DECIMAL, text, field, message))


def _digits(form: re.Pattern[str], text: str, field: str, message: str) -> str:
    words = text.strip().replace("−", "-")
    if "," in words and form.fullmatch(words.replace(",", "")):
        # A comma is the decimal separator in some countries and the thousands separator in others.
        raise InvalidRequest(
            fields={field: _("Write decimals with a point, as in 0.5, and thousands without a comma.")}
        )
    if len(words) > MAX_DIGITS or not form.fullmatch(words):
        raise InvalidRequest(fields={field: message.format(text=words[:MAX_DIGITS])})
    return words
