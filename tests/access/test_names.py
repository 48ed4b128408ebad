"""No page, no REST answer and no frame tells a text of a project to whoever may not read it.

Every text that people or programs write into rows of a project is replaced by a word of its own. Then everything is
read that a stranger, a former member and a viewer get an answer to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.apps import apps
from django.contrib.postgres.fields import ArrayField
from django.db import models as columns
from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone

from portal import models
from portal.domain.jobs.job_spec import JobRole, roles_as_json
from portal.errors import FairwayError
from portal.live.websocket.topics import check_topic_access, initial_frame, parse_topic
from portal.services.jobs.job_templates import build_version
from portal.services.jobs.logs import write_log_bytes
from scheduler.cycle import run_cycle
from tests import factories
from tests.access.conftest import with_more
from tests.access.pages import PAGES
from tests.access.test_sockets import TOPICS
from tests.api.fixture_data import FixtureData
from tests.api.table import ADMIN, CONTROLLERS, INSIDE, MANAGERS, OWNER, ROWS, WORKERS
from tests.table_owner import update_as_owner

READERS = ("stranger", "former", "viewer")
SELF: frozenset[str] = frozenset()
"""For the person of the row alone."""

AUDIENCE: dict[type[columns.Model], dict[str, frozenset[str]]] = {
    models.Project: dict.fromkeys(("name", "title"), INSIDE),
    models.User: {"username": INSIDE, "full_name": INSIDE, "email": ADMIN},
    models.Job: dict.fromkeys(
        (
            "name",
            "message",
            "command",
            "program",
            "parameters",
            "launcher_options",
            "volumes",
            "preferred_nodes",
            "topology_constraint",
            "image_digest",
            "checkpoint_dir",
            "code_repository",
            "code_archive",
            "code_path",
            "code_ref",
            "code_host_key",
            "roles",
            "completion_role",
        ),
        INSIDE,
    )
    | dict.fromkeys(("env", "secrets", "rank_overrides"), CONTROLLERS),
    models.Sweep: dict.fromkeys(("name", "message", "metric", "parameters", "points"), INSIDE)
    | {"job": CONTROLLERS},
    models.Schedule: dict.fromkeys(("name", "cron", "notice"), INSIDE) | {"job": CONTROLLERS},
    models.ScheduleRun: {"message": INSIDE},
    models.Trial: dict.fromkeys(("message", "parameters"), INSIDE),
    models.LayerProfile: {"name": INSIDE},
    models.ProfileRun: dict.fromkeys(("name", "error"), INSIDE),
    models.Service: dict.fromkeys(("name", "message"), INSIDE),
    models.ServiceVersion: dict.fromkeys(
        ("readiness_path", "model_name", "model_version", "model_run", "message"), INSIDE
    )
    | {"job": CONTROLLERS},
    models.EnvironmentRecord: dict.fromkeys(
        ("problem", "git_directory", "git_branch", "git_remote", "untracked_files", "python", "packages"),
        INSIDE,
    )
    | {"conda_packages": INSIDE, "git_diff": CONTROLLERS},
    models.JobAnnotation: dict.fromkeys(("note", "tags"), INSIDE),
    models.JobEvent: dict.fromkeys(("message", "actor", "details"), INSIDE),
    models.Attempt: {"message": INSIDE, "failure_line": INSIDE, "resume_path": INSIDE},
    models.FailureRule: dict.fromkeys(("code", "title", "cause", "fix", "pattern", "changed_by"), ADMIN),
    models.AttemptObservation: {"listing_problem": INSIDE},
    models.Checkpoint: dict.fromkeys(("name", "problem", "pinned_by"), INSIDE),
    models.Task: {"status_message": INSIDE},
    models.JobVerdict: dict.fromkeys(("message", "details", "suggestion"), INSIDE),
    models.IdleExemption: {"reason": INSIDE},
    models.UserRequest: dict.fromkeys(("reason", "answer"), INSIDE),
    models.QuotaAddition: {"reason": INSIDE},
    models.Environment: dict.fromkeys(("name", "title", "description", "image", "image_digest"), INSIDE),
    models.DataSet: dict.fromkeys(("name", "description"), INSIDE),
    models.DataSetVersion: dict.fromkeys(("label", "path", "note", "measure_problem"), INSIDE),
    models.SavedJobView: dict.fromkeys(("name", "query"), INSIDE),
    models.Template: dict.fromkeys(("name", "title", "description", "fields", "parameters", "sweep"), INSIDE),
    models.TemplateVersion: dict.fromkeys(("fields", "parameters", "sweep", "created_by"), INSIDE),
    models.Volume: dict.fromkeys(("name", "path", "description"), INSIDE),
    models.QuotaChange: {"reason": INSIDE},
    models.Secret: {"name": WORKERS, "changed_by": WORKERS},
    models.Invitation: dict.fromkeys(("full_name", "email"), MANAGERS),
    models.ApiToken: {"name": SELF},
    models.FileRequest: {"path": SELF},
    models.Notice: dict.fromkeys(("title", "message"), SELF),
    models.NoticeDelivery: {"last_error": SELF},
    models.NoticeWebhook: {"host": SELF, "label": SELF},  # of a project: its managers
    models.NodeIncident: {"message": ADMIN},
    models.GpuAlert: dict.fromkeys(("subject", "note"), ADMIN),
    models.ClusterSettings: {"scheduler_alert": ADMIN},
    models.InvalidRow: dict.fromkeys(("row", "field", "message", "note"), ADMIN),
    models.FailedCycle: dict.fromkeys(("message", "field"), ADMIN),
    models.OrphanContainer: dict.fromkeys(("owner", "project"), ADMIN),
    models.RegistryLogin: dict.fromkeys(("host", "username", "changed_by"), ADMIN),
    models.AuditEntry: dict.fromkeys(("actor_name", "object_name", "before", "after", "reason"), ADMIN),
    models.AgentRollout: {"message": ADMIN},
    models.HostKeyChange: {"reason": ADMIN},
}
"""Who may read each column of text, beside the person of the row. A new column is put here, or into OTHERS."""

SHOWN_NOWHERE = {
    (models.Attempt, "failure_line"),
    (models.FileRequest, "path"),
    (models.GpuAlert, "subject"),
    (models.Invitation, "email"),
    (models.OrphanContainer, "owner"),
    (models.OrphanContainer, "project"),
}
"""Columns that this world shows to nobody, such as the answer to a request that nobody has decided."""

OTHERS: dict[str, str] = {
    # of the cluster, for everybody
    "ClusterSettings": "cluster_id name policy",
    "Announcement": "message",
    "ImagePresence": "state detail cuda image_pin",
    "Gpu": "uuid model health health_reason foreign_process_owner mig_profile bus_id",
    "GpuLink": "kind level",
    "Node": "addresses name state state_reason transport host ssh_user host_key runtime settings labels "
    "storage_problem gang_interface missing_requirements status_message boot_id agent_version "
    " agent_info breaker_state breaker_cause breaker_message unreachable_code",
    "NodePool": "name engine policy fabric_interface fabric_network fabric_devices fabric_adapters",
    "Reservation": "name reason",
    "Topology": "name levels",
    # words of the program, numbers, ids, hashes and sealed values
    "Allocation": "proof",
    "ApiToken": "secret_sha256 scopes",
    "Attempt": "state reason secret stop_reason stop_requested_by failure_rule resume_target code_commit",
    "AttemptWork": "cause",
    "AuditEntry": "action object_kind object_id",
    "BrowserSession": "session_data session_key",
    "Checkpoint": "validity",
    "Cycle": "trigger fair_share_breakdown",
    "EnvironmentRecord": "git_commit python_version node driver gpu_model",
    "Environment": "image_resolved_by runtime archive prefix min_driver image_cuda min_cuda tool tool_command",
    "UserRequest": "kind state role delays reservations effect",
    "FailedCycle": "kind trigger",
    "FileRequest": "target action",
    "CodeArchive": "sha256",
    "FailureRule": "action exit_codes reasons",
    "Forecast": "code jobs_ahead",
    "GpuAlert": "kind",
    "Invitation": "code_sha256",
    "Job": "kind state desired_state reason gpu_model mig_profile launcher nominated_placement retry_on "
    "notify retry_exit_codes resume_from on_stall gpu_switch typed_amounts",
    "LayerProfile": "content layers",
    "PipelinePlan": "answer",
    "JobEvent": "kind before after reason",
    "Lease": "name holder",
    "NodeOperation": "kind steps reason program_sha256 new_host",
    "HostKeyChange": "old_key new_key",
    "NodeIncident": "kind",
    "Notice": "kind",
    "NoticeDelivery": "channel state",
    "NoticePreferences": "channels",
    "NoticeWebhook": "channel events url_digest encrypted_url encrypted_secret",
    "OutboxMessage": "name arguments queue",
    "AttemptProgress": "workload_fingerprint scaling_fingerprint gpu_model launcher",
    "Project": "policy egress_allow",
    "QuotaChange": "before after",
    "RankProgress": "reports",
    "RegistryLogin": "encrypted_password",
    "ReportDayRow": "grouping",
    "Rendezvous": "address network devices adapters interfaces",
    "Secret": "encrypted_value",
    "JobSignal": "signal",
    "MagicLink": "code_sha256",
    "JobVerdict": "code jobs_ahead",
    "Task": "state container ports gang_address gang_ports eviction_reason",
    "Service": "access state",
    "ServiceVersion": "state",
    "Schedule": "overlap time_zone",
    "Sweep": "searcher direction state",
    "Trial": "state search_state",
    "DataSet": "visibility",
    "Template": "kind category scope",
    "TemplateVersion": "kind",
    "SchedulerCounters": "counts",
    "AttemptSeconds": "rows",
    "OrphanContainer": "name job gpus ports decision",
    "NodeMetricsMinute": "gpu_uuids utilisation_percent memory_used_mib power_watts temperature_c energy_joules "
    "holders tasks",
    "User": "password timezone language",
    "Volume": "kind scope",
    "VolumeUsage": "problem",
    "WorkspaceSession": "cookie_sha256 session_key",
    "WorkspaceShare": "access",
    "WorkspaceTicket": "code_sha256 session_key",
    # given back to the person who asked alone, or to nobody
    "InvalidRow": "kind",
    "IdempotencyKey": "key route body_sha256 body",
    "BulkOperation": "action jobs results",
    "EngineQuery": "kind body answer",
    "QuotaReplay": "quotas digest error result",
    "Terminal": "session_key secret error",
    "NotebookListing": "notebooks problem",
    "SavedImage": "problem",
}


def text_columns(model: type[columns.Model]) -> set[str]:
    """The columns of a model that may hold text of people or programs."""
    kinds = (columns.CharField, columns.TextField, columns.JSONField, ArrayField)
    return {
        each.name
        for each in model._meta.fields
        if isinstance(each, kinds) and not each.choices and each.name != "public_id"
    }


def test_every_column_of_text_has_an_audience() -> None:
    for model in apps.get_app_config("portal").get_models():
        known = set(AUDIENCE.get(model, {})) | set(OTHERS.get(model.__name__, "").split())
        assert text_columns(model) == known, model.__name__


# -- the marked world ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A word that stands in one column of one row. ``owner`` is the actor whose row it is, if it is anybody's."""

    model: type[columns.Model]
    column: str
    audience: frozenset[str]
    owner: str

    def may_read(self, actor: str) -> bool:
        return actor in self.audience or actor == self.owner


