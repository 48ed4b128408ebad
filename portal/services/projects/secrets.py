"""Secrets: written by users and managers, stored encrypted, decrypted only for the start of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from agents.node.spec.environment import is_reserved
from agents.node.spec.task_spec import FORBIDDEN_ENV
from portal.access import Permission, require_permission, usable_secrets
from portal.domain.projects.secrets import (
    FILE_NAME,
    MAX_SECRETS_PER_JOB,
    MAX_VALUE_BYTES,
    PROJECT_SCOPE,
    USER_SCOPE,
    VARIABLE_NAME,
)
from portal.errors import InvalidRequest, NotFound
from portal.models import Job, Project, Secret, User
from portal.models.public_id import name_error
from portal.selectors.jobs.rights import job_denial
from portal.selectors.lookup import get_first
from portal.services.audit import record_action
from portal.services.encryption import DecryptionError, EncryptionContext, decrypt, encrypt
from portal.services.environments.process_environment import SECRET_FILE

SecretReference = Mapping[str, Any]
"""``secret`` by name, ``owner_type`` (me or project), and ``variable`` or ``file``: how the job gets it."""


OWNER_TEXT = "the owner"


class SecretMissingError(Exception):
    """A referenced secret does not exist any more, or the job's owner may not use it."""


class SecretValues(NamedTuple):
    """Decrypted values for one start of a job."""

    files: dict[str, str]
    variables: dict[str, str]


def do_save_secret(actor: User, holder: User | Project, name: str, value: str) -> Secret:
    """Create or replace a secret; jobs get the new value with their next attempt."""
    _require_holder_access(actor, holder)
    wrong: dict[str, str] = {}
    if fault := name_error(name):
        wrong["name"] = fault
    if not value:
        wrong["value"] = _("A secret cannot be empty.")
    elif "\0" in value or len(value.encode()) > MAX_VALUE_BYTES:
        wrong["value"] = _("A secret must be text of at most {max_value_bytes} KiB.").format(
            max_value_bytes=MAX_VALUE_BYTES // 1024
        )
    if wrong:
        raise InvalidRequest(fields=wrong)
    with transaction.atomic():
        row = _lock_secrets(holder, name).first()
        act = "secret.create" if row is None else "secret.change"
        row = row or Secret(name=name, **_holder_filter(holder))
        row.encrypted_value, row.changed_by = encrypt(value, _encryption_context(row)), actor.username
        row.save()
        record_action(actor, act, row, after=_audit_values(row))
    return row


def do_delete_secret(actor: User, holder: User | Project, name: str) -> None:
    """Delete a secret. Running jobs keep it; a job that references it fails to start."""
    _require_holder_access(actor, holder)
    with transaction.atomic():
        row = get_first(_lock_secrets(holder, name), _("There is no such secret."))
        record_action(actor, "secret.delete", row, before=_audit_values(row))
        row.delete()


def normalize_secret_references(references: Iterable[SecretReference]) -> list[dict[str, str]]:
    """Return the references of a job in stored form."""
    return [
        {
            "secret": str(each["secret"]),
            "owner_type": str(each.get("owner_type") or USER_SCOPE),
            way: str(each[way]),
        }
        for each in references
        for way in ("variable", "file")
        if each.get(way)
    ]


def secret_references_error(env: Mapping[str, str], references: Sequence[SecretReference]) -> str | None:
    """Return what is wrong with the secret references of a job, or None."""
    if len(references) > MAX_SECRETS_PER_JOB:
        return _("A job can use at most {max_secrets_per_job} secrets.").format(
            max_secrets_per_job=MAX_SECRETS_PER_JOB
        )
    for each in references:
        if bool(each.get("variable")) == bool(each.get("file")):
            return _("Enter either a variable or a file for {secret}.").format(secret=each["secret"])
        if each.get("owner_type") not in (None, USER_SCOPE, PROJECT_SCOPE):
            return _("{secret} must belong to {user_scope} or the {project_scope}.").format(
                secret=each["secret"], user_scope=USER_SCOPE, project_scope=PROJECT_SCOPE
            )
    wanted = normalize_secret_references(references)
    seen: set[tuple[str, str]] = set()
    for each in wanted:
        way, name = _delivery(each)
        if fault := _variable_error(name, env) if way == "variable" else _file_name_error(name):
            return fault
        if (way, name) in seen:
            return _("Two secrets use the same {way} {name}.").format(way=way, name=name)
        seen.add((way, name))
    return None


def read_job_secrets(job: Job) -> SecretValues:
    """Return the secrets for a start of the job now. Raise SecretMissingError."""
    found = SecretValues({}, {})
    if not job.secrets:
        return found
    if denial := job_denial(job):
        raise SecretMissingError(denial.message.removesuffix("."))
    rows = {(row.name, row.project_id): row for row in usable_secrets(job.owner, job.project)}
    for each in job.secrets:
        row = rows.get((each["secret"], job.project_id if each["owner_type"] == PROJECT_SCOPE else None))
        if row is None:  # deleted between the two queries
            raise SecretMissingError(f"The secret {each['secret']} no longer exists")
        try:
            value = decrypt(row.encrypted_value, _encryption_context(row))
        except DecryptionError as error:
            message = f"The secret {row.name} cannot be decrypted: {error}. Set it again"
            raise SecretMissingError(message) from error
        way, name = _delivery(each)
        (found.variables if way == "variable" else found.files)[name] = value
    return found


def _require_holder_access(actor: User, holder: User | Project) -> None:
    if isinstance(holder, Project):
        require_permission(actor, Permission.MANAGE, holder)
    elif holder.pk != actor.pk:
        raise NotFound


def _delivery(reference: Mapping[str, str]) -> tuple[str, str]:
    """Return how a job gets the secret, variable or file, and the name of either."""
    way = "variable" if "variable" in reference else "file"
    return way, reference[way]


def _holder_filter(holder: User | Project) -> dict[str, Any]:
    of_project = isinstance(holder, Project)
    return {"project": holder if of_project else None, "owner": None if of_project else holder}


def _lock_secrets(holder: User | Project, name: str) -> QuerySet[Secret]:
    return Secret.objects.select_for_update(of=("self",)).filter(name=name, **_holder_filter(holder))


def _encryption_context(row: Secret) -> EncryptionContext:
    return EncryptionContext("secret", row.public_id, "encrypted_value")


def _variable_error(name: str, env: Mapping[str, str]) -> str | None:
    if not VARIABLE_NAME.fullmatch(name):
        return _("{name!r} is not the name of a variable.").format(name=name)
    if name in FORBIDDEN_ENV or is_reserved(name):
        return _("{name} is set by Fairway and cannot be changed.").format(name=name)
    return _("{name} is also one of the variables.").format(name=name) if name in env else None


def _file_name_error(name: str) -> str | None:
    if not FILE_NAME.fullmatch(name):
        return _("{name!r} is not the name of a file.").format(name=name)
    return (
        _("{name} is reserved by Fairway.").format(name=name) if name in (SECRET_FILE, "variables") else None
    )


def _audit_values(row: Secret) -> dict[str, Any]:
    return {"name": row.name, "of": row.project.name if row.project else OWNER_TEXT}
