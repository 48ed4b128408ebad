"""Shows the simulated effect of quotas: jobs and projects that the reader may not see are only counted."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from portal.access import Requester, visible_jobs, visible_projects
from portal.models import Job, NodePool, Project
from portal.selectors.scheduling.preemption_preview import PreemptionCandidate, preemption_candidates


@dataclass(frozen=True)
class ExpectedStart:
    """A start of a job: its median, and the interval in 8 of 10 cases; None for each if it starts now."""

    wait_s: float
    at: dt.datetime | None
    low: dt.datetime | None
    high: dt.datetime | None


@dataclass(frozen=True)
class ShiftedStart:
    """A pending job that would start earlier or later; None is no known start."""

    job: Job
    before: ExpectedStart | None
    after: ExpectedStart | None

    @property
    def is_sooner(self) -> bool:
        if self.after is None or self.before is None:
            return self.before is None
        return self.after.wait_s < self.before.wait_s


@dataclass(frozen=True)
class ProjectHoldings:
    """What a project holds and may hold in a pool before and after, GPU milli with its descendants."""

    project: Project
    pool: NodePool
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True)
class QuotaEffect:
    """The effect as its reader may see it."""

    sooner: int
    later: int
    starts: list[ShiftedStart]
    victim_count: int
    victims: list[PreemptionCandidate]
    holdings: list[ProjectHoldings]
    is_complete: bool

    @property
    def has_no_effect(self) -> bool:
        return not (self.sooner or self.later or self.victim_count)

    @property
    def hidden_starts(self) -> int:
        """Jobs that are not listed: of other projects, or with small changes."""
        return self.sooner + self.later - len(self.starts)

    @property
    def named_victims(self) -> list[PreemptionCandidate]:
        return [one for one in self.victims if one.job is not None]

    @property
    def hidden_victims(self) -> int:
        return self.victim_count - len(self.named_victims)

    @property
    def lost_gpu_seconds(self) -> float:
        """Work that the listed jobs would lose."""
        return sum(one.lost_gpu_seconds for one in self.victims)


def read_quota_effect(requester: Requester, answer: dict[str, Any] | None) -> QuotaEffect | None:
    """Return the scheduler's answer for this reader in a constant number of queries; None if there is none."""
    if answer is None:
        return None
    ids = [each["job"] for each in answer["starts"]]
    jobs = {
        job.public_id: job
        for job in visible_jobs(requester).filter(public_id__in=ids).select_related("project")
    }
    named = {each["project"] for each in answer["holdings"]}
    projects = {row.public_id: row for row in visible_projects(requester).filter(public_id__in=named)}
    pools = {row.public_id: row for row in NodePool.objects.all()}
    return QuotaEffect(
        sooner=answer["sooner"],
        later=answer["later"],
        starts=[
            ShiftedStart(jobs[each["job"]], _expected_start(each["before"]), _expected_start(each["after"]))
            for each in answer["starts"]
            if each["job"] in jobs
        ],
        victim_count=answer["victim_count"],
        victims=preemption_candidates(requester, answer["victims"]),
        holdings=[
            ProjectHoldings(
                projects[each["project"]],
                pools[each["pool"]],
                _with_borrowed(each["before"]),
                _with_borrowed(each["after"]),
            )
            for each in answer["holdings"]
            if each["project"] in projects and each["pool"] in pools
        ],
        is_complete=answer["whole"],
    )


def _expected_start(fields: dict[str, Any] | None) -> ExpectedStart | None:
    if fields is None:
        return None
    interval = fields["interval"]
    if interval is None:
        return ExpectedStart(fields["wait_s"], None, None, None)
    at, low, high = (
        dt.datetime.fromtimestamp(interval[name], dt.UTC) for name in ("p50_s", "p10_s", "p90_s")
    )
    return ExpectedStart(fields["wait_s"], at, low, high)


def _with_borrowed(holding: dict[str, float]) -> dict[str, float]:
    borrowed = max(0, holding["used_milli"] - holding["guaranteed_milli"])
    return holding | {"borrowed_milli": borrowed}
