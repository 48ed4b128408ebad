"""The rows of the spine: submit to RUNNING, gateway, fan-out, pages and lists, one after the other.

    DATABASE_URL=... REDIS_URL=... python -m bench spine [PART ...]

Each part is a process of its own with a limit on its time; a part that fails or cannot run says so in its line
and the others go on. All together take less than eight minutes.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys

from bench.line import say

PARTS: dict[str, tuple[list[str], float]] = {
    "start": (["start", "--jobs", "30", "--within", "160"], 190),
    "gateway": (["gateway", "--seconds", "1", "--rounds", "2"], 100),
    "fanout": (["fanout", "--seconds", "10"], 45),
    "pages": (["pages", "--lists", "--rounds", "20"], 140),
}
"""What to run and within how many seconds. ``pages`` measures the lists on the same record."""
STOP_WITHIN_S = 20


def main(arguments: list[str]) -> int:
    """Runs the parts named, or all; 1 when a part did not finish."""
    parser = argparse.ArgumentParser(prog="bench spine")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all when none is named")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    failed = [part for part in parts if not _run(part)]
    return 1 if failed else 0


def _run(part: str) -> bool:
    words, limit_s = PARTS[part]
    process = subprocess.Popen([sys.executable, "-m", "bench", *words])
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # what it has started is ended on the way out
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        say(part, skipped=f"not ended within {limit_s:.0f} s")
        return False
    if code != 0:
        say(part, skipped=f"it failed with exit code {code}; see its messages")
    return code == 0
