"""Templates: saving them with their versions, and filling a request from one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_admin, require_own_account, require_permission
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.template_parameters import (
    TemplateCategory,
    TemplateScope,
    changed_parameters,
    fill_fields,
    parameter_values,
    placeholders,
    read_template_parameters,
    swept_parameters_error,
    template_errors,
)
from portal.domain.states import JobKind
from portal.domain.sweeps.sweeps import SweepSpec, sweep_errors
from portal.errors import Conflict, InvalidRequest
from portal.models import Environment, Project, Template, TemplateVersion, User
from portal.models.public_id import name_error
from portal.services.audit import record_action, record_change

MAX_TITLE_LENGTH = 200
MAX_DESCRIPTION_LENGTH = 5000
CONTENT = ("kind", "environment", "fields", "parameters", "sweep")
"""What makes a new version when it changes."""


@dataclass(frozen=True, kw_only=True)
class TemplateInput:
    """A template as its author writes it."""

    name: str
    title: str
    description: str = ""
    category: str = TemplateCategory.OTHER.value
    scope: str = TemplateScope.SELF.value
    project: Project | None = None
    kind: str = JobKind.TRAINING.value
    environment: Environment | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    parameters: Sequence[Mapping[str, Any]] = ()
    sweep: Mapping[str, Any] = field(default_factory=dict)
    enabled: bool = True


def input_errors(given: TemplateInput) -> dict[str, str]:
    """Return what is wrong with a template, by field, apart from what the user may do."""
    wrong: dict[str, str] = {}
    if error := name_error(given.name):
        wrong["name"] = error
    if not given.title.strip() or len(given.title) > MAX_TITLE_LENGTH:
        wrong["title"] = _("Enter a title of at most {max_title_length} characters.").format(
            max_title_length=MAX_TITLE_LENGTH
        )
    if len(given.description) > MAX_DESCRIPTION_LENGTH:
        wrong["description"] = _("Enter at most {max_description_length} characters.").format(
            max_description_length=MAX_DESCRIPTION_LENGTH
        )
    for name, values in (("category", TemplateCategory), ("scope", TemplateScope), ("kind", JobKind)):
        if getattr(given, name) not in set(values):
            wrong[name] = _("Choose one of {values}.").format(values=", ".join(values))
    if (given.scope == TemplateScope.PROJECT) != (given.project is not None):
        wrong["project"] = _("Name the project with which it is shared; other scopes have none.")
    for name in ("fields", "parameters", "sweep"):
        if not _is_storable(getattr(given, name)):
            wrong[name] = _("Contains a number or a character that cannot be stored.")
    return wrong or template_errors(given.fields, given.parameters) or _sweep_errors(given)


def _sweep_errors(given: TemplateInput) -> dict[str, str]:
    if not given.sweep:
        return {}
    if given.kind != JobKind.TRAINING:
        return {"sweep": _("Only jobs have sweeps, not workspaces.")}
    spec = {name: value for name, value in given.sweep.items() if name not in ("parameters", "points")}
    if unknown := sorted(spec.keys() - job_fields(SweepSpec)):
        return {"sweep": _("{unknown} is no field of a sweep.").format(unknown=unknown[0][:60])}
    space, points = given.sweep.get("parameters", {}), given.sweep.get("points", [])
    try:
        if wrong := sweep_errors(SweepSpec(**spec), space, points):
            return {"sweep": " ".join(f"{name}: {error}" for name, error in wrong.items())}
    except TypeError:
        return {"sweep": _("A value has the wrong type.")}
    declared = read_template_parameters(given.parameters)
    error = swept_parameters_error(declared, given.fields, points or [space])
    return {"sweep": error} if error else {}


def _is_storable(value: object) -> bool:
    """Return False for what JSON in PostgreSQL cannot hold."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_storable(key) for key in value) and _is_storable(
            [*value.values()]
        )
    if isinstance(value, list | tuple):
        return all(map(_is_storable, value))
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not re.search("[\x00\ud800-\udfff]", value)
    return value is None or isinstance(value, int)


