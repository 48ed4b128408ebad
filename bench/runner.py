"""Runs benchmarks one after the other, each in a process with a time limit."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

from bench.report import print_figure

STOP_WITHIN_S = 6


def run_suite(
    group: str, known: dict[str, tuple[list[str], float]], arguments: list[str], *, limit_s: float
) -> int:
    """Run the named parts, or all, and print their durations; return 1 when a part did not finish."""
    parser = argparse.ArgumentParser(prog=f"bench {group}")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(known)}; default: all")
    parts = parser.parse_args(arguments).parts or list(known)
    if unknown := set(parts) - set(known):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    began = time.monotonic()
    failed = [part for part in parts if not _run(part, *known[part])]
    print_figure(
        group,
        ours=round(time.monotonic() - began),
        unit="s",
        target=f"all parts completed, at most {limit_s:.0f} s",
        met=not failed and time.monotonic() - began <= limit_s,
        parts=parts,
        failed=failed,
    )
    return 1 if failed else 0


def _run(part: str, words: list[str], limit_s: float) -> bool:
    """Run one part in its own session, so that nothing it started outlives it; report a failure."""
    process = subprocess.Popen([sys.executable, "-m", "bench", *words], start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print_figure(part, skipped=f"not finished within {limit_s:.0f} s; see its output above")
        return False
    finally:
        _end(process)
    if code != 0:
        print_figure(part, skipped=f"it failed with exit code {code}; see its output and messages above")
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process, which stops what it started, then kill the rest of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
