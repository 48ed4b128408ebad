"""Formats amounts for messages to users."""

from __future__ import annotations

import re

_VENDOR_PREFIX = re.compile(r"^(NVIDIA|AMD|Intel)\s+", re.IGNORECASE)
_FORM_FACTOR_SUFFIX = re.compile(r"[-\s](SXM\d?|PCIE?|NVL|HBM\d?e?)\b.*$", re.IGNORECASE)


def format_memory(mib: int) -> str:
    """Format MiB as 512 MiB, 8 GiB or 63.5 GiB."""
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def format_distinct_memories(one_mib: int, other_mib: int) -> tuple[str, str]:
    """Format two different amounts so that their texts differ."""
    one, other = format_memory(one_mib), format_memory(other_mib)
    return (one, other) if one != other else (f"{one_mib} MiB", f"{other_mib} MiB")


def format_duration(seconds: float) -> str:
    """Format a duration as 90 s, 15 min, 2 h or 3 d.

    The unit is the largest that gives a whole number; otherwise minutes, or seconds below 10 minutes.
    """
    whole = round(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole >= size and whole % size == 0:
            return f"{whole // size} {unit}"
    return f"{whole} s" if whole < 600 else f"{whole / 60:.0f} min"


def short_gpu_model(model: str) -> str:
    """Shorten a model without vendor and form factor, as all pages and messages name it.

    NVIDIA H100-SXM5-80GB becomes H100.
    """
    name = _FORM_FACTOR_SUFFIX.sub("", _VENDOR_PREFIX.sub("", model.strip()))
    return name.removesuffix(" GPU").removesuffix(" Generation") or model


def format_gpu_models(requested: str | None) -> str:
    """Return the requested models as the words before "GPU", which some models end with; blank without one."""
    models = dict.fromkeys(short_gpu_model(model) for model in (requested or "").split("|"))
    return f"{' or '.join(models)} " if requested else ""
