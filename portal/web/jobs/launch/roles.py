"""The roles of the launch form: one small form for each role."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from django import forms
from django.forms.renderers import get_default_renderer
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.domain.jobs.job_spec import JobRole
from portal.domain.jobs.roles import MAX_ROLES
from portal.web.form_fields import text_area, text_input
from portal.web.jobs.launch.spec_fields import build_spec_fields, form_values, request_values

SHELL = ["/bin/sh", "-c"]
_PLAIN_WORD = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
_SHELL_SYNTAX = re.compile(r"[|&;<>()$`\n*?~#]")


def parse_command(text: str) -> list[str]:
    """Return the argument list of a typed command; shell syntax is run by a shell. Raise ValidationError."""
    text = text.replace("\r\n", "\n").strip()
    if _SHELL_SYNTAX.search(text):
        return [*SHELL, text]
    try:
        return shlex.split(text)
    except ValueError as error:
        raise forms.ValidationError(_("A quotation mark is not closed.")) from error


def format_command(command: list[Any]) -> str:
    """Return an argument list as typed."""
    words = [str(word) for word in command]
    if len(words) == 3 and words[:2] == SHELL:
        return words[2]
    return " ".join(word if _PLAIN_WORD.fullmatch(word) else shlex.quote(word) for word in words)


class RoleForm(forms.Form):
    """One role; fields with a label in ``JobRole`` are added to those declared here."""

    command = forms.CharField(
        label=gettext_lazy("Command"),
        max_length=65536,
        required=False,
        widget=text_area(2, spellcheck="false", placeholder=gettext_lazy("as the job")),
    )
    ports = forms.CharField(
        label=gettext_lazy("Ports"),
        max_length=400,
        required=False,
        widget=text_input(),
        help_text=gettext_lazy("Names, separated by spaces."),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "label_suffix": ""})
        self.fields = build_spec_fields(JobRole) | self.fields
        self.fields["name"].required = True

    def clean_command(self) -> list[str]:
        return parse_command(self.cleaned_data["command"])

    def clean_ports(self) -> list[str]:
        return re.split(r"[\s,]+", ports) if (ports := self.cleaned_data["ports"].strip()) else []

    def to_role(self) -> JobRole:
        lists = {name: self.cleaned_data[name] for name in ("command", "ports")}
        return JobRole(**request_values(JobRole, self.cleaned_data), **lists)


class RoleFormSet(forms.BaseFormSet):  # type: ignore[type-arg]
    """The roles of a request, in rank order; blank and removed ones are left out."""

    form = RoleForm
    min_num = extra = 0
    max_num = absolute_max = MAX_ROLES
    can_order = validate_min = False
    can_delete = can_delete_extra = validate_max = True
    edit_only = False
    renderer = get_default_renderer()

    def to_roles(self) -> list[JobRole]:
        return [
            form.to_role() for form in self.forms if form.has_changed() and form not in self.deleted_forms
        ]

    def first_error(self) -> str:
        """Return the first error with its role and field."""
        for number, form in enumerate(self.forms, 1):
            for name, messages in form.errors.items():
                return _("Role {role}, {label}: {errors}").format(
                    role=form["name"].value() or number,
                    label=form[name].label,
                    errors=" ".join(map(str, messages)),
                )
        return " ".join(map(str, self.non_form_errors()))

    def as_data(self) -> dict[str, Any]:
        """Return the initial roles as posted."""
        data = {f"{self.prefix}-TOTAL_FORMS": len(self.forms), f"{self.prefix}-INITIAL_FORMS": 0}
        return data | {
            field.html_name: field.value()
            for form in self.forms
            for field in form
            if field.value() is not None and field.value() is not False
        }


def role_initial(role: Mapping[str, Any]) -> dict[str, Any]:
    """Return a role (API names) as form values."""
    lists = {
        "command": format_command(list(role.get("command") or ())),
        "ports": " ".join(role.get("ports") or ()),
    }
    return form_values(JobRole, role) | lists
