"""Extracts the part of the module ``pynvml`` that the agent uses, with its dependencies.

The module is 330 KiB of source, and a node compiles it in each session, which took 13 MB of memory. Kept
statements are unchanged.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

_NVML_CALLERS_DIR = Path(__file__).parent / "node" / "gpus"
_ERROR_PREFIX = "NVML_ERROR_"
"""The module creates a class for each constant with this prefix when it is imported."""


@functools.cache
def extract_subset(module: str) -> str:
    """Return the needed statements of a module's source in order, always with its imports. Takes 0.2 s."""
    tree, lines = ast.parse(module), module.splitlines()
    needed = _needed_statements(tree.body, used_names())
    pieces = ["\n".join(lines[_first_line(each) - 1 : each.end_lineno]) for each in needed]
    return "\n".join(pieces) + "\n"


def used_names() -> set[str]:
    """Return the attributes that the agent's code uses of ``nvml``, ``_nvml`` or ``pynvml``."""
    found = set()
    for path in sorted(_NVML_CALLERS_DIR.glob("*.py")):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load):
                owner = each.value
                name = getattr(owner, "attr", None) or getattr(owner, "id", None)
                if name in ("nvml", "_nvml", "pynvml"):
                    found.add(each.attr)
    return found


def _needed_statements(body: list[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Return the statements that bind a wanted name, and transitively those they need."""
    gives = {each: _bound_names(each) for each in body}
    kept = [each for each in body if not gives[each] and not _is_docstring(each)]
    names = wanted | _referenced_names(kept)
    while True:
        more = [
            each
            for each in body
            if each not in kept
            and any(name in names or name.startswith(_ERROR_PREFIX) for name in gives[each])
        ]
        if not more:
            return [each for each in body if each in kept]
        kept += more
        names |= _referenced_names(more)


def _bound_names(statement: ast.stmt) -> list[str]:
    """Return the names that a module-level statement binds; empty for one with only side effects."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [
            each.id for target in statement.targets for each in ast.walk(target) if isinstance(each, ast.Name)
        ]
    return []


def _referenced_names(statements: Iterable[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for statement in statements:
        for each in ast.walk(statement):
            if isinstance(each, ast.Name):
                found.add(each.id)
            elif isinstance(each, ast.Global):
                found.update(each.names)
    return found


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _first_line(statement: ast.stmt) -> int:
    above: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in above)])