@dataclass
class Marked:
    """The world, and every mark by its word."""

    fixture_data: FixtureData
    marks: dict[str, Mark] = field(default_factory=dict)

    def word(self, mark: Mark) -> str:
        """A new word for a mark."""
        word = f"mk{len(self.marks):04d}z"
        self.marks[word] = mark
        return word

    def unreadable(self, actor: str, text: str) -> list[tuple[str, str]]:
        """Model and column of the marks in a text that the actor may not read."""
        found = {self.marks[word] for word in re.findall(r"mk\d{4}z", text.lower())}
        return sorted((mark.model.__name__, mark.column) for mark in found if not mark.may_read(actor))


@pytest.fixture
def fixture_data(transactional_db: None) -> FixtureData:
    """A fresh world in the database itself: a cycle decides on it."""
    return with_more()


@pytest.fixture
def marked(fixture_data: FixtureData) -> Marked:
    """The world with a mark in every text of the project, and the verdicts of a cycle that has read them."""
    project, names = fixture_data.rows["project"], fixture_data.names
    inner = factories.environment("inner")
    inner.projects.add(project)
    names["inner"] = inner.public_id
    template = models.Template.objects.create(
        name="inner", title="i", kind="training", environment=inner, fields={"env": {}}
    )
    build_version(template, "m").save()
    names["inner_template"] = template.public_id
    outsider = fixture_data.people["stranger"]
    own = models.Project.objects.get(name="elsewhere")
    own_job = factories.job(outsider, own, fixture_data.rows["batch"], name="own", gpus_per_task=4)
    names["own_job"] = own_job.public_id
    models.Dependency.objects.create(job=own_job, depends_on=fixture_data.rows["job"])
    left = models.Attempt.objects.get(job=fixture_data.rows["running"])
    models.Attempt.objects.filter(pk=left.pk).update(
        preempted_for=own_job, stop_reason="reclaimed", stop_requested_at=timezone.now()
    )
    models.NodeIncident.objects.create(
        node=fixture_data.rows["node"],
        at=timezone.now(),
        kind="early_failures",
        job=fixture_data.rows["running"],
        message="x",
    )
    models.ProfileRun.objects.create(job=fixture_data.rows["job"], name="x")
    both = models.Volume.objects.create(name="both", kind="host_path", path="/data/both")
    both.projects.add(own, project)
    open_to_all = [both, *(fixture_data.rows[key] for key in ("lab", "batch", "template"))]
    marked = Marked(fixture_data)
    for model, audiences in AUDIENCE.items():
        if model is models.JobVerdict:  # after the models that its sentences are made of
            assert run_cycle("test", "holder") is not None
            assert models.JobVerdict.objects.filter(job=own_job).exists()
        for row in model.objects.order_by("pk"):  # type: ignore[attr-defined]
            if row not in (own, own_job, *open_to_all) and getattr(row, "job", None) != own_job:
                _mark(marked, row, audiences)
    for job, audience in (("running", INSIDE), ("running_workspace", OWNER | ADMIN)):
        word = marked.word(Mark(models.Job, "log", audience, "member"))
        write_log_bytes(names[job], 1, 0, "k8s", 0, f"2026-11-21T07:00:00.000001Z stdout F {word}\n".encode())
    return marked


