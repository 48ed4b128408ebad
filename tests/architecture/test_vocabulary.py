"""Retired words stay out of identifiers, file names, REST and settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from portal.api.schema import openapi_document
from portal.domain.scheduling.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS

ROOT = Path(__file__).parents[2]
PACKAGES = ("agents", "portal", "scheduler", "bench", "deploy")

RETIRED = {
    "album": "row cache",
    "aside": "quarantined",
    "awaited": "dependency",
    "befallen": "incident",
    "befell": "incident",
    "door": "middleware, app or connection",
    "excuse": "exemption",
    "excused": "exempt",
    "excuses": "exemptions",
    "foresee": "forecast",
    "foreseen": "forecast",
    "guests": "tenants",
    "knob": "setting",
    "knobs": "settings",
    "lent": "allowed",
    "lineage": "ancestors",
    "peoples": "users",
    "people": "users",
    "person": "user",
    "photo": "snapshot",
    "photograph": "snapshot",
    "receipt": "breakdown",
    "receipts": "breakdowns",
    "room": "capacity or space",
    "rooms": "capacities",
    "seat": "placement",
    "seats": "placements",
    "sentence": "message",
    "sentences": "messages",
    "stranger": "orphan or outsider",
    "strangers": "orphans or outsiders",
    "tell": "report",
    "telling": "report",
    "tells": "reports",
    "tidy": "clean up, gc",
    "tidying": "clean-up, gc",
    "told": "reported",
    "trouble": "incident",
    "troubles": "incidents",
    "unfit": "ineligible",
    "whom": "user, owner or job",
    "whose": "owner",
    "wish": "request",
    "wishes": "requests",
}
"""Each retired word with the standard one."""


def words_of(name: str) -> list[str]:
    """The lower-case words of a name in snake_case, camelCase or kebab-case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def retired_in(name: str) -> list[str]:
    return [f"{name}: {word} -> {RETIRED[word]}" for word in words_of(name) if word in RETIRED]


def identifiers(path: Path) -> Iterator[str]:
    """The names that a module defines: classes, functions, parameters, variables and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_identifiers_have_no_retired_word(path: Path) -> None:
    assert sorted({fault for name in identifiers(path) for fault in retired_in(name)}) == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_handlers_call_their_exception_error(path: Path) -> None:
    """Inside another handler it has another name, since Python deletes the name of a handler at its end."""
    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    inner = {id(node) for outer in handlers if outer.name for each in outer.body for node in ast.walk(each)}
    other = {node.name for node in handlers if node.name and id(node) not in inner}
    assert other <= {"error"}


def test_file_names_have_no_retired_word() -> None:
    folders = (*PACKAGES, "templates", "static/src", "docs", "tests")
    names = {
        part
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        for part in path.relative_to(ROOT).with_suffix("").parts
        if not part.startswith("test_")
    }
    assert sorted(fault for name in names for fault in retired_in(name)) == []


def test_rest_has_no_retired_word() -> None:
    described = openapi_document()
    schemas = described["components"]["schemas"]
    names = {
        *described["paths"],
        *schemas,
        *(name for each in schemas.values() for name in each.get("properties", {})),
    }
    assert sorted(fault for name in names for fault in retired_in(name)) == []


def test_settings_have_no_retired_word() -> None:
    options = {option for choice in CHOICE_SETTINGS.values() for option in choice.options}
    assert (
        sorted(fault for name in {*NUMBER_SETTINGS, *CHOICE_SETTINGS, *options} for fault in retired_in(name))
        == []
    )
