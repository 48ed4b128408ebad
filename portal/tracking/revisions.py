"""The revisions of its tables that the installed MLflow knows, read without importing it, which takes seconds."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

SCHEMA = "mlflow"
VERSION_TABLE = f"{SCHEMA}.alembic_version"
_REVISION = re.compile(r"^revision(?:: *\w+)? *= *[\"'](\w+)", re.MULTILINE)
_BEFORE = re.compile(r"^down_revision(?::[^=\n]+)? *= *(.+)$", re.MULTILINE)
_NAME = re.compile(r"[\"'](\w+)[\"']")


@cache
def known_revisions() -> tuple[str, frozenset[str]]:
    """Return the newest revision and all revisions, from the migrations that MLflow's package contains."""
    spec = importlib.util.find_spec("mlflow")
    if spec is None or spec.origin is None:
        raise RuntimeError("MLflow is not installed.")
    known: set[str] = set()
    followed: set[str] = set()
    for path in (Path(spec.origin).parent / "store" / "db_migrations" / "versions").glob("*.py"):
        text = path.read_text()
        known.update(_REVISION.findall(text))
        for names in _BEFORE.findall(text):
            followed.update(_NAME.findall(names))
    newest = known - followed
    if len(newest) != 1:
        raise RuntimeError(
            f"MLflow's package has {len(newest)} newest revisions of its tables instead of one."
        )
    return newest.pop(), frozenset(known)
