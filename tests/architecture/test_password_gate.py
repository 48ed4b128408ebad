"""Everything that hashes or checks a password holds a hashing slot, and no transaction waits for one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PORTAL = Path(__file__).parent.parent.parent / "portal"
HASHES = {"authenticate", "check_password", "set_password", "make_password", "create_user", "_create_user"}
GATE = "hashing_slot"
WITHIN_CALLER = {"create_user", "_create_user"}
"""Functions that their callers call with a slot."""


def _name(call: ast.expr) -> str:
    function = call.func if isinstance(call, ast.Call) else call
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def ungated(tree: ast.AST, held: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what hashes without a slot, or enters the slot within a transaction."""
    for node in ast.iter_child_nodes(tree):
        inside = held
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = (GATE,) if node.name in WITHIN_CALLER else ()
        if isinstance(node, ast.With):
            for item in node.items:
                name = _name(item.context_expr)
                if name == GATE and "atomic" in inside:
                    yield f"line {node.lineno}: a transaction waits for a slot"
                inside = (*inside, name)
        if isinstance(node, ast.Call) and _name(node) in HASHES and GATE not in held:
            arguments = node.args[1:2]
            without_password = (
                _name(node) == "create_user" and arguments and ast.unparse(arguments[0]) == "None"
            )
            if not without_password:
                yield f"line {node.lineno}: {_name(node)} without a slot"
        yield from ungated(node, inside)


def test_every_caller_holds_a_slot() -> None:
    found = {
        str(path.relative_to(PORTAL)): list(ungated(ast.parse(path.read_text())))
        for path in PORTAL.rglob("*.py")
        if GATE in (text := path.read_text()) or any(f"{name}(" in text for name in HASHES)
    }
    del found["api/experiments/mlflow.py"]  # its authenticate reads a token
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert {
        "web/accounts/sign_in.py",
        "services/accounts/users.py",
        "models/accounts/users.py",
    } <= found.keys()


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("def f():\n  user.set_password(x)", 1),
        ("def f():\n  with hashing_slot():\n    user.set_password(x)", 0),
        ("def f():\n  with hashing_slot(), transaction.atomic():\n    user.set_password(x)", 0),
        ("def f():\n  with transaction.atomic():\n    with hashing_slot():\n      user.set_password(x)", 1),
        ("def f():\n  with hashing_slot():\n    pass\n  user.check_password(x)", 1),
        ("def f():\n  User.objects.create_user(name, None)", 0),
        ("def f():\n  User.objects.create_user(name, word)", 1),
    ],
)
def test_what_the_check_finds(text: str, problems: int) -> None:
    assert len(list(ungated(ast.parse(text)))) == problems
