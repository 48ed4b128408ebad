"""What the folders may import, read from the sources themselves; the layers stand as contracts in pyproject.toml."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent.parent
BEFORE_DJANGO = [
    "portal/bootstrap",
    "portal/config/data_paths.py",
    "portal/standalone/processes/exec_child.py",
    "manage.py",
]


def modules(*places: str) -> list[Path]:
    found = [
        path
        for place in places
        for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    assert found, places
    return sorted(found)


def imported(path: Path, *, at_the_top: bool = False) -> Iterator[str]:
    """The modules a file imports, by their full names; `at_the_top` leaves out those inside functions."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def is_standard(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("path", modules("agents/node", "agents/verbs.py"), ids=lambda path: path.stem)
def test_a_nodes_program_needs_only_the_standard_library_and_nvml(path: Path) -> None:
    strangers = {
        name
        for name in imported(path)
        if not is_standard(name) and not name.startswith((".", "agents.node", "agents.verbs"))
    }
    allowed = {"pynvml"} if path.name == "nvml.py" else set()
    assert strangers <= allowed


@pytest.mark.parametrize("path", modules("agents/node", "agents/verbs.py"), ids=lambda path: path.stem)
def test_a_nodes_program_is_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


def test_code_before_django_imports_only_the_standard_library() -> None:
    for path in modules(*BEFORE_DJANGO):
        top = {name for name in imported(path, at_the_top=True) if not is_standard(name)}
        assert all(name.startswith(("portal.bootstrap", "portal.config.data_paths")) for name in top), (
            path,
            top,
        )


REPLAYED = (
    "scheduler.core",
    "scheduler.replay",
    "scheduler.incremental",
    "portal.domain",
    "bench.replay",
    "bench.conformance",
)


@pytest.mark.parametrize("path", modules("bench/replay", "bench/conformance"), ids=lambda path: path.stem)
def test_replays_of_published_work_import_the_core_alone(path: Path) -> None:
    """Their figures are of the decision, without a database or a clock."""
    others = {name for name in imported(path) if not is_standard(name) and not name.startswith(REPLAYED)}
    assert others <= {"numpy"}


def test_every_layer_boundary_has_a_contract() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert len(linter["contracts"]) >= 8
    assert set(linter["root_packages"]) == {"scheduler", "portal", "agents", "client"}


def test_the_core_is_shallow() -> None:
    graph = grimp.build_graph("scheduler", cache_dir=None)
    core = {
        name
        for name in graph.modules
        if name.startswith("scheduler.core.") and not (ROOT / name.replace(".", "/")).is_dir()
    }

    @cache
    def level(module: str) -> int:
        below = graph.find_modules_directly_imported_by(module) & core
        return 1 + max(map(level, below), default=0)

    assert len(core) <= 46
    assert max(map(level, core)) <= 9


def test_benchmarks_start_machines_and_a_portal_before_there_are_settings() -> None:
    """They set Django up for the database of the portal that they have started."""
    names = {name for path in modules("bench") for name in imported(path)}
    started = sorted(
        {".".join(name.split(".")[:3]) for name in names if name.startswith(("tests.rig.", "tests.stories."))}
    )
    assert "tests.stories.portal" in started
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    words = [sys.executable, "-c", f"import {', '.join(started)}"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
