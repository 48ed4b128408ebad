"""Values of the launch form from a job in YAML."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext as _

from portal.domain.jobs.job_spec import job_fields, time_error
from portal.models import User
from portal.services.jobs.job_document import REFERENCES, JobDocument, read_job_yaml, request_body
from portal.web.jobs.launch.form import LaunchForm
from portal.web.jobs.launch.initial_values import initial_from_api_fields

_FIELDS_OF_FORM = {
    "dependency_ids": "dependencies",
    "secret_variables": "secrets",
    "secret_files": "secrets",
    "topology_required": "topology_constraint",
    "topology_preferred": "topology_constraint",
    "__all__": "roles",
}
_SAME_WITH_DEFAULTS = {"dependencies", "gpu_model", "roles", "secrets", "topology_constraint", "volumes"}
"""Fields whose omitted parts the form completes."""


def initial_from_yaml(user: User, text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the form, and what is wrong, each with its line.

    Raise InvalidRequest for ``yaml`` if the text is not a YAML mapping.
    """
    document, wrong = read_job_yaml(text)
    fields = document.fields
    if "template" in fields:
        wrong.setdefault("template", _("Open the template on the launch page instead; the form fills it in."))
    found = initial_from_api_fields({name: value for name, value in fields.items() if name not in wrong})
    form = LaunchForm(user)
    for name in REFERENCES:
        if isinstance(key := fields.get(name), str) and name not in wrong:
            queryset = form.fields[name].queryset  # type: ignore[attr-defined]
            row = queryset.filter(Q(public_id=key) | Q(name=key)).first()
            if row is None:
                wrong[name] = _("There is no such {name}, or you may not use it.").format(name=name)
            else:
                found[name] = row.public_id
    if "dependencies" in fields and "dependencies" not in wrong:
        found["dependency_ids"] = " ".join(fields["dependencies"])
    found |= {"kind": fields.get("kind", "training")}
    for name in ("name", "project", "environment"):
        if name not in fields:
            wrong.setdefault(name, _("This field is required."))
    if not wrong:
        wrong = _form_errors(user, document, found)
    return found, document.locate(wrong)


def _form_errors(user: User, document: JobDocument, initial: dict[str, Any]) -> dict[str, str]:
    """Return what the form refuses, and values that it cannot show, by field of the document."""
    names = _FIELDS_OF_FORM | {rule.form_name: name for name, rule in job_fields().items()}
    form = LaunchForm(user, initial=initial).as_posted()
    if not form.is_valid():
        return {names.get(name, name): " ".join(map(str, messages)) for name, messages in form.errors.items()}
    shown = request_body(form.to_job_request())
    rules = job_fields()
    return {
        name: _("The form cannot have this value. Submit the file with REST or the command line.")
        for name, value in document.fields.items()
        if name in rules
        and name not in _SAME_WITH_DEFAULTS
        and not _is_same(shown.get(name, rules[name].default), value)
    }


def _is_same(shown: Any, given: Any) -> bool:
    if isinstance(given, list | dict):
        return (list(shown) if isinstance(shown, tuple) else shown) == given or not (shown or given)
    if isinstance(given, str) and time_error(given) is None:
        return isinstance(shown, str) and abs(_time(shown) - _time(given)) < dt.timedelta(seconds=1)
    return bool(shown == given)


def _time(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)
