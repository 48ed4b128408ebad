"""``python -m bench NAME``: run one benchmark; each figure is one JSON line on stdout."""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
from pathlib import Path

SUPPORT_MODULES = {
    "__main__",
    "calibration",
    "report",
    "runner",
    "scratch_database",
    "simulated_nodes",
    "slurm",
}


def names() -> list[str]:
    """Return the benchmarks in this folder."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(
        module.name for module in found if not module.ispkg and module.name not in SUPPORT_MODULES
    )  # packages support several benchmarks


def main(arguments: list[str]) -> int:
    """Run the benchmark named first; further arguments are its own."""
    if not arguments or arguments[0] not in names():
        print(
            f"usage: python -m bench NAME [arguments]; NAME is one of: {', '.join(names())}", file=sys.stderr
        )
        return 2
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that started processes are terminated on exit
    result = importlib.import_module(f"bench.{arguments[0]}").main(arguments[1:])
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
