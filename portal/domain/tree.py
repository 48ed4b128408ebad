"""The line from a project up to the top of its tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TreeNode = TypeVar("TreeNode")


def path_to_root(start: TreeNode | None, parent_of: Callable[[TreeNode], TreeNode | None]) -> list[TreeNode]:
    """A project and its ancestors, nearest first; ``above`` names the parent, None at the top.

    A circle, which only a hand in the database can draw, ends the line where it closes: the scheduler
    refuses such a tree with an alarm, and the pages on which an admin mends it must open meanwhile.
    """
    line: list[TreeNode] = []
    while start is not None and start not in line:
        line.append(start)
        start = parent_of(start)
    return line
