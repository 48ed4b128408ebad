"""The rows of the spine: submit to RUNNING, gateway, fan-out, web, pages and lists, one after the other.

    DATABASE_URL=... REDIS_URL=... python -m bench spine [PART ...]

Each part is a process of its own with a limit on its time; a part that fails or cannot run says so in its line
and the others go on. All together take less than eight minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

from bench.line import say

PARTS: dict[str, tuple[list[str], float]] = {
    "start": (["start", "--jobs", "30", "--within", "155"], 165),
    "gateway": (["gateway", "--seconds", "1", "--rounds", "2"], 95),
    "fanout": (["fanout", "--seconds", "20"], 60),
    "web": (["web"], 45),
    "pages": (["pages", "--lists", "--rounds", "20"], 115),
}
"""What to run and within how many seconds. ``pages`` measures the lists on the same record."""
STOP_WITHIN_S = 6


def main(arguments: list[str]) -> int:
    """Runs the parts named, or all; 1 when a part did not finish."""
    parser = argparse.ArgumentParser(prog="bench spine")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all when none is named")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    began = time.monotonic()
    failed = [part for part in parts if not _run(part)]
    say(
        "spine",
        ours=round(time.monotonic() - began),
        unit="s",
        target="every part to its end, at most 480 s",
        met=not failed and time.monotonic() - began <= 480,
        parts=parts,
        failed=failed,
    )
    return 1 if failed else 0


def _run(part: str) -> bool:
    """Runs one part in a session of its own, so that nothing it began outlives it; says so where it fails."""
    words, limit_s = PARTS[part]
    process = subprocess.Popen([sys.executable, "-m", "bench", *words], start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        say(part, skipped=f"not ended within {limit_s:.0f} s; its lines above stand")
        return False
    finally:
        _end(process)
    if code != 0:
        say(part, skipped=f"it failed with exit code {code}; its lines above stand, its messages say why")
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks it to end (what it has started is ended on the way out), then ends what is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
