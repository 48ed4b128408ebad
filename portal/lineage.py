"""The line from a project up to the top of its tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Step = TypeVar("Step")


def lineage(start: Step | None, above: Callable[[Step], Step | None]) -> list[Step]:
    """A project and its ancestors, nearest first; ``above`` names the parent, None at the top.

    A circle, which only a hand in the database can draw, ends the line where it closes: the scheduler
    refuses such a tree with an alarm, and the pages on which an admin mends it must open meanwhile.
    """
    line: list[Step] = []
    while start is not None and start not in line:
        line.append(start)
        start = above(start)
    return line
