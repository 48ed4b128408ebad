"""Parameters of a notebook, and the command that runs it with papermill. Pure: nothing is executed."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from portal.domain.jobs.parameters import MAX_PARAMETERS
from portal.domain.jobs.template_parameters import ParameterType, read_template_parameters

_TYPES = {
    bool: ParameterType.BOOLEAN, int: ParameterType.INTEGER, float: ParameterType.NUMBER, str: ParameterType.TEXT
}  # fmt: skip
PAPERMILL_MISSING = "papermill is not installed in this environment"
_PROGRAM = """# Runs a notebook of the home with papermill, and saves the result beside it.
import os
import sys
from pathlib import Path

NOTEBOOK = {path}

try:
    from papermill.__main__ import papermill
except ImportError:
    sys.exit("{missing}")
source = Path.home() / NOTEBOOK
result = source.with_name(f"{{source.stem}}-{{os.environ['FAIRWAY_JOB']}}.ipynb")
options = ["--log-output", "--no-progress-bar", "--cwd", str(source.parent)]
papermill([*options, str(source), str(result), *sys.argv[1:]])
"""
_PATH = re.compile(r'^NOTEBOOK = (".*")$', re.MULTILINE)


def read_notebook_parameters(source: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the parameters of a template from the cell of parameters, and the names that stay as they are.

    Assignments of a number, a text or a truth value are parameters; ``label`` is the name in the notebook.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], []
    found: dict[str, dict[str, Any]] = {}
    fixed: dict[str, None] = {}
    for statement in body:
        for label, value in _assignments(statement):
            row = _parameter(label, value, {each["name"] for each in found.values()} - {label})
            found.pop(label, None)
            fixed.pop(label, None)
            if row is not None and len(found) < MAX_PARAMETERS:
                found[label] = row
            else:
                fixed[label] = None
    return list(found.values()), list(fixed)


def _assignments(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    else:
        return []
    return [(each.id, value) for each in targets if isinstance(each, ast.Name)]


def _parameter(label: str, value: ast.expr, taken: set[str]) -> dict[str, Any] | None:
    """Return the parameter, or None for a value that a form cannot hold."""
    try:
        default = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if type(default) not in _TYPES:
        return None
    name = base = re.sub(
        r"[^a-z0-9]+", "_", f"p_{label}".lower() if label[0] == "_" else label.lower()
    ).strip("_")[:36]
    number = 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    row = {"name": name, "type": _TYPES[type(default)].value, "default": default, "label": label}
    try:
        read_template_parameters([row])
    except ValueError:
        return None
    return row


def notebook_program(path: str) -> str:
    """Return the program of a job that runs a notebook of the home."""
    return _PROGRAM.format(path=json.dumps(path), missing=PAPERMILL_MISSING)


def notebook_command(parameters: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the command of a template that gives the program the parameters of the notebook."""
    words = ["python", "{fairway:secrets}/program"]
    for each in parameters:
        if each["type"] == ParameterType.BOOLEAN:
            words += ["-y", f"{each['label']}: {{{each['name']}}}"]
        else:
            words += [
                "-r" if each["type"] == ParameterType.TEXT else "-p",
                each["label"],
                f"{{{each['name']}}}",
            ]
    return words


def executed_notebook(program: str, job: str) -> tuple[str, str] | None:
    """Return the paths of notebook and result, in the home, of a job with such a program; None for others."""
    found = _PATH.search(program) if program.startswith(_PROGRAM.partition("\n")[0]) else None
    try:
        path = str(json.loads(found[1])) if found else ""
    except ValueError:
        return None
    return (path, f"{path.removesuffix('.ipynb')}-{job}.ipynb") if path else None


def notebook_title(path: str) -> str:
    return PurePosixPath(path).stem
