"""Fields of the launch form that are derived from the options of launchers, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy

from agents.launchers import LAUNCHERS, LauncherOption
from portal.web.form_fields import select_input, text_input
from portal.web.jobs.launch.spec_fields import BOUNDS_MESSAGES


def option_field_name(launcher: str, option: str) -> str:
    return f"{launcher}-{option}"


def build_launcher_fields() -> dict[str, forms.Field]:
    """Return a form field for each option of each launcher, by name."""
    return {
        option_field_name(name, option.name): _build_field(option)
        for name, launcher in LAUNCHERS.items()
        for option in launcher.options
    }


def _build_field(option: LauncherOption) -> forms.Field:
    options: dict[str, Any] = {
        "label": gettext_lazy(option.name.replace("_", " ").capitalize()),
        "required": False,
        "help_text": gettext_lazy(option.help) if option.help else "",
        "initial": option.default,
    }
    if isinstance(option.default, bool):
        return forms.BooleanField(**options, widget=forms.CheckboxInput({"class": "form-check-input"}))
    if option.choices:
        choices = [(name, name) for name in option.choices]
        return forms.ChoiceField(**options, choices=choices, widget=select_input())
    if isinstance(option.default, str):
        return forms.CharField(**options, max_length=500, widget=text_input())
    options |= {"widget": forms.NumberInput({"class": "form-control"}), "error_messages": BOUNDS_MESSAGES}
    options |= {"min_value": option.minimum, "max_value": option.maximum}
    return forms.IntegerField(**options) if isinstance(option.default, int) else forms.FloatField(**options)


def launcher_options(launcher: str, cleaned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the chosen launcher that are not defaults; empty fields have the default."""
    found = {}
    for option in LAUNCHERS[launcher].options:
        value = cleaned.get(option_field_name(launcher, option.name))
        if value is not None and value != option.default and (value != "" or not option.choices):
            found[option.name] = value
    return found


def launcher_option_values(launcher: object, options: object) -> dict[str, Any]:
    """Return options of a launcher (API format) as values of the form; unknown ones are left out."""
    known = LAUNCHERS[launcher].options if isinstance(launcher, str) and launcher in LAUNCHERS else ()
    given = options if isinstance(options, dict) else {}
    return {
        option_field_name(str(launcher), each.name): given[each.name] for each in known if each.name in given
    }
