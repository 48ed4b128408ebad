"""Meaning and severity of the XIDs that NVIDIA's driver reports.

Source: NVIDIA, "Xid Errors", chapter "Analyzing Xid Errors with the Xid Catalog"
(docs.nvidia.com/deploy/xid-errors). The severity follows from the node's reaction
(``agents/node/gpus/health.py``). Fatal: codes after which the catalog requires a reset or a restart (46, 62,
79, 95, 109, 110, 119, 120, 140, 143, 158), the double-bit error (48), and the contained error (94), whose
program is lost and after which a reset is due soon. Quarantine without ending tasks: 64, 74, 136, 156. Codes
that the catalog attributes to programs raise no alert.
"""

from __future__ import annotations

from enum import StrEnum

from agents.node.gpus import OK
from agents.node.gpus.health import APPLICATION_XIDS, MEMORY_FAULT, XID_HEALTH


class XidSeverity(StrEnum):
    FATAL = "fatal"  # the GPU is unusable and its tasks were ended
    QUARANTINE = "quarantine"  # the GPU gets no new work
    WARNING = "warning"  # the GPU keeps working and should be checked
    APPLICATION = "application"  # caused by a program, or informational: no alert


XID_MEANINGS: dict[int, str] = {
    MEMORY_FAULT: "Uncorrected memory errors were counted",
    8: "GPU stopped processing",
    11: "Invalid or corrupted push buffer stream",
    13: "Graphics engine exception, usually caused by an application",
    25: "Invalid or illegal push buffer stream",
    31: "GPU memory page fault, usually caused by an application",
    32: "Invalid or corrupted push buffer stream",
    37: "Driver firmware error",
    38: "Driver firmware error",
    39: "Copy engine exception",
    40: "Copy engine exception",
    41: "Copy engine exception",
    43: "GPU stopped processing for a program that failed",
    44: "Graphics engine fault during context switch",
    45: "Cleanup after a program that ended or failed",
    46: "GPU stopped processing",
    48: "Double-bit ECC error",
    54: "Auxiliary power is not connected to the board",
    60: "Video processor exception",
    62: "Internal micro-controller halted",
    63: "Memory was remapped",
    64: "Memory could not be remapped",
    66: "Illegal access by the driver",
    67: "Illegal access by the driver",
    68: "Video decoder exception",
    69: "Graphics engine class error",
    74: "NVLink error",
    78: "vGPU start error",
    79: "GPU has fallen off the bus",
    80: "Corrupted data was sent to the GPU",
    92: "High rate of single-bit ECC errors",
    93: "InfoROM wear limit reached",
    94: "Contained memory error",
    95: "Uncontained memory error",
    109: "Context switch timed out",
    110: "Security fault",
    119: "GSP did not respond to the driver in time",
    120: "GSP error",
    121: "Corrected errors on the link to the CPU",
    136: "NVLink training failed",
    137: "NVLink privilege error, usually caused by an application",
    140: "Unrecovered ECC error",
    141: "CUDA fast path error",
    143: "GPU initialization error",
    144: "NVLink error (SAW)",
    145: "NVLink error (RLW)",
    146: "NVLink error (TLW)",
    147: "NVLink error (TREX)",
    148: "NVLink error (NVLPW_CTRL)",
    149: "NVLink error (NETIR)",
    150: "NVLink error (MSE)",
    151: "Key rotation error",
    154: "Another action is needed to recover the GPU",
    155: "NVLink went down",
    156: "A damaged part was retired",
    157: "A damaged part could not be retired",
    158: "GPU fatal timeout",
    167: "PCIe fatal timeout",
    169: "Internal micro-controller halted",
    171: "Uncorrectable error in DRAM",
    172: "Uncorrectable error in SRAM",
}


def xid_meaning(xid: int) -> str:
    return XID_MEANINGS.get(xid, "Unknown XID; see NVIDIA's XID catalog")


def xid_severity(xid: int) -> XidSeverity:
    """Return the severity; an unknown code is a warning."""
    fault = XID_HEALTH.get(xid)
    if fault is not None and fault.health != OK:
        return XidSeverity.FATAL if fault.fatal else XidSeverity.QUARANTINE
    return XidSeverity.APPLICATION if xid in APPLICATION_XIDS else XidSeverity.WARNING
