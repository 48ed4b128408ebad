"""The parts of our style that a machine can see: captions, names, swallowed errors, the size of a chapter."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OURS = [
    path
    for house in ("scheduler", "portal", "agents", "client")
    for path in sorted((ROOT / house).rglob("*.py"))
]
MODULES = {str(path.relative_to(ROOT)): path.read_text() for path in OURS if "migrations" not in path.parts}
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "manager", "managers", "misc"}
NAMED_BY_DJANGO = {"portal/database/base.py"}


def test_modules_start_with_a_docstring() -> None:
    """The first line is one message that would serve as its caption on the map."""
    assert MODULES
    without = []
    for name, text in MODULES.items():
        tree = ast.parse(text)
        first = (ast.get_docstring(tree) or "").split("\n\n")[0].rstrip()
        empty = name.endswith("__init__.py") and not tree.body
        if not empty and not first.endswith((".", "!", "?", "``", "`")):
            without.append(name)
    assert without == []


def test_no_module_has_a_vague_name() -> None:
    vague = {str(path.relative_to(ROOT)) for path in OURS if {path.stem, path.parent.name} & VAGUE}
    assert vague - NAMED_BY_DJANGO == set()


def test_no_error_is_swallowed_whole() -> None:
    swallowed = [
        f"{name}:{node.lineno}"
        for name, text in MODULES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler) and _is_broad(node) and _is_silent(node)
    ]
    assert swallowed == []


def _is_broad(handler: ast.ExceptHandler) -> bool:
    named = isinstance(handler.type, ast.Name) and handler.type.id in {"Exception", "BaseException"}
    return handler.type is None or named


def _is_silent(handler: ast.ExceptHandler) -> bool:
    return all(isinstance(line, ast.Pass) for line in handler.body)


def test_test_files_named_in_the_documentation_exist() -> None:
    """Documents name test files with the path below ``tests``, in italics or with ``tests/`` before it."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(r"(?<![\w/])(?:tests/)?((?:[a-z_]+/)+test_[a-z_]+\.py)", page.read_text())
    }
    assert len(named) > 50
    assert {(page, path) for page, path in named if not (ROOT / "tests" / path).exists()} == set()


def test_comments_of_templates_end_on_their_line() -> None:
    """Django shows longer ones on the page."""
    open_comments = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "templates").rglob("*.html"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.count("{#") != line.count("#}")
    ]
    assert open_comments == []
