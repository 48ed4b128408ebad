"""Widgets and fields that several forms share."""

from __future__ import annotations

import zoneinfo
from typing import Any

from django import forms

TIME_ZONES = [(name, name.replace("_", " ")) for name in sorted(zoneinfo.available_timezones())]


def text_input(**attrs: Any) -> forms.TextInput:
    return forms.TextInput({"class": "form-control", "autocomplete": "off", **attrs})


def text_area(rows: int, **attrs: Any) -> forms.Textarea:
    return forms.Textarea({"class": "form-control", "rows": rows, **attrs})


def select_input(**attrs: Any) -> forms.Select:
    return forms.Select({"class": "form-select", **attrs})


def password_field(autocomplete: str = "current-password", **options: Any) -> forms.CharField:
    widget = forms.PasswordInput({"class": "form-control", "autocomplete": autocomplete})
    return forms.CharField(max_length=1024, strip=False, widget=widget, **options)


def new_password_field(label: str | None = None) -> forms.CharField:
    help_text = "At least 12 characters; a passphrase is best."
    return password_field("new-password", label=label, help_text=help_text)


def time_zone_field(help_text: str = "", **attrs: str) -> forms.ChoiceField:
    return forms.ChoiceField(
        label="Time zone",
        choices=TIME_ZONES,
        initial="UTC",
        widget=select_input(**attrs),
        help_text=help_text,
    )
