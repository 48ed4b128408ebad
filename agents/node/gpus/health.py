"""What the readings of a GPU say of its health: one table of faults, and one function from readings to health. Pure.

Sources: NVIDIA's "Xid Errors" (the catalog of codes and what each asks for), "GPU Memory Error Management" (a row
that waits to be remapped keeps no work off; one that could not be remapped is a case for the maker), "Dynamic Page
Retirement" (a page that waits for a reset may be hit again), and NVML's reasons for lower clocks.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple

from agents.node.gpus import LOST, OK, QUARANTINED

MEMORY = 0
"""Stands among XIDs for uncorrected memory errors that were counted."""

SLOW_AFTER_S = 30.0
"""A GPU that lowers its clocks for less time is not worth a warning."""


class Health(NamedTuple):
    """``ok`` with a sentence is a warning: it takes work. ``fatal``: what runs on it cannot be trusted any more."""

    health: str
    sentence: Optional[str] = None
    fatal: bool = False


class Readings(NamedTuple):
    """What is known of a GPU's condition; None, and nothing else, is not known."""

    answers: bool = True
    xids: Tuple[int, ...] = ()  # told of late, in order
    ecc_uncorrected: Optional[int] = None  # since the driver was loaded
    rows_pending: Optional[bool] = None
    rows_failed: Optional[bool] = None
    pages_pending: Optional[bool] = None
    throttle: int = 0  # NVML's bits
    slow_s: float = 0.0  # for how long one of SLOWED has been among them


FAULTS: Dict[int, Health] = {
    79: Health(LOST, "it fell off the bus", fatal=True),
    48: Health(QUARANTINED, "its memory had an error that could not be corrected", fatal=True),
    95: Health(QUARANTINED, "its memory had an error that reached other work", fatal=True),
    94: Health(QUARANTINED, "its memory had an error, and the work that it hit was ended", fatal=True),
    140: Health(QUARANTINED, "its memory had an error that it did not recover from", fatal=True),
    MEMORY: Health(QUARANTINED, "its memory had an error that could not be corrected", fatal=True),
    119: Health(QUARANTINED, "its own processor no longer answers the driver", fatal=True),
    120: Health(QUARANTINED, "its own processor failed", fatal=True),
    62: Health(QUARANTINED, "its microcontroller halted", fatal=True),
    46: Health(QUARANTINED, "it stopped working and waits for a reset", fatal=True),
    109: Health(QUARANTINED, "it no longer changes between programs and waits for a reset", fatal=True),
    110: Health(QUARANTINED, "it met a security fault, which mostly is a failure of its parts", fatal=True),
    143: Health(QUARANTINED, "it could not be set up", fatal=True),
    158: Health(QUARANTINED, "it did not answer in time and waits for a reset", fatal=True),
    64: Health(QUARANTINED, "a damaged part of its memory could not be put aside"),
    156: Health(QUARANTINED, "a damaged part of it was put aside, which a reset finishes"),
    74: Health(QUARANTINED, "its NVLink had an error"),
    136: Health(QUARANTINED, "its NVLink could not be set up"),
    92: Health(OK, "its memory has many errors that are still corrected"),
}
"""By XID, worst first: what the GPU is then, and why. Codes that are in neither table are warnings."""

OF_PROGRAMS = frozenset({8, 11, 13, 31, 32, 43, 45, 63, 68, 69, 137})
"""XIDs that programs cause, that end with them, or (63) that the readings tell better."""

SLOWED: Dict[int, str] = {
    0x40: "it is too hot",
    0x20: "it is too hot",
    0x80: "its power supply asks for it",
    0x08: "its board asks for it",
}
"""NVML's reasons for lower clocks that mean something is wrong; a power cap or an idle GPU does not."""


def is_slowed(throttle: int) -> bool:
    """True when the clocks are low for a reason that is worth a warning once it lasts."""
    return any(throttle & bit for bit in SLOWED)


def judge(readings: Readings) -> Health:
    """The health of a GPU; the worst that its readings say."""
    if not readings.answers:
        return Health(LOST, "The driver no longer answers for this GPU.", fatal=True)
    for xid, fault in FAULTS.items():
        if xid in readings.xids and fault.health != OK:
            return fault._replace(sentence=_told(xid, fault))
    if readings.rows_failed:
        return Health(
            QUARANTINED, "A damaged row of its memory could not be replaced: it is a case for its maker."
        )
    if readings.pages_pending:
        return Health(QUARANTINED, "Damaged pages of its memory wait for a reset of the GPU.")
    return Health(OK, _warning(readings))


def _warning(readings: Readings) -> Optional[str]:
    for xid in readings.xids:
        if xid not in OF_PROGRAMS:
            return _told(xid, FAULTS.get(xid))
    if readings.rows_pending:
        return "A damaged row of its memory is replaced at the next reset of the GPU."
    if readings.slow_s >= SLOW_AFTER_S:
        why = next((why for bit, why in SLOWED.items() if readings.throttle & bit), None)
        if why is not None:
            return f"It runs slower: {why}."
    if readings.ecc_uncorrected:
        return "Its memory had errors that could not be corrected since the driver was loaded."
    return None


def _told(xid: int, fault: Optional[Health]) -> str:
    if xid == MEMORY:
        return "Its memory had an error that could not be corrected."
    if fault is None or fault.sentence is None:
        return f"The driver told XID {xid} for it."
    return f"The driver told XID {xid}: {fault.sentence}."
