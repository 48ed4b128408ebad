"""Changes of a request with which it would start sooner, each with its own start forecast."""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.domain.formatting import format_duration, format_gpu_models, short_gpu_model
from portal.domain.jobs.feasibility import proportional_cpu_and_memory
from portal.domain.jobs.reasons import VerdictCode
from portal.domain.states import JobKind
from portal.engine_client import query_would_start
from portal.models import Gpu, User
from portal.selectors.jobs.progress import MeasuredSpeeds, measure_speeds
from portal.selectors.nodes.gpu_states import COUNTED_GPU
from portal.services.jobs.submission import JobRequest, preview_query_body

MAX_FORECASTS = 14
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


def json_fields(alternative: StartAlternative) -> dict[str, Any]:
    """Return the new values with public ids in place of rows."""
    return {name: getattr(value, "public_id", value) for name, value in alternative.fields.items()}


class StartAlternatives(NamedTuple):
    """The changes with which a request would start sooner, soonest first; ``reason`` says why there are none.

    Both are empty if it would start now.
    """

    alternatives: list[StartAlternative]
    reason: str = ""


def list_start_alternatives(user: User, request: JobRequest) -> list[StartAlternative]:
    """Return the changes of a valid request with which it would start sooner, soonest first."""
    return find_start_alternatives(user, request).alternatives


def find_start_alternatives(user: User, request: JobRequest, replaces: str = "") -> StartAlternatives:
    """Return the changes of a valid request with which it would start sooner, or why there are none.

    ``replaces`` is the waiting job (public id) that the request would change; its owner is ``user``.
    """
    deadline_s = time.monotonic() + TIME_BUDGET_S
    present = _preview(user, request, replaces)
    if present is None:
        return StartAlternatives([], _("The scheduler did not answer in time."))
    if present["starts_now"]:
        return StartAlternatives([])
    if _waits_for_dependency(present):
        return StartAlternatives([], _("It waits for other jobs to end, whatever it requests."))
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
        answer = _preview(user, replace(request, **change.fields), replaces)
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
    return StartAlternatives(found[:MAX_SHOWN], "" if found else _reason_for_none(present))


def _reason_for_none(present: dict[str, Any]) -> str:
    """Return why no change starts a request sooner, from the scheduler's answer for the request itself."""
    endless, holding = present["endless_gpus"], present["held_gpus"]
    if endless:
        return _(
            "No other size, shape, time limit, GPU model or pool would start sooner: {endless} of the {holding} GPUs "
            "that jobs hold there are held by jobs without a time limit and without a predicted end."
        ).format(endless=f"{endless:g}", holding=f"{holding:g}")
    code = (present["verdict"] or {}).get("code")
    if code in (VerdictCode.PROJECT_LIMIT, VerdictCode.USER_LIMIT, VerdictCode.NON_PREEMPTIBLE_OVER_QUOTA):
        return _("No smaller request fits within the quota that prevents the start.")
    if code == VerdictCode.UNSATISFIABLE:
        return _("No change of it that was tried fits this cluster.")
    return _("No other size, shape, time limit, GPU model or pool that was tried would start sooner.")


def _preview(user: User, request: JobRequest, replaces: str) -> dict[str, Any] | None:
    body = preview_query_body(user, request) | {"replaces": replaces}
    answer = query_would_start(body, wait_s=QUERY_TIMEOUT_S)
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
    """Yield changes to try: the first of each kind, then the second, and so on, from small to large."""
    by_kind: dict[str, list[Change]] = {}
    for change in _changes(request):
        by_kind.setdefault(change.kind, []).append(change)
    for round_of_kinds in zip_longest(*by_kind.values()):
        yield from (change for change in round_of_kinds if change is not None)


def _changes(request: JobRequest) -> Iterator[Change]:
    yield from _shorter_limits(request)
    if not request.roles:
        yield from _smaller_requests(request)
        for part in (2, 4):
            if amounts := proportional_cpu_and_memory(request.cpu_milli, request.memory_mib, 1, part):
                yield Change("fewer_cpus", _with_amounts("", amounts), dict(amounts))
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
            amounts = proportional_cpu_and_memory(request.cpu_milli, request.memory_mib, fewer, count)
            fields = {"gpus_per_task": fewer, **amounts}
            yield Change("fewer_gpus", _with_amounts(text, amounts), fields)


def _with_amounts(text: str, amounts: dict[str, int]) -> str:
    """Return the change with the new CPU and memory of a task."""
    parts = []
    if "cpu_milli" in amounts:
        cores = amounts["cpu_milli"] / 1000
        parts.append(ngettext("{cores} CPU", "{cores} CPUs", round(cores)).format(cores=f"{cores:g}"))
    if "memory_mib" in amounts:
        parts.append(_("{memory} GiB of memory").format(memory=f"{amounts['memory_mib'] / 1024:g}"))
    if not parts:
        return text
    joined = _(" and ").join(parts)
    if not text:
        return _("with {amounts} for each task").format(amounts=joined)
    return _("{change} and with {amounts}").format(change=text, amounts=joined)


def _gpus_text(count: int) -> str:
    return f"{count} {'GPU' if count == 1 else 'GPUs'}"


def _other_models(request: JobRequest) -> Iterator[Change]:
    if not request.gpu_model or not request.total_gpus:
        return
    held = Gpu.objects.filter(COUNTED_GPU).exclude(model__in=request.gpu_model.split("|"))
    if request.pool is not None:
        held = held.filter(node__pool=request.pool)
    for model in held.order_by("model").values_list("model", flat=True).distinct()[:MAX_OTHER_MODELS]:
        yield Change(
            "other_model",
            _("with {model} instead of {gpu_model}").format(
                model=short_gpu_model(model), gpu_model=format_gpu_models(request.gpu_model).strip()
            ),
            {"gpu_model": model},
        )
