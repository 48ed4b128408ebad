"""Interval and phases of scheduling cycles, and the buckets of their duration histograms."""

from __future__ import annotations

CYCLE_EVERY_S = 5.0
"""A cycle runs at least this often."""
CYCLE_PHASES = ("snapshot", "decide", "commit")
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds, seconds; longer phases are counted under ``+Inf``."""
OVERFLOW_BUCKET = "+Inf"


def bucket_label(seconds: float) -> str:
    """Return the upper bound of the first bucket that contains ``seconds``, as text."""
    return next((str(end) for end in BUCKETS_S if seconds <= end), OVERFLOW_BUCKET)
