"""Formats numbers, times and states for pages: text with units and no-break spaces."""

from __future__ import annotations

import datetime as dt
import math
import shlex
import zoneinfo
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from django.utils import dateformat
from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from portal.domain.formatting import short_gpu_model
from portal.domain.scheduling.throughput import Layout

NBSP = "\u00a0"


MAX_DIGITS = 18


def parse_whole_number(text: object) -> int | None:
    """Parse an integer from 0 up in a URL or a field; None for anything else."""
    digits = str(text)
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS else None


def duration(seconds: float | None) -> str:
    """Format as 12 s, 4 min 10 s, 7 h 22 min or 3 d 4 h; "unknown" for None."""
    if seconds is None:
        return _("unknown")
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}{NBSP}s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes}{NBSP}min" + (f" {rest}{NBSP}s" if rest and minutes < 10 else "")
    if whole < 86400:
        hours, rest = divmod(whole, 3600)
        return f"{hours}{NBSP}h" + (f" {rest // 60:02d}{NBSP}min" if rest >= 60 else "")
    days, rest = divmod(whole, 86400)
    return f"{days}{NBSP}d" + (f" {rest // 3600}{NBSP}h" if rest >= 3600 else "")


def memory(mib: float | None) -> str:
    """Format as 512 MiB or 80 GiB; "unknown" for None."""
    if mib is None:
        return _("unknown")
    if mib < 1024:
        return f"{mib:.0f}{NBSP}MiB"
    gib = mib / 1024
    return f"{gib:.0f}{NBSP}GiB" if gib >= 10 or gib == int(gib) else f"{gib:.1f}{NBSP}GiB"


def byte_size(size_bytes: float | None) -> str:
    """Format as 300 B, 12.4 KiB, 512 MiB or 80 GiB; "unknown" for None."""
    if size_bytes is None or size_bytes >= 1024**2:
        return memory(None if size_bytes is None else size_bytes / 1024**2)
    return f"{size_bytes:.0f}{NBSP}B" if size_bytes < 1024 else f"{size_bytes / 1024:.3g}{NBSP}KiB"


def energy(joules: float) -> str:
    """Format as 0.4 Wh, 35 Wh, 1.2 kWh or 340 kWh."""
    hours = joules / 3600
    unit, value = ("kWh", hours / 1000) if hours >= 1000 else ("Wh", hours)
    return f"{value:.1f}{NBSP}{unit}" if value < 10 else f"{value:,.0f}{NBSP}{unit}"


def gpus(milli: int) -> str:
    """Format as 2 GPUs, 1 GPU, 0.5 GPU or no GPU."""
    if milli == 0:
        return no_gpu()
    amount = f"{milli / 1000:g}"
    return f"{amount}{NBSP}{'GPU' if milli <= 1000 else 'GPUs'}"


def no_gpu() -> str:
    return _("no GPU").replace(" ", NBSP)


def gpu_amount(milli: int) -> str:
    """Format milli-GPUs without a unit: 2, 0.5."""
    return f"{milli / 1000:g}"


