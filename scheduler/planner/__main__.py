"""``python -m scheduler.planner plan``: print the best pipeline plan of a layer profile as JSON.

An invalid profile or argument ends with status 2, an impossible plan with status 1, each with a message.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from scheduler.planner.comparison import compare_plans, merged_text
from scheduler.planner.partition import BandwidthLevel, CostModel, PlanError
from scheduler.planner.profile import ProfileError, parse_profile

PROGRAM = "python -m scheduler.planner"
MAX_PROFILE_BYTES = 16_000_000
MAX_DIGITS = 9
IMPOSSIBLE, INVALID = 1, 2


def main(words: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(words)
    command: argparse.ArgumentParser = arguments.parser
    levels = arguments.levels
    if levels is None:
        if arguments.gpus is None or arguments.bandwidth is None:
            command.error("--gpus and --bandwidth are required, unless --levels describes the topology")
        levels = [BandwidthLevel(arguments.gpus, arguments.bandwidth)]
    elif arguments.gpus not in (None, total := math.prod(level.machines for level in levels)):
        command.error(f"--gpus is {arguments.gpus}, but --levels has {total} GPUs")
    try:
        profile = parse_profile(_read_text(arguments.profile))
    except (OSError, UnicodeDecodeError, ProfileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        command.error(f"{arguments.profile}: {reason}")
    try:
        plan = compare_plans(profile, levels, arguments.cost, arguments.memory_bytes)
    except PlanError as error:
        sys.stderr.write(f"{command.prog}: {error}\n")
        return IMPOSSIBLE
    if plan["merged"]:
        sys.stderr.write(f"{command.prog}: {merged_text(plan['merged'])}\n")
    sys.stdout.write(json.dumps(plan, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Plan pipeline-parallel training from a layer profile."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="divide a model into replicated stages",
        description="Divide a model into replicated pipeline stages and print the plan as JSON, "
        "with alternatives: a straight pipeline, data parallelism, and both with equal replicas.",
        epilog="Example, two nodes with 8 GPUs each: "
        f"{PROGRAM} plan --profile vgg16.json --levels 8x30e9,2x3.125e9",
    )
    plan.set_defaults(parser=plan)
    plan.add_argument(
        "--profile", required=True, metavar="FILE", help="layer profile (JSON or graph.txt); - reads stdin"
    )
    plan.add_argument("--gpus", type=_whole_number, metavar="N", help="number of GPUs")
    plan.add_argument(
        "--bandwidth", type=_positive, metavar="BYTES_PER_S", help="bandwidth between two GPUs, bytes/s"
    )
    plan.add_argument(
        "--levels",
        type=_levels,
        metavar="N1xB1,N2xB2",
        help="topology from the innermost level: N1 GPUs per node at B1 bytes/s, N2 nodes at B2; takes the "
        "place of --gpus and --bandwidth",
    )
    plan.add_argument(
        "--cost",
        type=_cost_model,
        default=CostModel.PAPER,
        metavar="{paper,original}",
        help="cost model: the formula of the PipeDream paper (default), or that of its published optimizer",
    )
    plan.add_argument(
        "--memory-bytes", type=_positive, metavar="M", help="memory of one GPU; default: no limit"
    )
    return parser


def _read_text(name: str) -> str:
    if name == "-":
        return sys.stdin.read(MAX_PROFILE_BYTES)
    path = Path(name)
    if path.stat().st_size > MAX_PROFILE_BYTES:
        raise ProfileError(f"The profile is larger than {MAX_PROFILE_BYTES} bytes.")
    return path.read_text(encoding="utf-8")


def _cost_model(text: str) -> CostModel:
    try:
        return CostModel(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not paper or original") from None


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not text.lstrip("0"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 1")
    if len(text) > MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"a number of {len(text)} digits is too large")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _levels(text: str) -> list[BandwidthLevel]:
    levels = []
    for part in text.split(","):
        machines, separator, bandwidth = part.partition("x")
        if not separator:
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form NxB, such as 8x30e9")
        levels.append(BandwidthLevel(_whole_number(machines), _positive(bandwidth)))
    return levels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
