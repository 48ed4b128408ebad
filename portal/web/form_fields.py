"""Widgets and fields that several forms share."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django import forms
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy

from portal.errors import FairwayError, InvalidRequest
from portal.web.form_renderer import attributes

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise as StrOrPromise


TIME_ZONES = [(name, name.replace("_", " ")) for name in sorted(zoneinfo.available_timezones())]


def text_input(**attrs: Any) -> forms.TextInput:
    return forms.TextInput({"class": "form-control", "autocomplete": "off", **attrs})


def text_area(rows: int, **attrs: Any) -> forms.Textarea:
    return forms.Textarea({"class": "form-control", "rows": rows, **attrs})


def select_input(**attrs: Any) -> forms.Select:
    return forms.Select({"class": "form-select", **attrs})


class LocalTimeField(forms.DateTimeField):
    """A time that is typed in the time zone ``zone``, or with its offset from UTC; seconds are optional."""

    zone: dt.tzinfo = dt.UTC
    default_error_messages = {"invalid": gettext_lazy("Enter a date and a time, such as 2027-03-01T08:00.")}

    def __init__(self, **options: Any) -> None:
        attrs = {"class": "form-control", "type": "datetime-local", "step": "any"}
        super().__init__(widget=forms.TextInput(attrs), **options)

    def prepare_value(self, value: Any) -> Any:
        try:
            at = dt.datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            return value
        if at is None or at.tzinfo is None:
            return value
        here = at.astimezone(self.zone).replace(tzinfo=None)
        return here.isoformat(timespec="seconds" if here.second else "minutes")

    def to_python(self, value: Any) -> dt.datetime | None:
        if value in self.empty_values:
            return None
        try:
            at = dt.datetime.fromisoformat(str(value).strip())
            return (at if at.tzinfo else at.replace(tzinfo=self.zone)).astimezone(dt.UTC)
        except (ValueError, OverflowError):
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid") from None


def password_field(autocomplete: str = "current-password", **options: Any) -> forms.CharField:
    widget = forms.PasswordInput({"class": "form-control", "autocomplete": autocomplete})
    return forms.CharField(max_length=1024, strip=False, widget=widget, **options)


def new_password_field(label: StrOrPromise | None = None) -> forms.CharField:
    help_text = gettext_lazy("At least 12 characters; a passphrase is best.")
    return password_field("new-password", label=label, help_text=help_text)


class TimeZoneSelect(forms.Select):
    """A select without a template for each of its 600 options, which takes longer than the rest of a page."""

    def render(
        self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None
    ) -> SafeString:
        own = self.build_attrs({"name": name, **self.attrs}, attrs)
        return format_html("<select{}>{}</select>", attributes(own), _time_zone_options(str(value)))


@lru_cache(maxsize=64)
def _time_zone_options(chosen: str) -> SafeString:
    rows = ((zone, SafeString(" selected") if zone == chosen else "", label) for zone, label in TIME_ZONES)
    return format_html_join("", '<option value="{}"{}>{}</option>', rows)


def time_zone_field(help_text: StrOrPromise = "", **attrs: str) -> forms.ChoiceField:
    return forms.ChoiceField(
        label=gettext_lazy("Time zone"),
        choices=lambda: TIME_ZONES,
        initial="UTC",
        widget=TimeZoneSelect({"class": "form-select", **attrs}),
        help_text=help_text,
    )


def add_service_errors(form: forms.Form, error: FairwayError) -> None:
    """Add the messages of a service to the fields they belong to."""
    fields = error.fields if isinstance(error, InvalidRequest) else {}
    for name, message in fields.items():
        form.add_error(name if name in form.fields else None, message)
    if not fields:
        form.add_error(None, error.message)
