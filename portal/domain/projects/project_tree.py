"""Paths in the project tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TreeNode = TypeVar("TreeNode")


def path_to_root(start: TreeNode | None, parent_of: Callable[[TreeNode], TreeNode | None]) -> list[TreeNode]:
    """Return ``start`` and its ancestors, nearest first. ``parent_of`` returns None for a root.

    A cyclic parent, possible only by manual SQL, ends the path: the scheduler rejects such a tree with an
    alert, and the pages needed to repair it must still work.
    """
    line: list[TreeNode] = []
    while start is not None and start not in line:
        line.append(start)
        start = parent_of(start)
    return line
