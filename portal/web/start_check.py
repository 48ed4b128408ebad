"""Would this start now? The engine's answer within its second, else the plain bounds; no guess shown as a fact."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, replace
from typing import Any

from portal.ask import ask_would_start
from portal.errors import FairwayError, Impossible, Invalid
from portal.models import NodePool, User
from portal.selectors.cluster import ModelStrip
from portal.selectors.leaving import Leaving, leaving_of, lost_gpu_s
from portal.services.jobs import JobRequest, check_job, is_live, question_body
from portal.web.launch_start import initial_of_fields
from portal.web.words import gpus as gpu_words
from portal.web.words import short_gpu

WAIT_S = 0.8
"""How long a keystroke waits for the engine before the plain bounds answer."""


@dataclass(frozen=True)
class Way:
    """A cheaper request, as a sentence and the form fields that make it."""

    sentence: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StartCheck:
    """``kind``: now, waits, never, wrong (a field is not valid) or unknown (the engine did not answer)."""

    kind: str
    title: str
    sentence: str = ""
    ways: list[Way] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    low: dt.datetime | None = None
    high: dt.datetime | None = None
    leaving: list[Leaving] = field(default_factory=list)

    @property
    def lost_gpu_s(self) -> float:
        """The work that those would lose who would leave for it, GPU-seconds."""
        return lost_gpu_s(self.leaving)

    @property
    def hidden(self) -> int:
        """How many of those who would leave the reader may not see."""
        return sum(one.job is None for one in self.leaving)

    @property
    def may_launch(self) -> bool:
        """False where a submit would be refused."""
        return self.kind not in ("never", "wrong")


def check_start(user: User, request: JobRequest, strips: list[ModelStrip], *, ask: bool) -> StartCheck:
    """What would become of the request if it were submitted now; ``ask`` waits for the engine's answer."""
    try:
        check_job(user, request)
    except Impossible as never:
        return StartCheck(
            "never", "This can never start here", never.sentence, ways=nearest_ways(never.facts)
        )
    except Invalid as wrong:
        return StartCheck("wrong", "Not ready yet", wrong.sentence, wrong=wrong.fields)
    except FairwayError as refusal:
        return StartCheck("wrong", "Not allowed", refusal.sentence)
    answer = ask_would_start(question_body(user, request), wait_s=WAIT_S) if ask else None
    if answer is None or "error" in answer:
        return _by_counting(request, strips)
    return replace(_from_answer(answer), leaving=leaving_of(user, answer.get("victims") or []))


def _from_answer(answer: dict[str, Any]) -> StartCheck:
    """The engine's answer in the words of the rail."""
    ways = [
        Way(str(way["sentence"]), _form_fields(dict(way.get("fields") or {})))
        for way in answer.get("alternatives", [])
    ]
    verdict = answer.get("verdict") or {}
    sentence = str(verdict.get("sentence", ""))
    if answer.get("starts_now"):
        where = ", ".join(answer.get("where", []))
        return StartCheck("now", "It starts now", f"There is a place for it on {where}." if where else "")
    if answer.get("never"):
        return StartCheck("never", "This can never start here", sentence, ways)
    interval = answer.get("interval")
    low, high = (_at(interval["p10_s"]), _at(interval["p90_s"])) if interval else (None, None)
    if answer.get("victims"):
        return StartCheck("waits", "Others would make room", sentence, ways, low=low, high=high)
    return StartCheck("waits", "It would wait", sentence, ways, low=low, high=high)


def _form_fields(changed: dict[str, Any]) -> dict[str, Any]:
    """The new values of a change by the form's own names."""
    if "near" not in changed:
        return changed
    return {name: value for name, value in changed.items() if name != "near"} | initial_of_fields(
        {"near": changed["near"]}
    )


def _at(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def nearest_ways(facts: dict[str, Any]) -> list[Way]:
    """The nearest possible request of a refusal, with the form's own fields for it."""
    nearest = facts.get("nearest")
    if not isinstance(nearest, dict):
        return []
    fields = initial_of_fields(nearest)
    parts = [
        f"{fields[name]} {words if fields[name] != 1 else _ONE.get(name, words)}"
        for name, words in _UNITS.items()
        if name in fields
    ]
    parts += [str(fields["gpu_model"])] if fields.get("gpu_model") else []
    if "pool" in nearest:
        pool = NodePool.objects.filter(public_id=nearest["pool"]).first()
        fields["pool"], parts = nearest["pool"], [*parts, f"the pool {pool.name}" if pool else "another pool"]
    if not fields:
        return []
    return [Way("Nearest that could: " + ", ".join(parts), fields)]


_UNITS = {
    "tasks": "tasks",
    "min_tasks": "tasks at least",
    "gpus_per_task": "GPUs each",
    "mig_profile": "slices",
    "min_compute_capability": "as compute capability",
    "cores": "CPU cores",
    "min_gpu_memory_gib": "GiB of GPU memory",
    "memory_gib": "GiB of memory",
}
_ONE = {
    "tasks": "task",
    "min_tasks": "task at least",
    "gpus_per_task": "GPU each",
    "mig_profile": "slice",
    "cores": "CPU core",
}


def _by_counting(request: JobRequest, strips: list[ModelStrip]) -> StartCheck:
    """From the free GPUs alone, without queue and quota: says "fits", not "starts"."""
    total = (request.min_tasks or request.tasks) * request.gpus_per_task * request.milli_per_gpu
    if any(is_live(job) for job in request.after):
        return StartCheck("waits", "It would wait", "It starts after the jobs that it names.")
    if request.gpus_per_task == 0:
        return StartCheck("unknown", "Needs no GPU", "It starts when a node has the CPU and memory free.")
    fitting = [strip for strip in strips if request.gpu_model in ("", strip.model)]
    room = max((strip.largest_free for strip in fitting), default=0)
    free = sum(strip.free for strip in fitting)
    if room >= request.gpus_per_task and free >= (request.min_tasks or request.tasks) * request.gpus_per_task:
        fits = "fits" if total <= 1000 else "fit"
        sentence = f"{gpu_words(total)} {fits} on what is free; the next cycle decides."
        return StartCheck("unknown", "There is room now", sentence)
    model = f" {short_gpu(request.gpu_model)}" if request.gpu_model else ""
    return StartCheck(
        "waits",
        "It would wait",
        f"It needs {request.gpus_per_task}{model} on one node; the most that is free on one is {room}.",
    )
