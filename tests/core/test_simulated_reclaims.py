"""Which jobs a simulation evicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from scheduler.core.forecast.capacity_buckets import (
    BucketOccupancy,
    BucketRequest,
    BucketSlots,
    CapacityBuckets,
)
from scheduler.core.forecast.simulated_reclaims import EvictableJob, EvictableJobs, Requeue
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId, UserId
from scheduler.core.shares.quota_ledger import JobOwner

RECLAIMER, VICTIM, OTHER = 0, 1, 2
NOW_S = 100.0


def running(
    slots: Sequence[BucketSlots], saved_s: float, project: int = VICTIM, protected_until_s: float = 0.0
) -> EvictableJob:
    milli = sum(gpus for _, gpus, _ in slots) * WHOLE_MILLI
    name = ProjectId(str(project))
    owner = JobOwner(name, name, UserId("ada"), True, ResourceVector(milli))
    return EvictableJob(project, owner, milli, slots, 500.0, Requeue(0, 0, saved_s, protected_until_s))


def victims(
    free: Sequence[int],
    jobs: Sequence[EvictableJob],
    *tasks: tuple[BucketRequest, int],
    shares: tuple[float, ...] = (8.0, 0.0, 0.0),
    priorities: Sequence[int] = (),
) -> list[int] | None:
    """The numbers of the jobs evicted for these tasks, with so many free GPUs in the buckets."""
    occupancy = BucketOccupancy(
        CapacityBuckets((0,) * len(free), tuple(free), {}, 100), [request.size for request, _ in tasks]
    )
    held_milli = np.zeros(3)
    evictable = EvictableJobs(occupancy, np.array(shares) * WHOLE_MILLI, priorities)
    for number, job in enumerate(jobs):
        evictable.add(number, job)
        held_milli[job.project] += job.milli
    asked = [(request, count, request.bucket_types) for request, count in tasks]
    return evictable.find_victims(asked, RECLAIMER, held_milli, NOW_S)


def gpus(count: int, milli: int = WHOLE_MILLI) -> BucketRequest:
    return BucketRequest(count, milli, (0,))


def test_victims_lose_the_least_work_together() -> None:
    small, large = running([(0, 1, ())], 90.0), running([(1, 2, ())], 94.0)
    assert victims([0, 0], [small, small, large], (gpus(2), 1)) == [2]  # 12 GPU-seconds, not 20
    assert victims([1, 0], [small, small, large], (gpus(2), 1)) == [1]  # 10; of equal ones the youngest


def test_the_lowest_priority_is_evicted_even_if_it_loses_more() -> None:
    jobs = [running([(number, 1, ())], saved_s) for number, saved_s in enumerate((0.0, 90.0, 99.0))]
    jobs = [job._replace(requeue=job.requeue._replace(position=n)) for n, job in enumerate(jobs)]
    assert victims([0, 0, 0], jobs, (gpus(1), 1), priorities=[10, 50, 90]) == [0]
    assert victims([0, 0, 0], jobs, (gpus(1), 1), priorities=[50, 50, 90]) == [1]


def test_no_eviction_where_the_tasks_fit() -> None:
    assert victims([0, 2], [running([(0, 2, ())], 100.0)], (gpus(2), 1)) == []


def test_a_project_loses_nothing_of_its_share() -> None:
    jobs = [running([(0, 1, ())], 0.0) for _ in range(4)]
    assert victims([0], jobs, (gpus(2), 1), shares=(8.0, 2.0, 0.0)) == [3, 2]
    assert victims([0], jobs, (gpus(3), 1), shares=(8.0, 2.0, 0.0)) is None
    assert victims([0], [running([(0, 2, ())], 0.0, RECLAIMER)], (gpus(1), 1), shares=(0.0, 0.0, 0.0)) is None


def test_protected_jobs_stay() -> None:
    jobs = [running([(0, 1, ())], 99.0, protected_until_s=101.0), running([(0, 1, ())], 0.0)]
    assert victims([0], jobs, (gpus(1), 1)) == [1]
    assert victims([0], jobs, (gpus(2), 1)) is None


def test_tasks_of_a_gang_use_what_earlier_victims_free_elsewhere() -> None:
    gang = running([(0, 2, ()), (1, 2, ())], 50.0)
    single = running([(1, 2, ())], -900.0, OTHER)
    assert victims([0, 0], [gang, single], (gpus(2), 2)) == [0]
    assert victims([0, 0], [gang, single], (gpus(2), 3)) == [0, 1]
    assert victims([0, 0], [gang, single], (gpus(2), 4)) is None


@pytest.mark.parametrize("milli", [500, 250])
def test_shares_of_gpus_are_not_reclaimed(milli: int) -> None:
    assert victims([0], [running([(0, 1, ())], 0.0)], (gpus(1, milli), 1)) is None
