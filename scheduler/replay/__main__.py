"""``python -m scheduler.replay WHAT ...``: replay recorded work; the last line of stdout is the result.

Each kind of replay is a module of this package with ``add_arguments(parser)`` and ``run(arguments) ->
status``. Files may be gzip. An invalid file ends with status 2 and a message that names the location.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

from scheduler.replay.input_files import MalformedFileError

REPLAYS = {
    "conformance": "conformance cases of other schedulers: with which of them decisions agree",
    "openb": "pods of Alibaba's GPU trace placed one by one until the cluster is full",
    "jobs": "jobs with durations on a simulated clock",
    "kueue": "Kueue's scenario of 15,000 workloads",
    "snapshot": "one saved cycle: the same plan, or the same error",
}
MALFORMED = 2


def main(words: list[str]) -> int:
    """Run the named replay with its arguments; return the exit status."""
    here = [name for name in REPLAYS if importlib.util.find_spec(f"scheduler.replay.{name}")]
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.replay",
        description="Replay recorded work through the scheduler core.",
        epilog="\n".join(f"  {name:13}{REPLAYS[name]}" for name in here),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("replay", choices=here, help="what to replay")
    name = parser.parse_args(words[:1]).replay
    replay = importlib.import_module(f"scheduler.replay.{name}")
    own = argparse.ArgumentParser(prog=f"python -m scheduler.replay {name}", description=replay.__doc__)
    replay.add_arguments(own)
    arguments = own.parse_args(words[1:])
    try:
        return int(replay.run(arguments))
    except MalformedFileError as error:
        sys.stderr.write(f"{error}\n")
        return MALFORMED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