def _mark(marked: Marked, row: Any, audiences: dict[str, frozenset[str]]) -> None:
    written = {}
    for column, audience in audiences.items():
        if isinstance(row, models.NoticeWebhook) and row.user is None:
            audience = MANAGERS
        word = marked.word(Mark(type(row), column, audience, _owner_of(marked.fixture_data, row)))
        written[column] = _text_for(column, row, word)
    if isinstance(row, models.AuditEntry):  # rows that are there cannot be changed
        models.AuditEntry.objects.create(action="job.cancel", object_kind="job", object_id="x", **written)
    else:
        if "roles" in written:  # a job with roles has the amounts of its roles
            written["role_gpus"], written["min_tasks"] = 0, None
        update_as_owner(type(row).objects.filter(pk=row.pk), **written)


def _owner_of(fixture_data: FixtureData, row: Any) -> str:
    """The actor whose row it is; what a former member left in the project is not theirs to read."""
    person = row if isinstance(row, models.User) else None
    if isinstance(row, models.ApiToken | models.Secret):
        person = row.owner
    if isinstance(row, models.Notice | models.NoticeDelivery):
        person = row.recipient if isinstance(row, models.Notice) else row.notice.recipient
    if isinstance(row, models.NoticeWebhook):
        person = row.user
    return next((actor for actor, user in fixture_data.people.items() if user == person), "")


