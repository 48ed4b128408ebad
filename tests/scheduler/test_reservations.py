"""Reserved nodes from the record to the verdict: a whole cycle on PostgreSQL keeps off them, and says why."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from portal.models import Cycle, Job, JobVerdict
from portal.services.cluster.reservations import ReservationInput, do_cancel_reservation, do_save_reservation
from portal.services.nodes.topologies import do_save_topology, do_set_labels
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
def scene():
    factories.cluster_settings()
    made = factories.basic_cluster() | {"admin": factories.user(admin=True)}
    made["other"] = factories.project("other", member=made["owner"])
    begin = timezone.now() + HOUR
    words = ReservationInput(
        "spring course", made["pool"], [made["node"]], [made["other"]], begin, begin + HOUR
    )
    return made | {"reservation": do_save_reservation(made["admin"], words)}


def submit(scene, project: str, **asks) -> Job:
    return factories.job(scene["owner"], scene[project], scene["environment"], **asks)


def test_only_who_is_surely_gone_and_who_it_is_for_start(scene) -> None:
    endless = submit(scene, "project", name="endless")
    long = submit(scene, "project", name="long", time_limit_s=2 * 3600)
    short = submit(scene, "project", name="short", time_limit_s=600)
    theirs = submit(scene, "other", name="theirs")
    cycle()
    states = dict(Job.objects.values_list("name", "state"))
    assert states == {"endless": "PENDING", "long": "PENDING", "short": "RUNNING", "theirs": "RUNNING"}
    for job in (endless, long):
        standing = JobVerdict.objects.get(job=job)
        assert standing.code == "reserved_for_other_job"
        assert "(spring course)" in standing.message
        assert standing.details["reserved_until_s"] == scene["reservation"].ends_at.timestamp()
    assert not JobVerdict.objects.filter(job__in=[short, theirs]).exists()


def test_once_it_is_cancelled_everybody_starts(scene) -> None:
    submit(scene, "project")
    cycle()
    do_cancel_reservation(scene["admin"], scene["reservation"])
    cycle()
    assert Job.objects.get().state == "RUNNING"


def test_a_job_near_together_is_told_what_it_waits_for(scene) -> None:
    do_cancel_reservation(scene["admin"], scene["reservation"])
    do_save_topology(scene["admin"], "fabric", ["rack"])
    apart = factories.node(scene["pool"])
    do_set_labels(scene["admin"], scene["node"], {"rack": "r1"})
    do_set_labels(scene["admin"], apart, {"rack": "r2"})
    near = {"topology": "fabric", "required": "rack", "preferred": None}
    gang = submit(scene, "project", tasks=2, gpus_per_task=4, topology_constraint=near)
    cycle()
    standing = JobVerdict.objects.get(job=gang)
    assert (standing.code, standing.message) == (
        "unsatisfiable",
        "Needs 2 × 4 GPUs in one rack; the largest rack of this cluster can hold 1 of its 2 tasks.",
    )
    do_set_labels(scene["admin"], apart, {"rack": "r1"})
    cycle()
    assert Job.objects.get(pk=gang.pk).state == "RUNNING"


@pytest.mark.parametrize("kept_for", ["other", None], ids=["another project", "nobody"])
def test_a_reservation_made_after_the_photograph_refuses_starts_on_its_nodes(scene, kept_for) -> None:
    do_cancel_reservation(scene["admin"], scene["reservation"])
    apart = factories.node(scene["pool"])
    below = factories.project("below", parent=scene["other"], member=scene["owner"])
    jobs = [
        submit(scene, "project", name="closed out", gpus_per_task=2),
        submit(scene, "other", name="kept for", gpus_per_task=1),
        factories.job(scene["owner"], below, scene["environment"], name="below it", gpus_per_task=1),
        submit(scene, "project", name="elsewhere", gpus_per_task=4),
    ]

    def late(snapshot: Snapshot, policy: Policy) -> Plan:
        """An administrator reserves the node on which the smaller jobs start, while the plan is made."""
        plan = decide(snapshot, policy)
        where = {start.job: start.tasks[0].node for start in plan.starts}
        busy = next(
            node for node in (scene["node"], apart) if node.public_id == where[jobs[0].public_id]
        )  # fmt: skip
        assert [where[job.public_id] == busy.public_id for job in jobs] == [True, True, True, False]
        projects = [scene[kept_for]] if kept_for else []
        words = ReservationInput(
            "repair", scene["pool"], [busy], projects, timezone.now(), timezone.now() + HOUR
        )
        do_save_reservation(scene["admin"], words)
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


def test_a_reservation_to_come_refuses_only_who_is_not_surely_gone_before(scene) -> None:
    do_cancel_reservation(scene["admin"], scene["reservation"])
    submit(scene, "project", name="short", time_limit_s=600)
    submit(scene, "project", name="long", time_limit_s=2 * 3600)
    submit(scene, "project", name="endless")

    def late(snapshot: Snapshot, policy: Policy) -> Plan:
        begin = timezone.now() + HOUR
        do_save_reservation(
            scene["admin"],
            ReservationInput("repair", scene["pool"], [scene["node"]], [], begin, begin + HOUR),
        )
        return decide(snapshot, policy)

    run_cycle("test", "me", decide=late)
    assert dict(Job.objects.values_list("name", "state")) == {
        "short": "RUNNING", "long": "PENDING", "endless": "PENDING",
    }  # fmt: skip