def amount(value: float) -> str:
    """Format as 1,200 or 0.0123: any number with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(per_s: float) -> str:
    """Format as 340 a second, 2.5 a minute or 0.4 an hour."""
    for text, seconds in ((_("{rate} a second"), 1), (_("{rate} a minute"), 60)):
        if per_s * seconds >= 0.5:
            return _join_last_words(text.format(rate=amount(per_s * seconds)))
    return _join_last_words(_("{rate} an hour").format(rate=amount(per_s * 3600)))


def _join_last_words(text: str) -> str:
    return NBSP.join(text.rsplit(" ", 1))


def gb(amount_bytes: float) -> str:
    """Format as 3.1 GB or 300 GB."""
    return f"{amount_bytes / 1e9:.3g}{NBSP}GB"


def milliseconds(seconds: float) -> str:
    """Format as 0.42 ms, 12.5 ms or 1,250 ms."""
    return f"{1000 * seconds:,.3g}{NBSP}ms" if seconds < 0.1 else f"{1000 * seconds:,.0f}{NBSP}ms"


def layout_text(lies: Layout) -> str:
    """Format as: H200 on 1 node; A100 on 2 nodes, 4 NVLink islands, 1 fabric level apart."""
    models = " + ".join(short_gpu_model(model) for model in lies.gpu_model.split(" + "))
    said = _("{models} on {nodes}").format(models=models, nodes=plural(lies.nodes, "node"))
    if lies.islands > lies.nodes:
        said += f", {plural(lies.islands, 'NVLink island')}"
    if lies.levels:
        said += ", " + _("{levels} apart").format(levels=plural(lies.levels, "fabric level"))
    return said


def topology_constraint_text(near: dict[str, str | None] | None) -> str:
    """Format as: in one rack (fabric); preferably in one block (fabric); "" without a constraint."""
    if not near:
        return ""
    said = [
        (_("in one {level}"), near.get("required")),
        (_("preferably in one {level}"), near.get("preferred")),
    ]
    levels = ", ".join(text.format(level=level.rpartition("/")[2]) for text, level in said if level)
    return f"{levels} ({near.get('topology')})"


def gpu_time(gpu_seconds: float) -> str:
    """Format as 0.042 GPU-h, 1.6 GPU-h or 260 GPU-h: everywhere in one unit, so that figures can be compared."""
    return gpu_hours(gpu_seconds / 3600)


def gpu_hours(hours: float) -> str:
    return f"{gpu_hours_amount(hours)}{NBSP}GPU-h"


def gpu_hours_amount(hours: float) -> str:
    """Format GPU-hours without the unit: one decimal below 100, two significant digits below 1, at least 0.001."""
    if hours >= 99.95:
        return f"{hours:,.0f}"
    if hours >= 0.995:
        return f"{hours:.1f}"
    return f"{hours:.2g}" if hours >= 0.001 else "<0.001" if hours > 0 else "0"


@dataclass(frozen=True)
class Unit:
    """The unit of a column of figures, and how many of the stored unit it is."""

    name: str
    size: float

    def amount(self, value: float) -> str:
        """Format a value of the stored unit as a number of this one."""
        return gpu_hours_amount(value / self.size)


TIME_UNITS = (Unit("s", 1.0), Unit("min", 60.0), Unit("h", 3600.0))
ENERGY_UNITS = (Unit("Wh", 3600.0), Unit("kWh", 3.6e6), Unit("MWh", 3.6e9))


def common_unit(units: Sequence[Unit], values: Iterable[float | None]) -> Unit:
    """Return the unit in which all figures of a column are given: the largest of which the largest value has two."""
    largest = max((value for value in values if value is not None), default=0.0)
    return next((unit for unit in reversed(units) if largest >= 2 * unit.size), units[0])


def in_unit(value: float, unit: Unit) -> str:
    return unit.amount(value)


def signed_percent(percent: float) -> str:
    """Format as +7 % or −11 %."""
    return f"{'−' if percent < 0 else '+'}{abs(percent):.0f}{NBSP}%"


def money(value: float, currency: str) -> str:
    """Format as 0.40 EUR, 12.30 EUR or 1,598 EUR."""
    return f"{value:,.0f}{NBSP}{currency}" if value >= 100 else f"{value:.2f}{NBSP}{currency}"


def step_time(seconds: float) -> str:
    """Format as 0.5 ms, 358 ms, 2.4 s or 3 min."""
    if seconds >= 60:
        return duration(seconds)
    return f"{amount(seconds)}{NBSP}s" if seconds >= 1 else f"{amount(seconds * 1000)}{NBSP}ms"


def spaced(code: str) -> str:
    """Format a code as words: node_failure as node failure."""
    return _(code.replace("_", " "))


def cores(milli: int) -> str:
    """Format as 4 cores, 1 core or 0.5 core."""
    amount = f"{milli / 1000:g}"
    return f"{amount}{NBSP}{ngettext('core', 'cores', 1 if milli <= 1000 else 2)}"


def time_zone(name: str) -> dt.tzinfo:
    """Return the time zone of that name; UTC if it does not exist."""
    try:
        return zoneinfo.ZoneInfo(name or "UTC")
    except (zoneinfo.ZoneInfoNotFoundError, ValueError):
        return dt.UTC


def full_time(at: dt.datetime, zone: dt.tzinfo) -> str:
    """Format as Tuesday 12 May 2026, 13:52:04 (CEST), in the reader's zone."""
    here = at.astimezone(zone)
    return f"{_day_text(here.date(), get_language())}, {here:%H:%M:%S} ({here.tzname()})"


@lru_cache(maxsize=1024)
def _day_text(day: dt.date, language: str) -> str:
    """Format as Tuesday 12 May 2026 in the language of the page; the same few days appear in hundreds of times."""
    return format_date(day, _("l j F Y"))


def short_time(at: dt.datetime, zone: dt.tzinfo, now: dt.datetime) -> str:
    """Format as 13:52 today, yesterday 13:52, tomorrow 13:52, 9 May 13:52 or 9 May 2025."""
    here, today = at.astimezone(zone), now.astimezone(zone)
    days = (today.date() - here.date()).days
    if days == 0:
        return f"{here:%H:%M}"
    if days == 1:
        return _("yesterday {time}").format(time=f"{here:%H:%M}")
    if days == -1:
        return _("tomorrow {time}").format(time=f"{here:%H:%M}")
    return format_date(here, _("j M H:i") if here.year == today.year else _("j M Y"))


def format_date(at: dt.date, form: str) -> str:
    """Format with names of days and months in the language of the page; ``form`` as in Django's filter ``date``."""
    return dateformat.format(at, form)


def plural(count: int, names: str) -> str:
    """Format as 1 node, 3 nodes; 1 time, 2 times for the names ``time,times``."""
    return f"{count:,}{NBSP}{ngettext(*singular_and_plural(names), count)}"


def singular_and_plural(names: str) -> tuple[str, str]:
    """Split ``time,times``; a name without a plural gets an s."""
    one, _, many = names.partition(",")
    return one, many or f"{one}s"


def shell_words(words: Sequence[str]) -> str:
    """Return an argument list as it would be typed in a shell."""
    return shlex.join(words)


def short_digest(pin: str) -> str:
    """Return the first 12 hex digits of an image's digest."""
    return f"sha256:{pin.rpartition(':')[2][:12]}"


def metric_value(value: float | None) -> str:
    """Format a number of a run or trial: whole numbers as they are, others with four significant digits.

    From 1e12 on and below 1e-4 with an exponent; "none" for None. static/src/numbers.js writes the same.
    """
    if value is None:
        return _("none")
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value and not 1e-4 <= abs(value) < 1e12:
        mantissa, _e, exponent = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent):+d}"
    value += 0.0  # -0.0 is 0
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def fraction(value: float, start: float, end: float) -> float:
    """Return where a finite value lies between two others, 0 to 1, also if their distance exceeds every float."""
    part = 1.0 if math.isfinite(end - start) else 0.25
    return (value * part - start * part) / (end * part - start * part)
