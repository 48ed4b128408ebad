"""``python -m scheduler.replay WHAT ...``: replay recorded work; the last line of stdout is the result.

An installation replays saved cycles (``snapshot``). The other replays are benchmarks; the source code has them
in ``bench``, which an installation may lack.
"""

from __future__ import annotations

import importlib
import sys

from scheduler.replay.command import REPLAYS, run_replay

PROGRAM = "python -m scheduler.replay"
BENCHMARKS = "bench.replay.__main__"
NOT_INSTALLED = 2


def main(words: list[str]) -> int:
    """Run the named replay with its arguments; return the exit status."""
    if words[:1] and words[0] in REPLAYS:
        return run_replay(PROGRAM, REPLAYS, words)
    try:
        benchmarks = importlib.import_module(BENCHMARKS)
    except ModuleNotFoundError as error:
        if not BENCHMARKS.startswith(error.name or ""):
            raise  # a package that a benchmark needs
    else:
        return int(benchmarks.main(words, PROGRAM))
    if words[:1] and not words[0].startswith("-"):
        sys.stderr.write(
            f"{words[0]} is not among the replays of this installation ({', '.join(REPLAYS)}). Others are "
            "benchmarks: run them in a checkout of the source code, which has the folder bench.\n"
        )
        return NOT_INSTALLED
    return run_replay(PROGRAM, REPLAYS, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
