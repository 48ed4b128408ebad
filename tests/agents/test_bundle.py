"""The program for nodes: the same bytes each time, and nothing in it that Python 3.8 cannot read."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from agents.bundle import build

NODE = Path(__file__).parents[2] / "agents/node"


def test_equal_source_gives_equal_bytes(tmp_path: Path) -> None:
    assert build(tmp_path / "a.pyz") == build(tmp_path / "b.pyz")
    assert (tmp_path / "a.pyz").read_bytes() == (tmp_path / "b.pyz").read_bytes()


def test_node_code_reads_as_python_3_8_and_imports_only_the_standard_library() -> None:
    allowed = set(sys.stdlib_module_names) | {"agents", "pynvml"}
    for path in NODE.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        for each in ast.walk(tree):
            names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else []
            names += [each.module or ""] if isinstance(each, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("agents.") or name.startswith("agents.node"), (
                    f"{path.name}: {name}"
                )
