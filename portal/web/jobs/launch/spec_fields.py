"""Fields of the launch form that are derived from the job specification, and the conversion of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.domain.jobs.job_spec import JobField, JobRole, JobSpec, job_fields
from portal.domain.jobs.schedules import OVERLAP_LABELS, ScheduleSpec
from portal.web.display.formatting import duration, parse_whole_number
from portal.web.form_fields import select_input, text_input, time_zone_field

BOUNDS_MESSAGES = {
    "min_value": gettext_lazy("Must be at least %(limit_value)s."),
    "max_value": gettext_lazy("Must be at most %(limit_value)s."),
    "invalid": gettext_lazy("Must be a number."),
}


class WordListField(forms.CharField):
    """Words, separated by spaces or commas."""

    def clean(self, value: Any) -> Any:
        return re.split(r"[\s,;]+", text) if (text := (super().clean(value) or "").strip()) else []


class NumberListField(WordListField):
    """Whole numbers, separated by spaces or commas."""

    def clean(self, value: Any) -> Any:
        words = super().clean(value)
        if not all(re.fullmatch(r"[0-9]{0,9}", word) for word in words):
            raise forms.ValidationError(_("Write whole numbers, separated by spaces."))
        return [int(word) for word in words if word]


def build_spec_fields(spec: type[Any]) -> dict[str, forms.Field]:
    """Return form fields by name for the fields of the specification that have a label."""
    return {rule.form_name: build_field(rule) for rule in job_fields(spec).values() if rule.label}


def build_schedule_fields(*, required: bool) -> dict[str, forms.Field]:
    overlap = forms.ChoiceField(
        label=_("If an earlier job has not ended"),
        choices=[(key, _(label)) for key, label in OVERLAP_LABELS.items()],
        required=required,
        widget=select_input(),
    )
    zone = time_zone_field()
    zone.required = required
    return build_spec_fields(ScheduleSpec) | {"time_zone": zone, "overlap": overlap}


def build_field(rule: JobField) -> forms.Field:
    """Return the form field of a field of a request, or of a parameter of a template."""
    options: dict[str, Any] = {
        "label": gettext_lazy(rule.label) if rule.label else rule.label,
        "required": rule.is_number and not rule.nullable and not rule.section,
        "help_text": gettext_lazy(rule.form_help or rule.help) if rule.form_help or rule.help else "",
        "initial": rule.default,
    }
    if rule.value_type is bool:
        return forms.BooleanField(**options, widget=forms.CheckboxInput({"class": "form-check-input"}))
    if rule.is_list and rule.choices:
        boxes = forms.CheckboxSelectMultiple({"class": "form-check-input"})
        return forms.MultipleChoiceField(
            **options,
            choices=[(name, gettext_lazy(name.replace("_", " "))) for name in rule.choices],
            widget=boxes,
        )
    if rule.is_list:
        field = WordListField if rule.pattern else NumberListField
        return field(**options | {"initial": ""}, widget=text_input())
    if rule.choices:
        return forms.ChoiceField(
            **options, choices=[(name, gettext_lazy(name)) for name in rule.choices], widget=select_input()
        )
    if not rule.is_number:
        return forms.CharField(**options, max_length=rule.max_length, widget=text_input())
    attrs = {"class": "form-control"} | ({"placeholder": gettext_lazy(rule.if_null)} if rule.if_null else {})
    options |= {"widget": forms.NumberInput(attrs), "error_messages": BOUNDS_MESSAGES}
    options |= {"min_value": _form_bound(rule, rule.minimum, math.ceil)}
    options |= {"max_value": _form_bound(rule, rule.maximum, math.floor)}
    if rule.value_type is int and rule.form_factor == 1:
        return forms.IntegerField(**options)
    if rule.default is not None:
        options["initial"] = f"{rule.default / rule.form_factor:.10g}"
    return forms.FloatField(**options)


def _form_bound(rule: JobField, bound: float | None, rounded: Any) -> float | None:
    """Return a bound in the unit of the form, rounded inwards to one decimal."""
    if bound is None or rule.form_factor == 1:
        return bound
    found = float(rounded(bound * 10 / rule.form_factor) / 10)
    return int(found) if found.is_integer() else found


def request_values(spec: type[Any], cleaned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a valid form in the units of a request; empty ones are the defaults."""
    rules = [
        rule
        for rule in job_fields(spec).values()
        if (rule.is_scalar or rule.is_list) and rule.form_name in cleaned
    ]
    return {rule.name: _request_value(rule, cleaned[rule.form_name]) for rule in rules}


def _request_value(rule: JobField, value: Any) -> Any:
    if value is None or value == "":
        return rule.default
    return value if rule.form_factor == 1 else round(value * rule.form_factor)


def form_values(spec: type[JobSpec | JobRole], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with API names in the units of the form; blank and unreadable ones are left out."""
    found = {}
    for rule in job_fields(spec).values():
        value = fields.get(rule.name)
        if rule.is_list and isinstance(value, list | tuple):
            found[rule.form_name] = list(value) if rule.choices else " ".join(map(str, value))
        elif rule.is_scalar and value is not None and value != "":
            found[rule.form_name] = _form_value(rule, value)
    return {name: value for name, value in found.items() if value is not None}


def _form_value(rule: JobField, value: Any) -> Any:
    if rule.value_type is bool:
        return value.lower() in ("true", "1", "on") if isinstance(value, str) else value
    if rule.form_factor == 1 and rule.name != "time_limit_s":
        return value
    amount = parse_whole_number(value)
    if not amount:
        return None
    if rule.name == "time_limit_s":
        return duration(amount).replace("\u00a0", " ")
    return _shortest_text(amount, rule.form_factor)


def _shortest_text(amount: int, factor: int) -> str:
    """Return the fewest digits of ``amount / factor`` from which the form reads the same amount."""
    texts = (f"{amount / factor:.{digits}g}" for digits in range(3, 16))
    return next((text for text in texts if round(float(text) * factor) == amount), repr(amount / factor))
