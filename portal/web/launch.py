"""Launch: one form from what to review, with a rail that says what would become of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST

from portal.access import Policy, Verb, can, parent_rows, policy, signed_in, visible_secrets
from portal.errors import FairwayError, Impossible, Invalid
from portal.lineage import lineage
from portal.models import Environment, NodePool, User
from portal.selectors import cluster
from portal.selectors.cluster import ModelStrip
from portal.selectors.environments import Offer, offers_for
from portal.selectors.jobs import job_for
from portal.selectors.machines import templates_for
from portal.selectors.shares import Share, shares_in
from portal.selectors.volumes import volumes_for
from portal.services.gangs import network_words
from portal.services.jobs import JobRequest, do_submit_job
from portal.web.idle_words import IdleRule, idle_rules_in
from portal.web.launch_form import LaunchForm, submit_projects
from portal.web.launch_start import initial_of, initial_of_fields, initial_of_template
from portal.web.quota_bars import Bar
from portal.web.signin import take_errors
from portal.web.start_check import StartCheck, check_start, nearest_ways
from portal.words.states import JobKind
from portal.words.volumes import VolumeKind

LADDER = (1, 2, 4, 8, 16, 32)
OVERRIDES = (
    "tasks",
    "gpus_per_task",
    "milli_per_gpu",
    "gpu_model",
    "cpu_milli",
    "memory_mib",
    "preemptible",
    "time_limit_s",
)
NAMES = {JobKind.WORKSPACE.value: "notebook", JobKind.TRAINING.value: "run", JobKind.SERVICE.value: "service"}


@dataclass(frozen=True)
class Rung:
    """One count on the ladder: what it would mean, and why it cannot be where it cannot."""

    count: int
    note: str
    now: bool = False
    closed: bool = False
    chosen: bool = False


@dataclass(frozen=True)
class ShownEnvironment:
    """One environment to choose; ``projects`` are public ids of those that may run it, None for all."""

    offer: Offer
    projects: list[str] | None


@policy(Policy.SIGNED_IN)
@require_http_methods(["GET", "POST"])
def launch(request: HttpRequest) -> HttpResponse:
    """The form, and its submit."""
    user = signed_in(request.user)
    if request.method == "GET":
        shown = _environments(user)
        form = LaunchForm(user, initial=_initial(request, user, shown))
        return render(request, "launch/page.html", _context(user, form, shown))
    form = LaunchForm(user, request.POST)
    refusal: StartCheck | None = None
    if form.is_valid():
        try:
            job = do_submit_job(user, form.request())
        except Invalid as wrong:
            take_errors(form, wrong)
        except Impossible as never:
            refusal = StartCheck(
                "never", "This can never start here", never.sentence, nearest_ways(never.facts)
            )
        except FairwayError as no:
            refusal = StartCheck("wrong", "Not launched", no.sentence)
        else:
            messages.success(request, f"{job.name} is submitted.")
            return redirect("job", public_id=job.public_id)
    context = _context(user, form, _environments(user)) | ({"check": refusal} if refusal else {})
    return render(request, "launch/page.html", context, status=422 if refusal else 400)


@policy(Policy.SIGNED_IN)
@require_POST
def check(request: HttpRequest) -> HttpResponse:
    """The rail and the review for the form as it stands; asked on every keystroke, a little delayed."""
    user = signed_in(request.user)
    return render(
        request, "launch/rail.html", _rail(user, LaunchForm(user, request.POST), ask=True) | {"oob": True}
    )


def _initial(request: HttpRequest, user: User, shown: list[ShownEnvironment]) -> dict[str, Any]:
    query = request.GET
    kind = query.get("kind", "")
    start: dict[str, Any] = {"kind": kind if kind in NAMES else JobKind.WORKSPACE.value}
    if query.get("like"):
        like = job_for(user, query["like"])
        start |= initial_of(user, like)
        if (like.environ or like.secrets) and not can(user, Verb.CONTROL, like):
            messages.info(
                request, f"The variables and secrets of {like.name} are not copied: you may not control it."
            )
    elif query.get("template"):
        found = templates_for(user).filter(public_id=query["template"]).first()
        start |= initial_of_template(found) if found else {}
    start |= initial_of_fields({name: query[name] for name in OVERRIDES if query.get(name)})
    start.setdefault("name", f"{NAMES[start['kind']]}-{timezone.now():%d%H%M}")
    if not start.get("project"):
        first = submit_projects(user).first()
        start["project"] = first.public_id if first else ""
    if not start.get("environment"):
        offered = _fitting(shown, start["kind"], start["project"])
        start["environment"] = offered.public_id if offered else ""
    return start


def _fitting(shown: list[ShownEnvironment], kind: str, project: str) -> Environment | None:
    """The first environment that suits: one with a tool for workspaces, rather one without for runs."""
    rows = [each.offer.environment for each in shown if each.projects is None or project in each.projects]
    if kind == JobKind.WORKSPACE.value:
        return min((row for row in rows if row.tool_port), key=lambda row: row.pk, default=None)
    return min(rows, key=lambda row: (bool(row.tool_port), row.pk), default=None)


def _environments(user: User) -> list[ShownEnvironment]:
    """What is offered to some project into which the person may launch, and to which."""
    parents = parent_rows()
    lines = {row.public_id: lineage(row.pk, parents.get) for row in submit_projects(user)}
    shown = []
    for offer in offers_for(user):
        allowed = [project for project, line in lines.items() if offer.is_for(line)]
        if offer.environment.enabled and (allowed or not offer.projects):
            shown.append(ShownEnvironment(offer, allowed if offer.projects else None))
    return shown


def _context(user: User, form: LaunchForm, shown: list[ShownEnvironment]) -> dict[str, Any]:
    return _rail(user, form) | {
        "form": form,
        "environments": shown,
        "secrets": visible_secrets(user).order_by("project__name", "name"),
        "volumes": volumes_for(user).exclude(kind=VolumeKind.HOME.value),
        "templates": templates_for(user).order_by("title")[:12],
        "projects_missing": not submit_projects(user).exists(),
    }


def _rail(user: User, form: LaunchForm, *, ask: bool = False) -> dict[str, Any]:
    strips = cluster.free_now(user)
    value = _value_of(form)
    request: JobRequest | None = None
    if form.is_bound:
        if form.is_valid():
            request = form.request()
    else:
        probe = LaunchForm(user, {key: value(key) for key in form.fields if value(key) not in (None, False)})
        if probe.is_valid():
            request = probe.request()
    if request is not None:
        found = check_start(user, request, strips, ask=ask)
    else:
        wrong = (
            {name: " ".join(str(e) for e in errors) for name, errors in form.errors.items()}
            if form.is_bound
            else {}
        )
        said = [
            f"{form[name].label}: {words}" if name in form.fields else words for name, words in wrong.items()
        ]
        sentence = " ".join(said) or "Fill in what is missing."
        found = StartCheck("wrong", "Not ready yet", sentence, wrong=wrong)
    shares = shares_in([request.project]) if request else []
    asked = request.tasks * request.gpus_per_task * request.milli_per_gpu if request else 0
    model, count = str(value("gpu_model") or ""), str(value("gpus_per_task") or "")
    return {
        "check": found,
        "request_now": request,
        "network": network_words(request.tasks, elastic=request.elastic, pool=request.pool)
        if request
        else "",
        "idle_rules": _idle_rules(request, strips),
        "strips": strips,
        "model": model,
        "kind": str(value("kind") or ""),
        "ladder": ladder(strips, model, count, shares),
        "after": [
            Bar(share, f"Quota after, {share.pool.name}", asked)
            for share in shares
            if _concerns(share, request, strips)
        ],
        "as_rest": rest_text(request) if request else "",
        "as_yaml": yaml_text(request) if request else "",
    }


def _value_of(form: LaunchForm) -> Any:
    return lambda name: form[name].value()


def _idle_rules(request: JobRequest | None, strips: list[ModelStrip]) -> list[IdleRule]:
    """What becomes of it where it may run, once nobody uses it; of workspaces on GPUs alone."""
    if request is None or request.kind != JobKind.WORKSPACE.value or not request.gpus_per_task:
        return []
    if request.pool is not None:
        return idle_rules_in(request.project, [request.pool])
    fitting = {pool for strip in strips if request.gpu_model in ("", strip.model) for pool in strip.pools}
    return idle_rules_in(request.project, NodePool.objects.filter(pk__in=fitting).order_by("name"))


def _concerns(share: Share, request: JobRequest | None, strips: list[ModelStrip]) -> bool:
    if request is None or (request.pool is not None and request.pool.pk != share.pool.pk):
        return False
    models = [strip for strip in strips if strip.model == request.gpu_model]
    return not request.gpu_model or any(share.pool.pk in strip.pools for strip in models)


def ladder(strips: list[ModelStrip], model: str, count: str, shares: list[Share]) -> list[Rung]:
    """The usual counts on one node: which fit now, which wait, and which this cluster or quota never allows."""
    fitting = [strip for strip in strips if model in ("", strip.model)]
    free = max((strip.largest_free for strip in fitting), default=0)
    largest = max((strip.largest_node for strip in fitting), default=0)
    limits = [limit for share in shares if (limit := _least_limit(share)) is not None]
    limit = max(limits) // 1000 if limits else None
    rungs = []
    for number in LADDER:
        if number > max(8, largest * 2):
            break
        if number > largest:
            note, now, closed = (f"largest node {largest}" if largest else "no such GPU"), False, True
        elif limit is not None and number > limit:
            note, now, closed = f"limit is {limit}", False, True
        elif number <= free:
            note, now, closed = "room now", True, False
        else:
            note, now, closed = "waits", False, False
        rungs.append(Rung(number, note, now, closed, str(number) == count))
    return rungs


def _least_limit(share: Share) -> int | None:
    """What neither the project nor one person may pass."""
    return min((n for n in (share.limit_milli, share.user_limit_milli) if n is not None), default=None)


def body_of(request: JobRequest) -> dict[str, Any]:
    """The request as the body of ``POST /api/v1/jobs``; what stands at its default is left out."""
    blank = JobRequest(name="", project=request.project, environment=request.environment)
    body: dict[str, Any] = {
        "name": request.name,
        "project": request.project.name,
        "environment": request.environment.name,
        "kind": request.kind,
    }
    if request.pool is not None:
        body["pool"] = request.pool.name
    for name in JobRequest.__dataclass_fields__:
        if name in body or name in ("pool", "template", "held", "after"):
            continue
        value = getattr(request, name)
        if value != getattr(blank, name) or name in ("gpus_per_task", "tasks"):
            body[name] = list(value) if name == "command" else dict(value) if name == "environ" else value
    body["after"] = [job.public_id for job in request.after]
    return {name: value for name, value in body.items() if value not in ([], {})}


def rest_text(request: JobRequest) -> str:
    """The request as an HTTP call."""
    body = json.dumps(body_of(request), indent=1, ensure_ascii=False)
    headers = ("POST /api/v1/jobs", "Authorization: Bearer $FAIRWAY_TOKEN", "Idempotency-Key: <a new uuid>")
    return "\n".join([*headers, "Content-Type: application/json", "", body])


def yaml_text(request: JobRequest) -> str:
    """The same as YAML; JSON words are YAML words, so that every value is quoted right."""
    lines = []
    for name, value in body_of(request).items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {json.dumps(item, ensure_ascii=False)}" for key, item in value.items()]
        else:
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
