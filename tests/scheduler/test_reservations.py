"""Reserved nodes from the record to the verdict: a whole cycle on PostgreSQL keeps off them, and says why."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from portal.models import Cycle, Job, JobVerdict
from portal.services.nodes.topologies import do_save_topology, do_set_labels
from portal.services.scheduling.reservations import (
    ReservationInput,
    do_cancel_reservation,
    do_save_reservation,
)
from scheduler.core.decide import decide
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import Snapshot
from scheduler.cycle import run_cycle
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = dt.timedelta(hours=1)


def cycle() -> None:
    run_cycle("test", "me")


@pytest.fixture
def dataset():
    factories.cluster_settings()
    made = factories.basic_cluster() | {"admin": factories.user(admin=True)}
    made["other"] = factories.project("other", member=made["owner"])
    begin = timezone.now() + HOUR
    words = ReservationInput(
        "spring course", made["pool"], [made["node"]], [made["other"]], begin, begin + HOUR
    )
    return made | {"reservation": do_save_reservation(made["admin"], words)}


def submit(dataset, project: str, **asks) -> Job:
    return factories.job(dataset["owner"], dataset[project], dataset["environment"], **asks)


def test_only_jobs_that_end_in_time_or_belong_to_the_reservation_start(dataset) -> None:
    endless = submit(dataset, "project", name="endless")
    long = submit(dataset, "project", name="long", time_limit_s=2 * 3600)
    short = submit(dataset, "project", name="short", time_limit_s=600)
    theirs = submit(dataset, "other", name="theirs")
    cycle()
    states = dict(Job.objects.values_list("name", "state"))
    assert states == {"endless": "PENDING", "long": "PENDING", "short": "RUNNING", "theirs": "RUNNING"}
    for job in (endless, long):
        standing = JobVerdict.objects.get(job=job)
        assert standing.code == "reserved_for_other_job"
        assert "(spring course)" in standing.message
        assert standing.details["reserved_until_s"] == dataset["reservation"].ends_at.timestamp()
    assert not JobVerdict.objects.filter(job__in=[short, theirs]).exists()


def test_after_cancellation_all_jobs_start(dataset) -> None:
    submit(dataset, "project")
    cycle()
    do_cancel_reservation(dataset["admin"], dataset["reservation"])
    cycle()
    assert Job.objects.get().state == "RUNNING"


def test_a_job_with_a_topology_constraint_is_told_its_reservation(dataset) -> None:
    do_cancel_reservation(dataset["admin"], dataset["reservation"])
    do_save_topology(dataset["admin"], "fabric", ["rack"])
    apart = factories.node(dataset["pool"])
    do_set_labels(dataset["admin"], dataset["node"], {"rack": "r1"})
    do_set_labels(dataset["admin"], apart, {"rack": "r2"})
    near = {"topology": "fabric", "required": "rack", "preferred": None}
    gang = submit(dataset, "project", tasks=2, gpus_per_task=4, topology_constraint=near)
    cycle()
    standing = JobVerdict.objects.get(job=gang)
    assert (standing.code, standing.message) == (
        "unsatisfiable",
        "Needs 2 × 4 GPUs in one rack; the largest rack of this cluster can hold 1 of its 2 tasks.",
    )
    do_set_labels(dataset["admin"], apart, {"rack": "r1"})
    cycle()
    assert Job.objects.get(pk=gang.pk).state == "RUNNING"


@pytest.mark.parametrize("kept_for", ["other", None], ids=["another project", "nobody"])
def test_a_reservation_made_after_the_snapshot_refuses_starts_on_its_nodes(dataset, kept_for) -> None:
    do_cancel_reservation(dataset["admin"], dataset["reservation"])
    apart = factories.node(dataset["pool"])
    below = factories.project("below", parent=dataset["other"], member=dataset["owner"])
    jobs = [
        submit(dataset, "project", name="closed out", gpus_per_task=2),
        submit(dataset, "other", name="kept for", gpus_per_task=1),
        factories.job(dataset["owner"], below, dataset["environment"], name="below it", gpus_per_task=1),
        submit(dataset, "project", name="elsewhere", gpus_per_task=4),
    ]

    def late(snapshot: Snapshot, policy: Policy) -> Plan:
        """An administrator reserves the node on which the smaller jobs start, while the plan is made."""
        plan = decide(snapshot, policy)
        where = {start.job: start.tasks[0].node for start in plan.starts}
        busy = next(
            node for node in (dataset["node"], apart) if node.public_id == where[jobs[0].public_id]
        )  # fmt: skip
        assert [where[job.public_id] == busy.public_id for job in jobs] == [True, True, True, False]
        projects = [dataset[kept_for]] if kept_for else []
        words = ReservationInput(
            "repair", dataset["pool"], [busy], projects, timezone.now(), timezone.now() + HOUR
        )
        do_save_reservation(dataset["admin"], words)
        return plan

    outcome = run_cycle("test", "me", decide=late)
    refused = ["closed out"] if kept_for else ["closed out", "kept for", "below it"]
    by_id = {job.public_id: job.name for job in jobs}
    assert outcome is not None
    assert {by_id[each.job]: (each.code, each.message) for each in outcome.refused} == dict.fromkeys(
        refused, ("reserved", "A node of the plan is reserved (repair).")
    )
    states = dict(Job.objects.values_list("name", "state"))
    assert {name for name, state in states.items() if state == "PENDING"} == set(refused)
    assert Cycle.objects.latest("id").refused_commits == len(refused)
    assert outcome.rerun
    cycle()
    assert Job.objects.get(pk=jobs[0].pk).state == "PENDING"  # planned anew, elsewhere or not at all


def test_a_future_reservation_refuses_only_jobs_that_may_overlap(dataset) -> None:
    do_cancel_reservation(dataset["admin"], dataset["reservation"])
    submit(dataset, "project", name="short", time_limit_s=600)
    submit(dataset, "project", name="long", time_limit_s=2 * 3600)
    submit(dataset, "project", name="endless")

    def late(snapshot: Snapshot, policy: Policy) -> Plan:
        begin = timezone.now() + HOUR
        do_save_reservation(
            dataset["admin"],
            ReservationInput("repair", dataset["pool"], [dataset["node"]], [], begin, begin + HOUR),
        )
        return decide(snapshot, policy)

    run_cycle("test", "me", decide=late)
    assert dict(Job.objects.values_list("name", "state")) == {
        "short": "RUNNING", "long": "PENDING", "endless": "PENDING",
    }  # fmt: skip
