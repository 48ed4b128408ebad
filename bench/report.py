"""The output line of each figure: ours, the reference, the target, and the machine."""

from __future__ import annotations

import json
import os
from typing import Any

from bench.calibration import calibration_ms

COLUMNS = ("ours", "reference", "ratio", "unit", "target", "met")


def print_figure(name: str, **values: Any) -> None:
    """Print a row of docs/benchmarks.md; ``skipped=`` is the reason for a missing figure."""
    if "skipped" in values:
        line: dict[str, Any] = {"row": name, **values}
    else:
        line = {"row": name, **{column: values.pop(column, None) for column in COLUMNS}, **values}
    line["calibration_s"] = round(calibration_ms() / 1000, 3)
    line.setdefault("load_average", round(os.getloadavg()[0], 1))
    print(json.dumps(line), flush=True)


def percentile(values: list[float], fraction: float) -> float:
    """Return the value below or at which this fraction lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(fraction * len(ordered)) - 1))]