def _text_for(column: str, row: Any, word: str) -> Any:
    texts: dict[str, Any] = {
        "env": {word.upper(): word},
        **{
            name: [word]
            for name in ("tags", "packages", "conda_packages", "untracked_files", "preferred_nodes")
        },
        "launcher_options": {"autotune_log_file": word},
        "rank_overrides": {"0": {"WORD": word}},
        "roles": roles_as_json(
            (JobRole(name=word, command=(word,), gpus_per_task=0, cpu_milli=1000, memory_mib=64),)
        ),
        "command": ["true", word],
        "volumes": [{"volume": word, "target": f"/{word}", "read_only": True}],
        "secrets": [{"secret": word, "owner_type": "me", "variable": "WORD"}],
        "topology_constraint": {"topology": word, "required": word, "preferred": None},
        "email": f"{word}@example.org",
        "path": f"/{word}",
        "suggestion": {"kind": "x", "message": word, "fields": {}},
        "fields": {"env": {"WORD": word}},
        "job": {"name": "n", "command": ["true"], "env": {"WORD": word}},
        "points": [{"lr": word}],
    }
    if column == "parameters" and isinstance(row, models.Template | models.TemplateVersion):
        return [{"name": "note", "type": "text", "default": word}]
    if column == "sweep":
        return {"searcher": "random", "metric": word}
    if column == "parameters":
        return {"lr": [0.1, word]} if isinstance(row, models.Sweep) else {"lr": 0.1, "note": word}
    if column == "command" and row.kind == "workspace":
        return []
    if column in ("details", "before", "after"):
        return {"word": word}
    return texts.get(column, word)


