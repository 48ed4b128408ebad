"""Turns a notebook of a workspace into a batch job: lists the notebooks, and makes a template from one.

The template has the image, volumes, secrets and amounts of the workspace, and the parameters of the notebook.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.engines.replies import ListedNotebook
from portal.access import Permission, require_permission
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.notebooks import (
    executed_notebook,
    notebook_command,
    notebook_program,
    notebook_title,
    read_notebook_parameters,
)
from portal.domain.jobs.parameters import PLACEHOLDER
from portal.domain.jobs.template_parameters import NOT_IN_TEMPLATES
from portal.domain.states import AttemptState, JobKind, JobState
from portal.errors import Conflict, NotFound
from portal.models import Job, Node, NotebookListing, Task, Template, User
from portal.outbox import notify_node
from portal.services.audit import record_action
from portal.services.environments.process_environment import JUPYTERLAB_TOOL
from portal.services.jobs.job_templates import TemplateInput, do_save_template
from portal.services.jobs.reruns import checked_out_commit

ANSWER_TIMEOUT = dt.timedelta(seconds=30)
LIST_NOTEBOOKS_HINT = "notebooks"


def offers_notebooks(job: Job) -> bool:
    """Return True for a workspace with JupyterLab."""
    return job.kind == JobKind.WORKSPACE.value and job.environment.tool == JUPYTERLAB_TOOL


def do_request_notebooks(user: User, job: Job) -> NotebookListing:
    """Request a listing from the node that has the home. Raise Conflict if the workspace never ran."""
    require_permission(user, Permission.ENTER, job)
    if not offers_notebooks(job):
        raise Conflict(_("Only workspaces with JupyterLab have notebooks."), code="no_notebooks")
    tasks = Task.objects.filter(attempt__job=job, running_at__isnull=False, rank=0)
    task = tasks.select_related("node").order_by("-attempt__number").first()
    if task is None:
        raise Conflict(_("The workspace has not started yet."), code="task_not_running")
    if not task.node.reachable:
        raise Conflict(
            _("{name} is not reachable at the moment.").format(name=task.node.name), code="node_unreachable"
        )
    with transaction.atomic():
        listing, __ = NotebookListing.objects.update_or_create(
            job=job, defaults={"node": task.node, "requested_at": Now(), "listed_at": None, "problem": ""}
        )
        record_action(user, "notebook.list", job)
        notify_node(task.node.public_id, LIST_NOTEBOOKS_HINT)
    listing.refresh_from_db()
    return listing


def get_listing(user: User, job: Job) -> NotebookListing | None:
    """Return the latest listing; None if there was none. Raise NotFound or Forbidden for other users."""
    require_permission(user, Permission.ENTER, job)
    return NotebookListing.objects.select_related("node").filter(job=job).first()


def is_waiting(listing: NotebookListing | None) -> bool:
    """Return True while the node may still answer."""
    return (
        listing is not None
        and listing.listed_at is None
        and timezone.now() - listing.requested_at < ANSWER_TIMEOUT
    )


@dataclass(frozen=True)
class NotebookRun:
    """The notebook that a job runs, the notebook that it writes, and a workspace of the owner that can open both."""

    path: str
    output: str
    workspace: Job | None

    @property
    def address(self) -> str:
        """The page of the output in JupyterLab."""
        return f"/lab/tree/{quote(self.output)}"


def find_notebook_run(user: User, job: Job) -> NotebookRun | None:
    """Return the notebook of a job that was made from one; None for other jobs."""
    if (paths := executed_notebook(job.program, job.public_id)) is None:
        return None
    workspace = None
    if job.owner_id == user.pk:
        ready = {
            "attempts__ready_at__isnull": False,
            "attempts__stop_requested_at": None,
            "attempts__state": AttemptState.RUNNING.value,
        }
        rows = Job.objects.filter(
            owner=user, kind=JobKind.WORKSPACE.value, environment__tool=JUPYTERLAB_TOOL, state=JobState.RUNNING.value
        )  # fmt: skip
        workspace = rows.filter(**ready).order_by("-id").first()
    return NotebookRun(*paths, workspace)


def do_create_notebook_template(user: User, job: Job, path: str) -> Template:
    """Save the batch job of a listed notebook as a template of the user, which gets a new version if it exists."""
    listing = get_listing(user, job)
    row = next((each for each in listing.notebooks if each["path"] == path), None) if listing else None
    if row is None:
        raise NotFound(_("There is no such notebook among those that were listed last."))
    title = notebook_title(path)
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].rstrip("-")
    kept = " Its other parameters keep their values: " + ", ".join(row["fixed"]) + "." if row["fixed"] else ""
    given = TemplateInput(
        name=f"nb-{slug}-{job.public_id}" if slug else f"nb-{job.public_id}",
        title=f"{title[:150]}, as a job",
        description=f"Runs {path} of the home with papermill and saves the result beside it.{kept}",
        environment=job.environment,
        fields=_job_fields_of(job, title)
        | {"command": notebook_command(row["parameters"]), "program": notebook_program(path)},
        parameters=row["parameters"],
    )
    existing = Template.objects.filter(owner=user, name=given.name).first()
    return do_save_template(user, given, existing)


def _job_fields_of(job: Job, title: str) -> dict[str, Any]:
    """Return what the workspace requests, apart from defaults, as fields of a template."""
    fields = {
        name: value
        for name, rule in job_fields().items()
        if rule.copied and name not in NOT_IN_TEMPLATES and (value := getattr(job, name)) != rule.default
    }
    fields = {name: value for name, value in fields.items() if value not in ([], {}, None)}
    fields["name"] = re.sub(r"[^A-Za-z0-9._ -]+", "-", title)[:60].strip("._ -") or "notebook"
    if "env" in fields:  # a text that looks like a placeholder stays as it is
        fields["env"] = {
            name: PLACEHOLDER.sub(lambda match: "{{" + match[1] + "}}" if match[1] else match[0], value)
            for name, value in fields["env"].items()
        }
    if commit := checked_out_commit(job):
        fields["code_ref"] = commit
    return fields


# -- answered by the node's actor --------------------------------------------------------------------


def listings_to_make(node: Node) -> list[NotebookListing]:
    """Return the recent requests on a node; mostly there are none."""
    waiting = Q(listed_at__isnull=True, requested_at__gt=Now() - ANSWER_TIMEOUT)
    return list(
        NotebookListing.objects.filter(waiting, node=node).select_related("job__owner", "job__project")
    )


def record_notebooks(listing: NotebookListing, rows: tuple[ListedNotebook, ...], problem: str) -> None:
    """Store the answer of the node."""
    notebooks = []
    for row in rows:
        parameters, fixed = read_notebook_parameters(row.source_b64)
        shown = {"path": row.path, "modified_s": row.modified_s, "size_bytes": row.size_bytes}
        notebooks.append({**shown, "parameters": parameters, "fixed": fixed, "problem": row.problem})
    NotebookListing.objects.filter(pk=listing.pk, requested_at=listing.requested_at).update(
        listed_at=Now(), notebooks=notebooks, problem=problem[:300]
    )
