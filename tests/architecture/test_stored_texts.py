"""Texts that rows keep are marked where they are written, so that pages recognize and translate them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MODULES = {
    str(path.relative_to(ROOT)): path.read_text()
    for package in ("portal", "scheduler")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "migrations" not in path.parts
}
VERDICTS = "scheduler/core/verdicts/"
TEXTS = {
    "AttemptChange": (3,), "EngineConnectError": (0,), "JobEvent": (), "NoticeDraft": (2, 3), "StopRequest": (2,),
    "attempt_event": (3,), "attempt_topic_event": (2,), "cancel_job": (), "end_sweep": (2,), "end_tasks": (),
    "end_trial": (2,), "fail_version": (2,), "notify_job_owner": (2, 3), "notify_of_quota": (2,),
    "notify_users_of_nodes": (1, 2), "pause_sweep": (1,), "record_event": (3,), "record_incident": (),
    "record_owner_event": (2,), "record_task_problem": (1,), "record_unreachable": (1,), "request_stop": (),
    "suspend_job": (), "switch_gpus": (), "write_test": (1, 2),
}  # fmt: skip
"""Functions that store texts, and the positions of these; keyword arguments are ``message`` and ``title``."""
WORDS = re.compile(r"[A-Za-z]{2,} [A-Za-z]")


def test_messages_of_verdicts_are_marked() -> None:
    bare = {
        f"{name}:{text.lineno} {ast.unparse(text)}"
        for name, source in MODULES.items()
        if name.startswith(VERDICTS)
        for text in _bare_texts(ast.parse(source))
        if isinstance(text, ast.JoinedStr)
    }
    assert bare == set()


def test_texts_that_are_stored_are_marked() -> None:
    bare = {
        f"{name}:{text.lineno} {ast.unparse(text)}"
        for name, source in MODULES.items()
        if any(function in source for function in TEXTS)
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for value in _stored_values(function)
        for text in _bare_texts(value)
    }
    assert bare == set()


def _stored_values(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the expressions that a function stores as texts, with what it assigned to variables among them."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AugAssign(target=ast.Name(id=name), value=value)
            ):
                assigned.setdefault(name, []).append(value)
    for call in ast.walk(function):
        if not isinstance(call, ast.Call):
            continue
        called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if ast.unparse(call.func) == "JobEvent.objects.create":
            called = "JobEvent"
        if called not in TEXTS:
            continue
        given = [call.args[at] for at in TEXTS[called] if at < len(call.args)]
        given += [each.value for each in call.keywords if each.arg in ("message", "title")]
        for value in given:
            yield value
            if isinstance(value, ast.Name):
                yield from assigned.get(value.id, ())


def _bare_texts(node: ast.AST) -> Iterator[ast.JoinedStr | ast.Constant]:
    """Yield the texts with words below a node that ``stored_text`` does not mark; docstrings are none."""
    match node:
        case ast.Call(func=ast.Name(id="stored_text" | "end_message" | "_" | "ngettext" | "dict")):
            return
        case ast.JoinedStr(values=parts):
            constants = " ".join(str(each.value) for each in parts if isinstance(each, ast.Constant))
            if re.search(r"[A-Za-z]{2,} | [A-Za-z]{2,}", constants):
                yield node
                return
        case ast.Constant(value=str(text)) if WORDS.search(text):
            yield node
            return
        case ast.Expr(value=ast.Constant()):
            return
    for child in ast.iter_child_nodes(node):
        yield from _bare_texts(child)
