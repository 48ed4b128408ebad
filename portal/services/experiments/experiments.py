"""Changes of runs and model versions from the pages; scripts use the MLflow API for the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.database.pool_middleware import release_connection
from portal.domain.experiments.tracking import MODEL_STAGES, NOTE_TAG, RESERVED_TAG_PREFIX
from portal.errors import FairwayError, InvalidRequest, NotFound
from portal.models import Project, User
from portal.selectors.experiments.experiments import Run, quoted, runs_by_id
from portal.services.audit import record_action
from portal.tracking.client import call

MAX_NOTE_LENGTH = 5000
MAX_MODEL_NAME_LENGTH = 256
MAX_TAG_VALUE_LENGTH = 1000
MAX_TAGGED_RUNS = 50
"""Runs that one request tags, each with a call of the tracking server."""
TAG_NAME = re.compile(r"[\w.:/-][\w.:/ -]{0,99}")


def do_set_note(actor: User, project: Project, run: str, text: str) -> None:
    if len(text) > MAX_NOTE_LENGTH:
        raise InvalidRequest(
            fields={
                "note": _("A note has at most {max_note_length} characters.").format(
                    max_note_length=MAX_NOTE_LENGTH
                )
            }
        )
    body = {"run_id": run, "key": NOTE_TAG, "value": text}
    _change(actor, project, "run.note", {"run": run}, "runs/set-tag", body)


def do_set_tag(actor: User, project: Project, run: str, key: str, value: str) -> None:
    _check_tag(key, value)
    body = {"run_id": run, "key": key, "value": value}
    _change(actor, project, "run.tag", {"run": run, "tag": key}, "runs/set-tag", body)


def _check_tag(key: str, value: str) -> None:
    if not TAG_NAME.fullmatch(key) or key.startswith((RESERVED_TAG_PREFIX, "mlflow.")):
        message = _("A name of letters, digits and . : / - that does not start with mlflow. or fairway.")
        raise InvalidRequest(fields={"tag": message})
    if len(value) > MAX_TAG_VALUE_LENGTH:
        raise InvalidRequest(
            fields={
                "value": _("A value has at most {max_tag_value_length} characters.").format(
                    max_tag_value_length=MAX_TAG_VALUE_LENGTH
                )
            }
        )


def do_delete_tag(actor: User, project: Project, run: str, key: str) -> None:
    _check_removable(key)
    body = {"run_id": run, "key": key}
    _change(actor, project, "run.untag", {"run": run, "tag": key}, "runs/delete-tag", body)


def _check_removable(key: str) -> None:
    if not key or key.startswith((RESERVED_TAG_PREFIX, "mlflow.")):
        raise InvalidRequest(fields={"tag": _("This tag cannot be removed.")})


def do_set_tag_of_runs(actor: User, project: Project, runs: Sequence[str], key: str, value: str) -> int:
    """Set a tag of all the runs, none if one does not exist; return how many did not have it with this value."""
    _check_tag(key, value)
    changed = [run for run in _find_runs(actor, project, runs) if run.tags.get(key) != value]
    for run in changed:
        do_set_tag(actor, project, run.id, key, value)
    return len(changed)


def do_delete_tag_of_runs(actor: User, project: Project, runs: Sequence[str], key: str) -> int:
    """Remove a tag from those of the runs that have it; return how many."""
    _check_removable(key)
    changed = [run for run in _find_runs(actor, project, runs) if key in run.tags]
    for run in changed:
        do_delete_tag(actor, project, run.id, key)
    return len(changed)


def _find_runs(actor: User, project: Project, ids: Sequence[str]) -> list[Run]:
    require_permission(actor, Permission.SUBMIT, project)
    wanted = list(dict.fromkeys(ids))
    if not 0 < len(wanted) <= MAX_TAGGED_RUNS:
        message = _("Choose 1 to {max_tagged_runs} runs.").format(max_tagged_runs=MAX_TAGGED_RUNS)
        raise InvalidRequest(fields={"run": message})
    found = runs_by_id(project, wanted)
    if len(found) < len(wanted):
        raise NotFound(_("A chosen run does not exist any more. Reload the page."))
    return [found[each] for each in wanted]


def do_set_stage(actor: User, project: Project, model: str, version: str, stage: str) -> None:
    """Set the stage of a version; other versions of the stage keep theirs."""
    if stage not in MODEL_STAGES:
        raise InvalidRequest(
            fields={"stage": _("One of {model_stages}.").format(model_stages=", ".join(MODEL_STAGES))}
        )
    body = {"name": model, "version": version, "stage": stage, "archive_existing_versions": False}
    after = {"model": model, "version": version, "stage": stage}
    _change(actor, project, "model.stage", after, "model-versions/transition-stage", body)


def do_set_alias(actor: User, project: Project, model: str, version: str, alias: str) -> None:
    """Move an alias to a version."""
    body = {"name": model, "version": version, "alias": alias}
    after = {"model": model, "version": version, "alias": alias}
    _change(actor, project, "model.alias", after, "registered-models/alias", body)


def do_register_model(actor: User, project: Project, run: str, path: str, name: str) -> str:
    """Register an artifact of a run as the next version of a model, which is created if needed; return its number."""
    require_permission(actor, Permission.SUBMIT, project)
    name, path = name.strip(), path.strip().strip("/")
    if not 0 < len(name) <= MAX_MODEL_NAME_LENGTH or set(name) & set("/:"):
        message = _("A name of at most {max_model_name_length} characters without / and :.").format(
            max_model_name_length=MAX_MODEL_NAME_LENGTH
        )
        raise InvalidRequest(fields={"name": message})
    if not path:
        raise InvalidRequest(fields={"path": _("Choose a file or folder of the run.")})
    info = call(project.public_id, "GET", "runs/get", run_id=run)["run"]["info"]
    known = call(project.public_id, "GET", "registered-models/search", filter=f"name = {quoted(name)}")
    if not known.get("registered_models"):
        _change(actor, project, "model.create", {"model": name}, "registered-models/create", {"name": name})
    after = {"model": name, "run": run, "path": path}
    body = {"name": name, "source": f"{info['artifact_uri']}/{path}", "run_id": run}
    found = _change(actor, project, "model.register", after, "model-versions/create", body)
    return str(found["model_version"]["version"])


def _change(
    actor: User, project: Project, action: str, after: dict[str, Any], endpoint: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Write the audit row, then call the tracking server outside of a transaction, as that may take seconds.

    A call that fails adds a second row, so that no change is without one.
    """
    require_permission(actor, Permission.SUBMIT, project)
    with transaction.atomic():
        record_action(actor, action, project, after=after)
    release_connection()
    try:
        return call(project.public_id, "POST", endpoint, body)
    except FairwayError as error:
        with transaction.atomic():
            record_action(actor, f"{action}.failed", project, after=after | {"message": error.message})
        raise