def do_save_template(
    user: User, given: TemplateInput, row: Template | None = None, *, version: int | None = None
) -> Template:
    """Create a template, or change one; a changed content is a new version.

    ``version``: the one that the author saw. Raise Conflict if there is a newer one.
    """
    if row is not None:
        require_permission(user, Permission.CHANGE, row)
    if given.scope == TemplateScope.EVERYONE and (row is None or row.scope != given.scope):
        require_admin(user, "share a template with everyone")
    if given.project is not None and (row is None or row.project_id != given.project.pk):
        require_permission(user, Permission.SUBMIT, given.project)
    if wrong := input_errors(given):
        raise InvalidRequest(fields=wrong)
    try:
        with transaction.atomic():
            return _save(user, given, row, version)
    except IntegrityError as error:
        if "name" not in str(error):
            raise
        raise InvalidRequest(
            fields={"name": _("There is a template of this name, maybe one that you cannot see.")}
        ) from error


def _save(user: User, given: TemplateInput, row: Template | None, version: int | None) -> Template:
    before: dict[str, Any] = {}
    scope = given.scope
    if row is None:
        row = Template(owner=user, version=0)
    else:
        row = Template.objects.select_for_update(of=("self",)).select_related("environment").get(pk=row.pk)
        before, scope = _audit_values(row), row.scope
        if version not in (None, row.version):
            raise Conflict(
                _("Version {version} was saved meanwhile. Open it, and make your changes again.").format(
                    version=row.version
                ),
                code="template_changed",
            )
    old = [getattr(row, name) for name in CONTENT]
    for name in TemplateInput.__dataclass_fields__:
        setattr(row, name, getattr(given, name))
    row.fields, row.parameters, row.sweep = (
        dict(given.fields),
        list(map(dict, given.parameters)),
        dict(given.sweep),
    )
    changed = row.version == 0 or old != [getattr(row, name) for name in CONTENT]
    becomes_private = row.scope == TemplateScope.SELF != scope  # with what others wrote meanwhile
    if row.owner is not None and (becomes_private or (changed and scope == TemplateScope.SELF)):
        require_own_account(user, row.owner, _("Save a copy of this private template."))
    row.version += changed
    row.save()
    if changed:
        build_version(row, user.username).save()
    if before:
        record_change(user, "template.change", row, before, _audit_values(row), reason="")
    else:
        record_action(user, "template.create", row, after=_audit_values(row))
    return row


def build_version(row: Template, author: str = "") -> TemplateVersion:
    """Return the present content of a template as a version."""
    content = {name: getattr(row, name) for name in CONTENT}
    return TemplateVersion(template=row, version=row.version, created_by=author, **content)


def _audit_values(row: Template) -> dict[str, Any]:
    names = ("name", "title", "scope", "version", "enabled")
    return {name: getattr(row, name) for name in names} | {"project": row.project and row.project.name}


def check_template_version(template: Template, version: int | None) -> None:
    """Raise InvalidRequest if a request is based on an older version of the template."""
    if version in (None, template.version):
        return
    message = _(
        "The template {title} has changed: it now has version {version}, "
        "and this request is based on version {before}."
    ).format(title=template.title, version=template.version, before=version)
    old = template.versions.filter(version=version).first()
    changed = changed_parameters(old.parameters, template.parameters) if old else []
    if changed:
        message += " " + _("Parameters that changed: {changed}.").format(changed=", ".join(changed))
    message += " " + _("Open the template again.")
    raise InvalidRequest(fields={"template_version": message})


def fill_template(
    template: Template,
    given: Mapping[str, object],
    *,
    version: int | None = None,
    swept: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Return the fields of a job from a template, with the values of its parameters and its version.

    ``swept``: parameters that a sweep fills into the command of each trial. Raise InvalidRequest.
    """
    check_template_version(template, version)
    declared = read_template_parameters(template.parameters)
    values, wrong = parameter_values(declared, given)
    if wrong:
        raise InvalidRequest(
            fields={"parameters": " ".join(f"{name}: {error}" for name, error in wrong.items())}
        )
    elsewhere = placeholders({name: value for name, value in template.fields.items() if name != "command"})
    fixed = {name: value for name, value in values.items() if name not in swept - elsewhere}
    filled = fill_fields(template.fields, fixed, of_sweep=bool(declared and swept))
    return filled | {"parameters": fixed, "template_version": template.version}
