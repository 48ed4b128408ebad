"""Health of a GPU from its readings: a table of faults and a pure function.

Sources: NVIDIA's "Xid Errors" (codes and required actions), "GPU Memory Error Management" (a pending row
remap does not prevent work; a failed one requires service), "Dynamic Page Retirement" (a page pending
retirement may be used again before a reset), and NVML's clocks event reasons.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple

from agents.node.gpus import LOST, OK, QUARANTINED

MEMORY_FAULT = 0
"""Pseudo XID for uncorrected memory errors found by counting."""

THROTTLE_WARNING_S = 30.0
"""Throttling for less time raises no warning."""


class GpuHealth(NamedTuple):
    """``ok`` with a message is a warning: the GPU accepts work. ``fatal``: its tasks cannot be trusted."""

    health: str
    message: Optional[str] = None
    fatal: bool = False


class HealthReadings(NamedTuple):
    """Readings of a GPU's condition; None is unknown."""

    responds: bool = True
    xids: Tuple[int, ...] = ()  # recent ones, in order
    ecc_uncorrected: Optional[int] = None  # since the driver was loaded
    rows_pending: Optional[bool] = None
    rows_failed: Optional[bool] = None
    pages_pending: Optional[bool] = None
    throttle: int = 0  # NVML's bit mask
    throttled_s: float = 0.0  # how long one of THROTTLE_REASONS has been set


XID_HEALTH: Dict[int, GpuHealth] = {
    79: GpuHealth(LOST, "it fell off the bus", fatal=True),
    48: GpuHealth(QUARANTINED, "its memory had an uncorrectable error", fatal=True),
    95: GpuHealth(QUARANTINED, "its memory had an uncontained error", fatal=True),
    94: GpuHealth(
        QUARANTINED, "its memory had a contained error, and the affected processes were ended", fatal=True
    ),
    140: GpuHealth(QUARANTINED, "its memory had an unrecovered error", fatal=True),
    MEMORY_FAULT: GpuHealth(QUARANTINED, "its memory had an uncorrectable error", fatal=True),
    119: GpuHealth(QUARANTINED, "its GSP no longer responds to the driver", fatal=True),
    120: GpuHealth(QUARANTINED, "its GSP failed", fatal=True),
    62: GpuHealth(QUARANTINED, "its microcontroller halted", fatal=True),
    46: GpuHealth(QUARANTINED, "it stopped processing and needs a reset", fatal=True),
    109: GpuHealth(QUARANTINED, "its context switch timed out and it needs a reset", fatal=True),
    110: GpuHealth(QUARANTINED, "it had a security fault, which is usually a hardware failure", fatal=True),
    143: GpuHealth(QUARANTINED, "it could not be initialized", fatal=True),
    158: GpuHealth(QUARANTINED, "it did not respond in time and needs a reset", fatal=True),
    64: GpuHealth(QUARANTINED, "a damaged row of its memory could not be retired"),
    156: GpuHealth(QUARANTINED, "a damaged part of it is retired by the next reset"),
    74: GpuHealth(QUARANTINED, "its NVLink had an error"),
    136: GpuHealth(QUARANTINED, "its NVLink could not be initialized"),
    92: GpuHealth(OK, "its memory has many corrected errors"),
}
"""Health and reason by XID, worst first. Codes in neither table are warnings."""

APPLICATION_XIDS = frozenset({8, 11, 13, 31, 32, 43, 45, 63, 68, 69, 137})
"""XIDs that are caused by programs or end with them, and 63, which other readings cover better."""

THROTTLE_REASONS: Dict[int, str] = {
    0x40: "it is too hot",
    0x20: "it is too hot",
    0x80: "its power supply slows it down",
    0x08: "its board slows it down",
}
"""NVML's clocks event reasons that indicate a problem, unlike a power cap or an idle GPU."""


def is_throttled(throttle: int) -> bool:
    """Return True when the clocks are reduced for one of ``THROTTLE_REASONS``."""
    return any(throttle & bit for bit in THROTTLE_REASONS)


def evaluate_health(readings: HealthReadings) -> GpuHealth:
    """Return the worst health that the readings indicate."""
    if not readings.responds:
        return GpuHealth(LOST, "The driver no longer reports this GPU.", fatal=True)
    for xid, fault in XID_HEALTH.items():
        if xid in readings.xids and fault.health != OK:
            return fault._replace(message=_xid_message(xid, fault))
    if readings.rows_failed:
        return GpuHealth(
            QUARANTINED, "A damaged row of its memory could not be remapped: contact its vendor."
        )
    if readings.pages_pending:
        return GpuHealth(QUARANTINED, "Damaged pages of its memory are retired by the next reset of the GPU.")
    return GpuHealth(OK, _warning(readings))


def _warning(readings: HealthReadings) -> Optional[str]:
    for xid in readings.xids:
        if xid not in APPLICATION_XIDS:
            return _xid_message(xid, XID_HEALTH.get(xid))
    if readings.rows_pending:
        return "A damaged row of its memory is remapped by the next reset of the GPU."
    if readings.throttled_s >= THROTTLE_WARNING_S:
        why = next((why for bit, why in THROTTLE_REASONS.items() if readings.throttle & bit), None)
        if why is not None:
            return f"It is throttled: {why}."
    if readings.ecc_uncorrected:
        return "Its memory had uncorrectable errors since the driver was loaded."
    return None


def _xid_message(xid: int, fault: Optional[GpuHealth]) -> str:
    if xid == MEMORY_FAULT:
        return "Its memory had an uncorrectable error."
    if fault is None or fault.message is None:
        return f"The driver reported XID {xid} for it."
    return f"The driver reported XID {xid}: {fault.message}."