# -- everything that is read -----------------------------------------------------------------------

LIVE_PARTS = ("home", "cluster", "node", "queue", "job", "recovery", "alerts", "scheduler")


def answers(marked: Marked, actor: str) -> Iterator[tuple[str, str]]:
    """The text of every page, REST answer and first frame that the actor gets, with its address."""
    fixture_data, client = marked.fixture_data, marked.fixture_data.client(actor)
    names = fixture_data.names_of(actor) | {"member": fixture_data.people[actor].public_id}

    def text_of(answer: HttpResponse) -> str:
        body = b"".join(answer.streaming_content) if answer.streaming else answer.content
        return body.decode(errors="replace")

    for row in (*PAGES, *ROWS):
        if row.method != "get" or actor not in row.allowed or row.name == "schema":
            continue
        if (
            actor == "admin" and row.allowed != ADMIN and row.name != "node"
        ):  # the owner of the work reads the rest
            continue
        path = row.path.format(**names)
        path = path if path.startswith("/") else f"/api/v1/{path}"
        yield path, text_of(client.get(path))
        if row.name in LIVE_PARTS and row in PAGES:
            yield f"{path} (live)", text_of(client.get(path, headers={"HX-Request": "true"}))
    more = [
        f"{reverse('launch')}?template={names['inner_template']}",
        f"/api/v1/templates/{names['inner_template']}/versions/",
        reverse("edit-template", args=[names["inner_template"]]),
        "/api/v1/usage/?by=user",
        "/api/v1/environments/?limit=100",
        f"/api/v1/jobs/{names['own_job']}/",
        reverse("job", args=[names["own_job"]]),
    ]
    for key in ("running", "job", "ended", "workspace"):
        more += [f"{reverse('launch')}?like={names[key]}", reverse("job-run", args=[names[key]])]
        more += [f"/api/v1/jobs/{names[key]}/", f"/api/v1/jobs/{names[key]}/events/"]
    if actor == "admin":  # the cycle found the row of this world valid, which ended its alert
        more.append("/api/v1/scheduler/invalid-rows/?resolved=true")
    for path in more:
        yield path, text_of(client.get(path))
    body = {
        "name": "x",
        "project": "elsewhere",
        "environment": "batch",
        "command": ["true"],
        "gpus_per_task": 4,
    }
    yield (
        "jobs_preview",
        text_of(client.post("/api/v1/jobs/preview/", json.dumps(body), content_type="application/json")),
    )
    body |= {"template": names["inner_template"]}
    yield "launch", text_of(client.post("/api/v1/jobs/", json.dumps(body), content_type="application/json"))
    yield from frames(marked, actor, names)


def frames(marked: Marked, actor: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The first frame of every topic that the actor may watch."""
    user = marked.fixture_data.people[actor]
    for name in TOPICS:
        try:
            topic = parse_topic(name.format(**names), user)
            check_topic_access(user, topic)
            yield name, json.dumps(initial_frame(user, topic), default=str)
        except FairwayError as error:
            yield name, error.message


@pytest.mark.parametrize("actor", READERS)
def test_users_read_only_what_they_may(actor: str, marked: Marked) -> None:
    reported = {
        path: columns_told
        for path, text in answers(marked, actor)
        if (columns_told := marked.unreadable(actor, text))
    }
    assert reported == {}, actor


def test_administrators_and_owners_read_every_marked_column(marked: Marked) -> None:
    texts = [text.lower() for actor in ("admin", "member") for _, text in answers(marked, actor)]
    words = set(re.findall(r"mk\d{4}z", " ".join(texts)))
    shown = {(marked.marks[word].model, marked.marks[word].column) for word in words}
    expected = {(model, column) for model, audiences in AUDIENCE.items() for column in audiences}
    assert expected - shown == SHOWN_NOWHERE
