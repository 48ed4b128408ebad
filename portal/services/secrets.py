"""Secrets: written once by people and managers, sealed in the record, opened only for a start of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.db import transaction

from agents.node.environment import is_ours
from agents.node.spec import REFUSED_ENV
from portal.access import Verb, require, usable_secrets
from portal.errors import Invalid, NotThere
from portal.models import Job, Project, Secret, User
from portal.models.public_id import fault_of_name
from portal.services.audit import record_act
from portal.services.environments import SECRET_FILE
from portal.services.rights import denial_of
from portal.services.sealing import CannotOpen, Place, seal, unseal
from portal.words.secrets import FILE_NAME, MAX_VALUE_BYTES, MINE, MOST_SECRETS, PROJECTS, VARIABLE_NAME

Wanted = Mapping[str, Any]
"""``secret`` by name, ``of`` (me or project), and ``variable`` or ``file``: how the job gets it."""


PERSON = "the person"


class NotGiven(Exception):
    """A secret that the job names is gone, or its owner may not use it any more."""


class Given(NamedTuple):
    """Values for one start of a job, in the clear."""

    files: dict[str, str]
    variables: dict[str, str]


def do_save_secret(actor: User, of: User | Project, name: str, value: str) -> Secret:
    """Writes a value under a name, over the one that stood there; jobs get it with their next attempt."""
    _require(actor, of)
    wrong: dict[str, str] = {}
    if fault := fault_of_name(name):
        wrong["name"] = fault
    if not value:
        wrong["value"] = "An empty secret tells nobody anything."
    elif "\0" in value or len(value.encode()) > MAX_VALUE_BYTES:
        wrong["value"] = f"A secret is text of at most {MAX_VALUE_BYTES // 1024} KiB."
    if wrong:
        raise Invalid(fields=wrong)
    with transaction.atomic():
        row = Secret.objects.select_for_update(of=("self",)).filter(name=name, **_whose(of)).first()
        act = "secret.create" if row is None else "secret.change"
        row = row or Secret(name=name, **_whose(of))
        row.sealed, row.changed_by = seal(value, _place(row)), actor.username
        row.save()
        record_act(actor, act, row, after=_shown(row))
    return row


def do_remove_secret(actor: User, of: User | Project, name: str) -> None:
    """Forgets a value. What runs keeps it; a job that names it fails to start."""
    _require(actor, of)
    with transaction.atomic():
        row = Secret.objects.select_for_update(of=("self",)).filter(name=name, **_whose(of)).first()
        if row is None:
            raise NotThere("There is no such secret.")
        record_act(actor, "secret.remove", row, before=_shown(row))
        row.delete()


def wanted_secrets(given: Iterable[Wanted]) -> list[dict[str, str]]:
    """What a job asks for, as the record keeps it."""
    return [
        {"secret": str(each["secret"]), "of": str(each.get("of") or MINE), way: str(each[way])}
        for each in given
        for way in ("variable", "file")
        if each.get(way)
    ]


def fault_of_secrets(environ: Mapping[str, str], given: Sequence[Wanted]) -> str | None:
    """What is wrong with how a job names secrets, as a sentence; None if nothing is."""
    if len(given) > MOST_SECRETS:
        return f"A job names at most {MOST_SECRETS} secrets."
    for each in given:
        if bool(each.get("variable")) == bool(each.get("file")):
            return f"Say for {each['secret']} either a variable or a file."
        if each.get("of") not in (None, MINE, PROJECTS):
            return f"{each['secret']} is of {MINE} or of the {PROJECTS}."
    wanted = wanted_secrets(given)
    seen: set[tuple[str, str]] = set()
    for each in wanted:
        way = "variable" if "variable" in each else "file"
        name = each[way]
        if fault := _fault_of_variable(name, environ) if way == "variable" else _fault_of_file(name):
            return fault
        if (way, name) in seen:
            return f"Two secrets would be the {way} {name}."
        seen.add((way, name))
    return None


def secrets_of(job: Job) -> Given:
    """The values that a job gets with a start now. Raises NotGiven."""
    found = Given({}, {})
    if not job.secrets:
        return found
    if denial := denial_of(job):
        raise NotGiven(denial.message.removesuffix("."))
    rows = {(row.name, row.project_id): row for row in usable_secrets(job.owner, job.project)}
    for each in job.secrets:
        row = rows.get((each["secret"], job.project_id if each["of"] == PROJECTS else None))
        if row is None:  # it went between the two queries
            raise NotGiven(f"The secret {each['secret']} is gone")
        try:
            value = unseal(row.sealed, _place(row))
        except CannotOpen as why:
            raise NotGiven(f"The secret {row.name} cannot be opened: {why}. Write it again") from why
        way, name = ("variable", each["variable"]) if "variable" in each else ("file", each["file"])
        (found.variables if way == "variable" else found.files)[name] = value
    return found


# -- inside ----------------------------------------------------------------------------------------


def _require(actor: User, of: User | Project) -> None:
    if isinstance(of, Project):
        require(actor, Verb.MANAGE, of)
    elif of.pk != actor.pk:
        raise NotThere


def _whose(of: User | Project) -> dict[str, Any]:
    return {"project": of, "owner": None} if isinstance(of, Project) else {"owner": of, "project": None}


def _place(row: Secret) -> Place:
    return Place("secret", row.public_id, "sealed")


def _fault_of_variable(name: str, environ: Mapping[str, str]) -> str | None:
    if not VARIABLE_NAME.fullmatch(name):
        return f"{name!r} is not the name of a variable."
    if name in REFUSED_ENV or is_ours(name):
        return f"{name} is set by Fairway and cannot be changed."
    return f"{name} is among the variables, too." if name in environ else None


def _fault_of_file(name: str) -> str | None:
    if not FILE_NAME.fullmatch(name):
        return f"{name!r} is not the name of a file."
    return f"{name} is Fairway's own file." if name in (SECRET_FILE, "variables") else None


def _shown(row: Secret) -> dict[str, Any]:
    return {"name": row.name, "of": row.project.name if row.project else PERSON}
