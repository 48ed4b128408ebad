"""Makes templates of the expressions that ``stored_text`` marks in the source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import product

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_VAGUE = frozenset({"name", "number", "title", "value"})
"""Attributes that need the name of their owner: ``{job.name}`` is the placeholder ``{job_name}``."""


def stored_templates(expression: ast.expr) -> list[str]:
    """Return the texts that an expression can give, with placeholders for its values.

    Raise ValueError where two placeholders touch, since their values could not be told apart.
    """
    found = dict.fromkeys(_number_placeholders(template.strip()) for template in _alternatives(expression))
    for template in found:
        if "}{" in template:
            raise ValueError(f"line {expression.lineno}: values touch in {template!r}")
    return [template for template in found if re.search(r"[A-Za-z]", _PLACEHOLDER.sub("", template))]


def _number_placeholders(template: str) -> str:
    """Number the further placeholders of a name: ``{time}``, ``{time2}``."""
    seen: Counter[str] = Counter()

    def numbered(match: re.Match[str]) -> str:
        seen[match[1]] += 1
        return match[0] if seen[match[1]] == 1 else f"{{{match[1]}{seen[match[1]]}}}"

    return _PLACEHOLDER.sub(numbered, template)


def _alternatives(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(each) for each in product(*map(_alternatives, parts))]
        case ast.FormattedValue(value=value):
            return _alternatives(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(each) for each in product(_alternatives(left), _alternatives(right))]
        case ast.IfExp(body=one, orelse=other):
            return [*_alternatives(one), *_alternatives(other)]
        case ast.BoolOp(values=values):
            return [text for value in values for text in _alternatives(value)]
        case _:
            return [f"{{{_placeholder(node)}}}"]


def _placeholder(node: ast.expr) -> str:
    """Return a name for a value: ``request`` for ``format_request(job)``, ``job_name`` for ``job.name``."""
    match node:
        case ast.Name(id=name):
            return name.strip("_").lower()
        case ast.Attribute(value=owner, attr=name):
            return f"{_placeholder(owner)}_{name}" if name in _VAGUE else name.strip("_")
        case ast.Call(func=ast.Name(id="len" | "str") | ast.Attribute(attr="join"), args=[value, *_]):
            return _placeholder(value)
        case ast.Call(func=function):
            return _placeholder(function).removeprefix("format_")
        case ast.Subscript(value=value):
            return _placeholder(value)
        case _:
            return "value"
