"""The part of the module ``pynvml`` that the program for nodes uses: what it names, and what that needs in turn.

The module is 330 KiB of source, and a node's Python compiles it in each session: that alone held 13 MB. What is kept
is kept letter for letter.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

_NVML_CALLERS_DIR = Path(__file__).parent / "node" / "gpus"
_ERROR_PREFIX = "NVML_ERROR_"
"""The module makes a class of each name that begins so, by looking for them when it is imported."""


@functools.cache
def extract_subset(module: str) -> str:
    """The statements of a module's source that are needed, in their order; its imports always. Takes 0.2 s."""
    tree, lines = ast.parse(module), module.splitlines()
    needed = _needed_statements(tree.body, used_names())
    pieces = ["\n".join(lines[_first_line(each) - 1 : each.end_lineno]) for each in needed]
    return "\n".join(pieces) + "\n"


def used_names() -> set[str]:
    """What the code for nodes asks of the module: attributes of what it calls ``nvml`` or ``_nvml``."""
    found = set()
    for path in sorted(_NVML_CALLERS_DIR.glob("*.py")):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load):
                whose = each.value
                name = getattr(whose, "attr", None) or getattr(whose, "id", None)
                if name in ("nvml", "_nvml", "pynvml"):
                    found.add(each.attr)
    return found


def _needed_statements(body: list[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Statements that give a wanted name, then those that they need, until nothing is added."""
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
    """The names that a statement of a module binds or changes; none of one that is done for what it does."""
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
