"""The table of verbs: each has a handler, which reads the fields that the table names, and a line in the document."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import PollResult
from agents.link import AgentError
from agents.node.server import ALLOWED_ROLES, AgentSession
from agents.node.settings import read_settings
from agents.verbs import VERBS, Verb, announced
from tests.agents.node.conftest import CLUSTER, LoneNode
from tests.upgrade import recording

PROTOCOL = (Path(__file__).parents[3] / "docs/agent-protocol.md").read_text()
RELEASES = sorted(path.name for path in recording.RECORDED.iterdir())


@pytest.fixture
def session(node: LoneNode) -> AgentSession:
    """A session of an agent in this process, before its first line."""
    return AgentSession(read_settings(str(node.settings_path)), "control", io.BytesIO(), io.BytesIO(), [])


def keys_read(function: Callable[..., Any], position: int, known: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of its argument at ``position`` that a function, and those that it passes it on to, read.

    ``known``: values of its other arguments.
    """
    if isinstance(function, functools.partial):
        names = list(inspect.signature(function.func).parameters)
        known = dict(zip(names, function.args, strict=False))
        yield from keys_read(function.func, position + len(function.args), known)
        return
    name = list(inspect.signature(function).parameters)[position]
    if name == "_":
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    owner = getattr(function, "__self__", None)
    scope = {**vars(inspect.getmodule(function)), **known, "self": owner}

    def is_fields(each: ast.expr) -> bool:
        """Return True for the argument itself, and for a dict with defaults into which it is copied."""
        if isinstance(each, ast.Dict):
            return any(
                key is None and is_fields(value) for key, value in zip(each.keys, each.values, strict=True)
            )
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "dict":
            return any(keyword.arg is None and is_fields(keyword.value) for keyword in each.keywords)
        return isinstance(each, ast.Name) and each.id == name

    def value_of(each: ast.expr) -> Any:
        if isinstance(each, ast.Name):
            return scope.get(each.id)
        return getattr(value_of(each.value), each.attr, None) if isinstance(each, ast.Attribute) else None

    for each in ast.walk(tree):
        match each:
            case ast.Subscript(value=ast.Name(id=owner_name), slice=ast.Constant(value=str(key))):
                if owner_name == name:
                    yield key
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[ast.Name(id=owner_name)]):
                if owner_name == name:
                    yield key
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner_name), attr="get"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                if owner_name == name:
                    yield key
            case ast.Call(func=called, args=arguments) if any(map(is_fields, arguments)):
                if isinstance(called, ast.Name) and called.id.lstrip("_").startswith("parse_"):
                    yield from (one.value for one in arguments if isinstance(one, ast.Constant))
                next_function = value_of(called)
                if inspect.isfunction(next_function) or inspect.ismethod(next_function):
                    where = next(number for number, one in enumerate(arguments) if is_fields(one))
                    yield from keys_read(next_function, where, {})


def test_each_verb_has_a_handler(session: AgentSession) -> None:
    assert set(session.handlers) == set(VERBS)
    assert {role for row in VERBS.values() for role in row.roles} == set(ALLOWED_ROLES)
    assert all(row.name == name and row.timeout_s >= 1 for name, row in VERBS.items())


def test_handlers_read_the_fields_of_the_table(session: AgentSession) -> None:
    read = {name: set(keys_read(handler, 0, {})) for name, handler in session.handlers.items()}
    assert read == {name: set(row.fields) for name, row in VERBS.items()}


def test_the_hello_announces_each_capability_once(session: AgentSession) -> None:
    capabilities = session.hello()["capabilities"]
    assert len(capabilities) == len(set(capabilities))
    assert set(announced()) <= set(capabilities)


@pytest.mark.parametrize(
    "row", [row for row in VERBS.values() if row.name != "hello"], ids=lambda row: row.name
)
def test_the_document_has_its_line(row: Verb) -> None:
    (line,) = re.findall(rf"^\| {row.name} \|.*$", PROTOCOL, re.MULTILINE)
    missing = [name for name in row.fields if not re.search(rf"\b{name}\b", line)]
    assert not missing
    for capability in (row.capability, *row.extensions):
        assert not capability or f"`{capability}`" in PROTOCOL, capability


@pytest.mark.parametrize("role", ALLOWED_ROLES)
def test_the_document_names_the_verbs_of_each_role(role: str) -> None:
    (said,) = re.findall(rf"^\| {role} \| (.*) \|$", PROTOCOL, re.MULTILINE)
    names = {name for name, row in VERBS.items() if role in row.roles}
    assert names == (set(VERBS) if said == "all" else set(said.split()))


@pytest.mark.parametrize("release", [None, *RELEASES])
def test_an_agent_has_the_verbs_that_it_announces_and_those_of_every_agent(
    node: LoneNode, release: str | None
) -> None:
    program = node.pyz
    if release is not None:
        program = node.folder / "released.pyz"
        program.write_bytes(recording.agent_program(release))
    with contextlib.closing(NodeEngine.local(program, node.settings_path, cluster=CLUSTER)) as engine:
        for row in VERBS.values():
            try:
                engine.command(row)
                has = True
            except AgentError as error:
                has = error.code != "unknown_verb"
            assert has == engine.supports(row), row.name
        assert engine.request(verbs.LIST, PollResult.from_wire).containers == ()
