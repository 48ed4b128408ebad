"""Launch preview: the scheduler's answer if it arrives in time, else an estimate marked as such."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, field, replace
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _

from portal.domain.formatting import short_gpu_model
from portal.domain.jobs.job_spec import job_fields
from portal.engine_client import query_would_start
from portal.errors import FairwayError, InvalidRequest, Unsatisfiable
from portal.models import NodePool, User
from portal.selectors.cluster.cluster_overview import GpuModelSummary, matching_summaries
from portal.selectors.scheduling.preemption_preview import (
    PreemptionCandidate,
    preemption_candidates,
    total_lost_gpu_seconds,
)
from portal.services.jobs.start_alternatives import StartTimes, list_start_alternatives
from portal.services.jobs.submission import JobRequest, is_live, preview_query_body, validate_request
from portal.web.display.formatting import gpus as gpu_words
from portal.web.jobs.launch.initial_values import initial_from_api_fields

ENGINE_TIMEOUT_S = 0.8
"""Time limit of the scheduler's answer before the estimate from free GPUs is shown."""


@dataclass(frozen=True)
class Suggestion:
    """A change of form fields. ``interval`` is the start with it; None if that is now, or is not forecast."""

    message: str
    fields: dict[str, Any] = field(default_factory=dict)
    interval: StartTimes | None = None
    speed_percent: int | None = None

    @property
    def assignments(self) -> str:
        """The fields as ``launch.js`` applies them."""
        return ";".join(f"{name}={'' if value is None else value}" for name, value in self.fields.items())


@dataclass(frozen=True)
class LaunchPreview:
    """``kind``: now, waits, never, wrong (a field is invalid), unknown (the scheduler did not answer) or pending."""

    kind: str
    title: str
    message: str = ""
    suggestions: list[Suggestion] = field(default_factory=list)
    field_errors: dict[str, str] = field(default_factory=dict)
    low: dt.datetime | None = None
    high: dt.datetime | None = None
    middle: dt.datetime | None = None
    interval_missing: str = ""
    victims: list[PreemptionCandidate] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """Names of the nodes on which it would start now; empty if it would not, or if the scheduler did not answer."""

    @property
    def lost_gpu_seconds(self) -> float:
        """Work that preempted jobs would lose, in GPU-seconds."""
        return total_lost_gpu_seconds(self.victims)

    @property
    def field_errors_json(self) -> str:
        return json.dumps(self.field_errors)

    @property
    def hidden_victims(self) -> int:
        """Number of preempted jobs that the reader may not see."""
        return sum(one.job is None for one in self.victims)

    @property
    def may_launch(self) -> bool:
        """False when submission would be refused."""
        return self.kind not in ("never", "wrong")


def preview_launch(
    user: User, request: JobRequest, strips: list[GpuModelSummary], *, query_engine: bool
) -> LaunchPreview:
    """Return what would happen to the request now; ``query_engine`` waits for the scheduler's answer."""
    try:
        validate_request(user, request)
    except Unsatisfiable as error:
        return preview_unsatisfiable(error)
    except InvalidRequest as error:
        errors = errors_by_form_field(error.fields)
        return LaunchPreview("wrong", _("Not ready yet"), error.message, field_errors=errors)
    except FairwayError as error:
        return LaunchPreview("wrong", _("Not allowed"), error.message)
    answer = (
        query_would_start(preview_query_body(user, request), wait_s=ENGINE_TIMEOUT_S)
        if query_engine
        else None
    )
    if answer is None or "error" in answer:
        return _preview_from_free_gpus(request, strips)
    return preview_from_engine(user, answer)


def start_suggestions(user: User, request: JobRequest) -> list[Suggestion]:
    """Return the changes with which a valid request would start sooner, each with its start."""
    return [
        Suggestion(
            each.change[:1].upper() + each.change[1:],
            form_fields(each.fields),
            each.interval,
            each.speed_percent,
        )
        for each in list_start_alternatives(user, request)
    ]


def errors_by_form_field(errors: dict[str, str]) -> dict[str, str]:
    """Return the messages of a service with the form's names of the fields."""
    rules = job_fields()
    return {rules[name].form_name if name in rules else name: message for name, message in errors.items()}


def preview_from_engine(user: User, answer: dict[str, Any]) -> LaunchPreview:
    """Return the scheduler's answer as a preview, with the jobs that would be preempted."""
    victims = preemption_candidates(user, answer.get("victims") or [])
    return replace(_preview_from_answer(answer), victims=victims)


