"""Amounts with a unit in documents: durations, sizes of memory and thousandths."""

from __future__ import annotations

import re
from fractions import Fraction

from django.utils.translation import gettext as _

from portal.domain.jobs.job_spec import JobField

_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_MIB = {"Ki": Fraction(1, 1024), "Mi": Fraction(1), "Gi": Fraction(1024), "Ti": Fraction(1024**2)}
_PART = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(sec|s|min|m|h|d)"
_DURATION = re.compile(rf"{_PART}(?:\s*{_PART})*")
_CLOCK = re.compile(r"(?:([0-9]{1,5})-)?([0-9]{1,5}):([0-5][0-9]):([0-5][0-9])")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(Ki|Mi|Gi|Ti)B?")
_DECIMAL_SIZE = re.compile(r"[0-9]+(?:\.[0-9]+)?\s*([KMGT])B?", re.IGNORECASE)
_MILLI = re.compile(r"([0-9]{1,18})m")


def amount_unit(rule: JobField) -> str | None:
    """Return the unit of a field that takes whole numbers of one: ``s``, ``mib`` or ``milli``; else None."""
    if rule.value_type is not int:
        return None
    return rule.unit or ("milli" if "milli" in rule.name else None)


def read_amount(text: str, unit: str) -> int:
    """Return the number of units. Raise ValueError with a sentence.

    - ``s``: ``90 min``, ``2h``, ``1h 30m``, ``2:30:00`` (hours, minutes, seconds), ``1-12:00:00`` (days first)
    - ``mib``: ``512Mi``, ``4Gi``, ``1.5 TiB``
    - ``milli``: ``500m``
    """
    text = text.strip()
    amount = {"s": _seconds, "mib": _mebibytes, "milli": _thousandths}[unit](text)
    if amount is None:
        raise ValueError(_problem(text, unit))
    if amount.denominator != 1:
        raise ValueError(_fraction_problem(text, unit))
    return int(amount)


def _seconds(text: str) -> Fraction | None:
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return Fraction(days * 86_400 + hours * 3600 + minutes * 60 + seconds)
    if _DURATION.fullmatch(text):
        return sum(
            (Fraction(number) * _SECONDS[unit] for number, unit in re.findall(_PART, text)), Fraction(0)
        )
    return None


def _mebibytes(text: str) -> Fraction | None:
    found = _SIZE.fullmatch(text)
    return Fraction(found[1]) * _MIB[found[2]] if found else None


def _thousandths(text: str) -> Fraction | None:
    found = _MILLI.fullmatch(text)
    return Fraction(found[1]) if found else None


def _problem(text: str, unit: str) -> str:
    shown = text[:40]
    if unit == "s":
        if re.fullmatch(r"[0-9]+:[0-9]+", text):
            message = _(
                "{text} may be minutes or hours. Write it as hours:minutes:seconds, or such as 90 min."
            )
        else:
            message = _("{text} is not a duration. Give seconds, or such as 45 s, 90 min, 2h, 1d or 2:30:00.")
    elif unit == "mib":
        if found := _DECIMAL_SIZE.fullmatch(text):
            message = _("{text} may be 1000 or 1024 based. Write it with {unit}i, or give MiB.")
            return message.format(text=shown, unit=found[1].upper())
        message = _("{text} is not a size. Give MiB, or such as 512Mi or 4Gi.")
    else:
        message = _("{text} is not an amount. Give thousandths, such as 500 or 500m.")
    return message.format(text=shown)


def _fraction_problem(text: str, unit: str) -> str:
    message = (
        _("{text} is not a whole number of seconds.")
        if unit == "s"
        else _("{text} is not a whole number of MiB.")
    )
    return message.format(text=text[:40])
