"""Changes of a request with which it would start sooner, each with its own start forecast."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.domain.formatting import format_duration
from portal.domain.states import JobKind
from portal.engine_client import query_would_start
from portal.models import Gpu, User
from portal.selectors.jobs.progress import MeasuredSpeeds, measure_speeds
from portal.services.jobs.submission import JobRequest, preview_query_body

MAX_FORECASTS = 8
"""Previews of changed requests for one answer. Each takes its turn in worker-ask, so that the start preview of
another user waits for one of them at most."""
TIME_BUDGET_S = 2.5
"""No further preview is requested after this time."""
QUERY_TIMEOUT_S = 1.0
MAX_SHOWN = 6
MAX_OTHER_MODELS = 2
SHORTER_LIMITS_S = (12 * 3600, 4 * 3600, 3600)
MIN_GAIN_S = 60.0
MIN_GAIN_PART = 0.1
"""A start that is sooner by less than this, or by less than this part of the wait, is not shown."""


class StartTimes(NamedTuple):
    """The expected start; 8 of 10 starts should be between p10 and p90."""

    p10_at: dt.datetime
    p50_at: dt.datetime
    p90_at: dt.datetime

    @classmethod
    def from_answer(cls, interval: dict[str, float] | None) -> StartTimes | None:
        """Return the times of the scheduler's interval, which are in Unix seconds."""
        if interval is None:
            return None
        return cls(
            *(dt.datetime.fromtimestamp(interval[name], dt.UTC) for name in ("p10_s", "p50_s", "p90_s"))
        )


class Change(NamedTuple):
    """New values of a request by API name, and the change as a phrase. The first useful one of a kind is kept."""

    kind: str
    text: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class StartAlternative:
    """``speed_percent`` is the measured throughput relative to the request; None if not measured."""

    kind: str
    change: str
    fields: dict[str, Any] = field(default_factory=dict)
    interval: StartTimes | None = None
    speed_percent: int | None = None

    @property
    def starts_now(self) -> bool:
        return self.interval is None


def list_start_alternatives(user: User, request: JobRequest) -> list[StartAlternative]:
    """Return the changes of a valid request with which it would start sooner, soonest first.

    Empty if it would start now, if no change helps, or if the scheduler does not respond.
    """
    deadline_s = time.monotonic() + TIME_BUDGET_S
    present = _preview(user, request)
    if present is None or present["starts_now"] or _waits_for_dependency(present):
        return []
    speeds = measure_speeds(request)
    wait_until_s = _median_s(present)
    found = [_alternative(Change(way["kind"], way["change"], way["fields"]), None, request, speeds)
             for way in present["alternatives"]]  # fmt: skip
    settled = {each.kind for each in found}
    soonest_s: dict[str, float] = {}
    asked = 0
    for change in _candidate_changes(request):
        if change.kind in settled:
            continue
        if asked == MAX_FORECASTS or time.monotonic() > deadline_s:
            break
        asked += 1
        answer = _preview(user, replace(request, **change.fields))
        if answer is None or answer["unsatisfiable"]:
            continue
        if answer["starts_now"]:
            settled.add(change.kind)
        elif not _is_sooner(_median_s(answer), soonest_s.get(change.kind, wait_until_s)):
            continue
        soonest_s[change.kind] = _median_s(answer)
        interval = None if answer["starts_now"] else answer["interval"]
        found.append(_alternative(change, interval, request, speeds))
    earliest = dt.datetime.min.replace(tzinfo=dt.UTC)
    found.sort(key=lambda each: each.interval.p50_at if each.interval else earliest)
    return found[:MAX_SHOWN]


def _preview(user: User, request: JobRequest) -> dict[str, Any] | None:
    answer = query_would_start(preview_query_body(user, request), wait_s=QUERY_TIMEOUT_S)
    return None if answer is None or "error" in answer else answer


def _waits_for_dependency(answer: dict[str, Any]) -> bool:
    return (answer["verdict"] or {}).get("code") == "dependency"


def _median_s(answer: dict[str, Any]) -> float:
    """Return the median start in Unix time; infinity if there is no forecast."""
    return float(answer["interval"]["p50_s"]) if answer["interval"] else math.inf


