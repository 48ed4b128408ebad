"""Inputs and selects are written as Django's own templates write them."""

from __future__ import annotations

import re

import pytest
from django import forms
from django.forms.renderers import DjangoTemplates

from portal.web.form_fields import TimeZoneSelect
from portal.web.form_renderer import DirectRenderer


class Sample(forms.Form):
    name = forms.CharField(max_length=9, help_text="short", widget=forms.TextInput({"data-a": '"<&'}))
    count = forms.IntegerField(min_value=1, required=False)
    chosen = forms.BooleanField()
    hidden = forms.CharField(widget=forms.HiddenInput)
    plain = forms.ChoiceField(choices=[("", "none"), ("a", "A & B"), (1, "one")])
    grouped = forms.ChoiceField(choices=[("", "none"), ("G>", [("x", "X"), ("y", "Y")])])
    several = forms.MultipleChoiceField(choices=[("a", "A"), ("b", "B")])
    boxes = forms.MultipleChoiceField(
        choices=[("a", "A & B"), ("b", "B")], widget=forms.CheckboxSelectMultiple({"data-a": "1"})
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "name": "<x>",
            "count": "7",
            "chosen": True,
            "plain": "1",
            "grouped": "y",
            "several": ["a", "b"],
            "boxes": ["b"],
        },
    ],
)
def test_the_output_is_that_of_the_templates(values: dict[str, object]) -> None:
    written, expected = (
        [str(field) for field in form]
        + [box.tag(wrap_label=wraps) for wraps in (0, 1) for box in form["boxes"]]
        for form in (
            Sample(initial=values, renderer=renderer()) for renderer in (DirectRenderer, DjangoTemplates)
        )
    )
    between_tags = re.compile(r">\s+<")
    assert [between_tags.sub("><", text).replace("\n", "") for text in written] == [
        between_tags.sub("><", text).replace("\n", "") for text in expected
    ]


def test_time_zones_are_written_as_a_select() -> None:
    choices = [("UTC", "UTC"), ("Europe/Berlin", "Europe/Berlin")]
    written = TimeZoneSelect({"class": "c"}).render("zone", "Europe/Berlin", {"id": "i"})
    expected = forms.Select({"class": "c"}, choices).render(
        "zone", "Europe/Berlin", {"id": "i"}, DirectRenderer()
    )
    assert '<option value="Europe/Berlin" selected>Europe/Berlin</option>' in written
    assert written.partition(">")[0] == expected.partition(">")[0]
