"""``python -m bench.replay WHAT ...``: replay recorded work; the last line of stdout is the result.

``python -m scheduler.replay`` is the same command. Files may be gzip.
"""

from __future__ import annotations

import sys

from scheduler.replay.command import REPLAYS as INSTALLED_REPLAYS
from scheduler.replay.command import Replay, run_replay

REPLAYS = {
    "conformance": Replay(
        "bench.conformance", "conformance cases of other schedulers: with which of them decisions agree"
    ),
    "openb": Replay(
        "bench.replay.openb", "pods of Alibaba's GPU trace placed one by one until the cluster is full"
    ),
    "jobs": Replay("bench.replay.jobs", "jobs with durations on a simulated clock"),
    "kueue": Replay("bench.replay.kueue", "Kueue's scenario of 15,000 workloads"),
    **INSTALLED_REPLAYS,
}


def main(words: list[str], program: str = "python -m bench.replay") -> int:
    """Run the named replay with its arguments; return the exit status."""
    return run_replay(program, REPLAYS, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