def _is_sooner(start_s: float, than_s: float) -> bool:
    if math.isinf(than_s):
        return math.isfinite(start_s)
    return than_s - start_s >= max(MIN_GAIN_S, MIN_GAIN_PART * (than_s - time.time()))


def _alternative(
    change: Change, interval: dict[str, float] | None, request: JobRequest, speeds: MeasuredSpeeds
) -> StartAlternative:
    tasks = int(change.fields.get("tasks", request.tasks))
    gpus = tasks * int(change.fields.get("gpus_per_task", request.gpus_per_task))
    same_model = "gpu_model" not in change.fields
    speed = speeds.relative_percent((request.total_gpus, request.tasks), (gpus, tasks))
    changed = (gpus, tasks) != (request.total_gpus, request.tasks)
    return StartAlternative(
        change.kind,
        change.text,
        dict(change.fields),
        StartTimes.from_answer(interval),
        speed if changed and same_model else None,
    )


def _candidate_changes(request: JobRequest) -> Iterator[Change]:
    """Yield changes to try, those of one kind by how little they change."""
    yield from _shorter_limits(request)
    if not request.roles:
        yield from _smaller_requests(request)
    yield from _other_models(request)
    if request.pool is not None:
        yield Change(
            "any_pool", _("in any pool instead of {name}").format(name=request.pool.name), {"pool": None}
        )
    if request.tasks > 1 and not request.allow_mixed_gpus:
        yield Change("mixed_gpus", _("with different GPUs"), {"allow_mixed_gpus": True})
    if not request.preemptible:
        yield Change("preemptible", _("as a preemptible job"), {"preemptible": True})


def _shorter_limits(request: JobRequest) -> Iterator[Change]:
    """Yield shorter time limits: a job that ends before a reservation begins may start before it."""
    if request.kind == JobKind.SERVICE.value:
        return
    present_s = request.time_limit_s
    for limit_s in SHORTER_LIMITS_S:
        if present_s is None or limit_s < present_s:
            before = _("none") if present_s is None else format_duration(present_s)
            text = _("with a time limit of {limit} instead of {before}").format(
                limit=format_duration(limit_s), before=before
            )
            yield Change("shorter_limit", text, {"time_limit_s": limit_s})


def _smaller_requests(request: JobRequest) -> Iterator[Change]:
    count = request.gpus_per_task
    is_training = request.kind == JobKind.TRAINING.value
    distributed = is_training and (request.launcher != "none" or request.tasks > 1)
    if distributed and not request.is_elastic and count >= 2 and count % 2 == 0:
        # the same GPUs in smaller parts, which fit on more nodes
        fields = {"tasks": request.tasks * 2, "gpus_per_task": count // 2}
        fields |= {name: max(1, getattr(request, name) // 2) for name in ("cpu_milli", "memory_mib")}
        gpus = _gpus_text(count // 2)
        yield Change(
            "more_nodes",
            _("as {tasks} tasks of {gpus} on several nodes").format(tasks=request.tasks * 2, gpus=gpus),
            fields,
        )
    if is_training and request.tasks > 1 and not request.is_elastic:
        tasks = request.tasks // 2
        text = ngettext(
            "with {tasks} task instead of {before}", "with {tasks} tasks instead of {before}", tasks
        ).format(tasks=tasks, before=request.tasks)
        yield Change("fewer_tasks", text, {"tasks": tasks})
    for fewer in (count // 2, count // 4):
        if fewer >= 1:
            text = (
                _("with {gpus} per task instead of {count}")
                if request.tasks > 1
                else _("with {gpus} instead of {count}")
            ).format(gpus=_gpus_text(fewer), count=count)
            yield Change("fewer_gpus", text, {"gpus_per_task": fewer})


def _gpus_text(count: int) -> str:
    return f"{count} {'GPU' if count == 1 else 'GPUs'}"


def _other_models(request: JobRequest) -> Iterator[Change]:
    if not request.gpu_model or not request.total_gpus:
        return
    held = Gpu.objects.filter(present=True).exclude(model__in=request.gpu_model.split("|"))
    if request.pool is not None:
        held = held.filter(node__pool=request.pool)
    for model in held.order_by("model").values_list("model", flat=True).distinct()[:MAX_OTHER_MODELS]:
        yield Change(
            "other_model",
            _("with {model} instead of {gpu_model}").format(model=model, gpu_model=request.gpu_model),
            {"gpu_model": model},
        )
