"""Writes the inputs of forms without a template for each: the launch form has a hundred of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.forms.renderers import DjangoTemplates
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

_FOLDER = "django/forms/widgets/"
_INPUTS = frozenset(f"{_FOLDER}{name}.html" for name in ("input", "text", "number", "checkbox", "hidden"))


class DirectRenderer(DjangoTemplates):
    """Django's renderer, which writes inputs and selects as Django's templates do."""

    def render(self, template_name: str, context: dict[str, Any], request: Any = None) -> str:
        if template_name in _INPUTS:
            return _input(context["widget"])
        if template_name == f"{_FOLDER}select.html":
            return _select(context["widget"])
        return super().render(template_name, context, request)


def _input(widget: Mapping[str, Any]) -> SafeString:
    value = {} if widget["value"] is None else {"value": widget["value"]}
    first = {"type": widget["type"], "name": widget["name"], **value}
    return format_html("<input{}>", attributes(first | widget["attrs"]))


def _select(widget: Mapping[str, Any]) -> SafeString:
    groups = format_html_join("", "{}", ((_group(name, rows),) for name, rows, _ in widget["optgroups"]))
    return format_html(
        "<select{}>{}</select>", attributes({"name": widget["name"]} | widget["attrs"]), groups
    )


def _group(name: str | None, options: list[dict[str, Any]]) -> SafeString:
    rows = ((attributes({"value": row["value"]} | row["attrs"]), row["label"]) for row in options)
    inside = format_html_join("", "<option{}>{}</option>", rows)
    return format_html('<optgroup label="{}">{}</optgroup>', name, inside) if name else inside


def attributes(attrs: Mapping[str, Any]) -> SafeString:
    """Return them in their order, each after a space; true ones without a value, false ones not at all."""
    return SafeString(
        "".join(
            format_html(" {}", name) if value is True else format_html(' {}="{}"', name, value)
            for name, value in attrs.items()
            if value is not False
        )
    )