def _preview_from_answer(answer: dict[str, Any]) -> LaunchPreview:
    ways = [
        Suggestion(str(way["message"]), form_fields(dict(way.get("fields") or {})))
        for way in answer.get("alternatives", [])
    ]
    verdict = answer.get("verdict") or {}
    message = str(verdict.get("message", ""))
    if answer.get("starts_now"):
        nodes = list(answer.get("where", []))
        message = _("It fits on {where}.").format(where=", ".join(nodes)) if nodes else ""
        return LaunchPreview("now", _("It starts now"), message, nodes=nodes)
    if answer.get("unsatisfiable"):
        return LaunchPreview("never", _("This can never start here"), message, ways)
    interval = answer.get("interval")
    low, middle, high = (
        _from_timestamp(interval[name]) if interval else None for name in ("p10_s", "p50_s", "p90_s")
    )
    title = _("Would preempt other jobs") if answer.get("victims") else _("It would wait")
    missing = str(answer.get("interval_missing") or "")
    return LaunchPreview(
        "waits", title, message, ways, low=low, middle=middle, high=high, interval_missing=missing
    )


def form_fields(changed: dict[str, Any]) -> dict[str, Any]:
    """Return the new values of a change with the form's field names."""
    rules = job_fields()
    blank = {
        rules[name].form_name if name in rules else name: value
        for name, value in changed.items()
        if name not in rules or value in (None, "")
    }
    return blank | initial_from_api_fields(changed)


def _from_timestamp(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def preview_unsatisfiable(refusal: Unsatisfiable) -> LaunchPreview:
    """Return the refusal with the nearest feasible request."""
    suggestions = _nearest_suggestions(refusal.details)
    return LaunchPreview("never", _("This can never start here"), refusal.message, suggestions)


def _nearest_suggestions(details: dict[str, Any]) -> list[Suggestion]:
    nearest = details.get("nearest")
    if not isinstance(nearest, dict):
        return []
    fields = initial_from_api_fields(nearest)
    parts = [
        f"{fields[rule.form_name]} {_(rule.nouns[fields[rule.form_name] != 1])}"
        for rule in job_fields().values()
        if rule.nouns and rule.form_name in fields
    ]
    parts += [str(fields["gpu_model"])] if fields.get("gpu_model") else []
    if "pool" in nearest:
        pool = NodePool.objects.filter(public_id=nearest["pool"]).first()
        fields["pool"], parts = (
            nearest["pool"],
            [*parts, _("the pool {name}").format(name=pool.name) if pool else _("another pool")],
        )
    if not fields:
        return []
    return [Suggestion(_("Nearest feasible request: {parts}").format(parts=", ".join(parts)), fields)]


def _preview_from_free_gpus(request: JobRequest, strips: list[GpuModelSummary]) -> LaunchPreview:
    """Estimate from free GPUs only, without queue and quota: it says "fits", not "starts"."""
    needed = request.min_tasks * request.gpus_per_task if request.min_tasks else request.total_gpus
    total = needed * request.milli_per_gpu
    if request.start_after and request.start_after > timezone.now():
        return LaunchPreview("waits", _("It would wait"), _("It does not start before its start time."))
    if any(is_live(job) for job in request.dependencies):
        return LaunchPreview("waits", _("It would wait"), _("It starts after its dependencies."))
    if needed == 0:
        return LaunchPreview(
            "unknown", _("Needs no GPU"), _("It starts when a node has the CPU and memory free.")
        )
    fitting = matching_summaries(strips, request.gpu_model, request.mig_profile)
    space = max((strip.largest_free for strip in fitting), default=0)
    one_model = request.tasks > 1 and not (request.allow_mixed_gpus or request.min_tasks)
    by_model = [strip.free for strip in fitting]
    free = max(by_model, default=0) if one_model else sum(by_model)
    if space >= request.gpus_per_task and free >= needed:
        text = (
            _("{gpus} fits on the free GPUs; the next cycle decides.")
            if total <= 1000
            else _("{gpus} fit on the free GPUs; the next cycle decides.")
        )
        message = text.format(gpus=gpu_words(total))
        return LaunchPreview("unknown", _("Fits on free GPUs"), message)
    model = _(" or ").join(map(short_gpu_model, request.gpu_model.split("|")))
    model = f" {model}" if model else ""
    return LaunchPreview(
        "waits",
        _("It would wait"),
        _("It needs {gpus_per_task}{model} on one node; at most {space} free on one node now.").format(
            gpus_per_task=request.gpus_per_task, model=model, space=space
        ),
    )
