"""Amounts as people read them, in sentences that services write."""

from __future__ import annotations


def format_memory(mib: int) -> str:
    """512 MiB, 8 GiB, 63.5 GiB."""
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def format_distinct_memories(one_mib: int, other_mib: int) -> tuple[str, str]:
    """Two amounts that differ, so that they read differently."""
    one, other = format_memory(one_mib), format_memory(other_mib)
    return (one, other) if one != other else (f"{one_mib} MiB", f"{other_mib} MiB")


def format_duration(seconds: float) -> str:
    """A duration: 90 s, 15 min, 2 h, 3 d; in the largest unit in which it is whole, else in minutes."""
    whole = round(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole >= size and whole % size == 0:
            return f"{whole // size} {unit}"
    return f"{whole} s" if whole < 600 else f"{whole / 60:.0f} min"
