"""Runs a replay by name: the command line of ``python -m scheduler.replay`` and ``python -m bench.replay``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scheduler.replay.input_files import MalformedFileError

MALFORMED = 2


class Replay(NamedTuple):
    """A module with ``add_arguments(parser)`` and ``run(arguments) -> status``, and what it replays."""

    module: str
    summary: str


REPLAYS = {
    "snapshot": Replay("scheduler.replay.snapshot", "one saved cycle: the same plan, or the same error"),
}


def run_replay(program: str, replays: Mapping[str, Replay], words: Sequence[str]) -> int:
    """Run the replay that the first word names with the further ones as its arguments; return the exit status.

    An invalid file ends with status 2 and a message that names the location.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description="Replay recorded work through the scheduler core.",
        epilog="\n".join(f"  {name:13}{replay.summary}" for name, replay in replays.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("replay", choices=list(replays), help="what to replay")
    name = parser.parse_args(words[:1]).replay
    module = importlib.import_module(replays[name].module)
    own = argparse.ArgumentParser(prog=f"{program} {name}", description=module.__doc__)
    module.add_arguments(own)
    arguments = own.parse_args(words[1:])
    try:
        return int(module.run(arguments))
    except MalformedFileError as error:
        sys.stderr.write(f"{error}\n")
        return MALFORMED
