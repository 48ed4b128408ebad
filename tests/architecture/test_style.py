"""The parts of our style that a machine can see: captions, names, swallowed errors, the size of a chapter."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OURS = [
    path
    for house in ("scheduler", "portal", "agents", "client")
    for path in sorted((ROOT / house).rglob("*.py"))
]
MODULES = [path for path in OURS if "migrations" not in path.parts]
VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "manager", "managers", "misc"}
NAMED_BY_DJANGO = {"portal/database/base.py"}
LONGEST_CHAPTER_LINES = 700


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_begins_with_its_caption(path: Path) -> None:
    tree = ast.parse(path.read_text())
    caption = ast.get_docstring(tree)
    if path.name == "__init__.py" and not tree.body:
        return
    assert caption, "the first line is one sentence that would serve as its caption on the map"
    assert caption.split("\n\n")[0].rstrip().endswith((".", "!", "?", "``", "`")), "a caption is a sentence"


def test_nothing_has_a_vague_name() -> None:
    vague = {name_of(path) for path in OURS if {path.stem, path.parent.name} & VAGUE}
    assert vague - NAMED_BY_DJANGO == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_error_is_swallowed_whole(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            )
            silent = all(isinstance(line, ast.Pass) for line in node.body)
            assert not (broad and silent), f"line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_file_is_a_chapter(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_CHAPTER_LINES
