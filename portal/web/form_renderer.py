"""Writes fields and inputs of forms without a template for each: the launch form has a hundred of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.forms import BoundField
from django.forms.renderers import DjangoTemplates
from django.utils.html import conditional_escape, escape
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

_FOLDER = "django/forms/widgets/"
_INPUTS = frozenset(f"{_FOLDER}{name}.html" for name in ("input", "text", "number", "checkbox", "hidden"))
_OPTIONS = frozenset(f"{_FOLDER}{name}.html" for name in ("checkbox_option", "radio_option"))


class DirectRenderer(DjangoTemplates):
    """Django's renderer, which writes inputs and selects as Django's templates do."""

    def render(self, template_name: str, context: dict[str, Any], request: Any = None) -> str:
        widget = context.get("widget", {})
        if template_name in _INPUTS or (template_name in _OPTIONS and not widget.get("wrap_label")):
            return _input(widget)
        if template_name == f"{_FOLDER}select.html":
            return _select(widget)
        return super().render(template_name, context, request)


def render_field(field: BoundField, *, plain: bool) -> SafeString:
    """Return a field with label, hint and error; ``plain`` leaves out that it is optional."""
    optional = (
        "" if plain or field.field.required else f' <span class="fw-3rd">{escape(_("optional"))}</span>'
    )
    name = f"{conditional_escape(field.label)}{optional}"
    label = f'<label class="form-label" for="{escape(field.id_for_label)}">{name}</label>'
    hint = ""
    if errors := field.errors:
        texts = " ".join(conditional_escape(str(each)) for each in errors)
        hint = f'<p class="fw-hint fw-fail-t" id="{escape(field.auto_id)}_error">{texts}</p>'
    elif help_text := field.help_text:
        hint = f'<p class="fw-hint" id="{escape(field.auto_id)}_helptext">{conditional_escape(help_text)}</p>'
    return SafeString(f'<div class="fw-field">{label}{field}{hint}</div>')


def _input(widget: Mapping[str, Any]) -> SafeString:
    value = {} if widget["value"] is None else {"value": widget["value"]}
    first = {"type": widget["type"], "name": widget["name"], **value}
    return SafeString(f"<input{attributes(first | widget['attrs'])}>")


def _select(widget: Mapping[str, Any]) -> SafeString:
    groups = "".join(_group(name, rows) for name, rows, _ in widget["optgroups"])
    return SafeString(f"<select{attributes({'name': widget['name']} | widget['attrs'])}>{groups}</select>")


def _group(name: str | None, options: list[dict[str, Any]]) -> str:
    inside = "".join(
        f"<option{attributes({'value': row['value']} | row['attrs'])}>{conditional_escape(row['label'])}</option>"
        for row in options
    )
    return f'<optgroup label="{conditional_escape(name)}">{inside}</optgroup>' if name else inside


def attributes(attrs: Mapping[str, Any]) -> SafeString:
    """Return them in their order, each after a space; true ones without a value, false ones not at all."""
    return SafeString(
        "".join(
            f" {escape(name)}" if value is True else f' {escape(name)}="{conditional_escape(value)}"'
            for name, value in attrs.items()
            if value is not False
        )
    )
