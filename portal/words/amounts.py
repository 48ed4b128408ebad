"""Amounts as people read them, in sentences that services write."""

from __future__ import annotations


def memory(mib: int) -> str:
    """512 MiB, 8 GiB, 63.5 GiB."""
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def memories(one_mib: int, other_mib: int) -> tuple[str, str]:
    """Two amounts that differ, so that they read differently."""
    one, other = memory(one_mib), memory(other_mib)
    return (one, other) if one != other else (f"{one_mib} MiB", f"{other_mib} MiB")
