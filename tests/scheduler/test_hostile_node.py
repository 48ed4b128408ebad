"""A hostile node beside an honest one: epochs that were never given, and arbitrary frames on both of its links."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.utils import timezone

from agents.engines.replies import GpuFaultReported, GpuHealthChanged, InvalidEventsReceived
from agents.link import AgentError
from agents.node.ledger.ledger import Ledger
from portal.domain.states import GpuHealth, JobState, NodeState
from portal.live.collector.node_stream import open_stream
from portal.models import (
    Attempt,
    AttemptGpuDay,
    AttemptProgress,
    ClusterSettings,
    Environment,
    Gpu,
    GpuAlert,
    ImagePresence,
    Job,
    Lease,
    Node,
    NodeMetricsMinute,
    NodePool,
    Task,
)
from portal.services.environments.pins import record_claim
from portal.services.lifecycle import job_control
from portal.valkey import sample_cache
from scheduler import leases, periodic
from scheduler.cycle import run_cycle
from scheduler.nodes import pending_events
from scheduler.nodes.engine_connect import EngineConnectError, open_engine
from scheduler.nodes.node_actor import NodeActor
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.pending_events import EVENTS_BURST, PendingEvents
from scheduler.nodes.reconcile import reconcile
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, engine_harness, wait_for
from tests.hostile_agent import HostileFrames, ScriptedAgent, hello
from tests.live.test_collector import collecting

pytestmark = pytest.mark.django_db(transaction=True)

EPOCHS_NEVER_GIVEN = 2**40


@pytest.fixture
def harness(settings) -> Iterator[EngineHarness]:
    with engine_harness() as made:
        settings.DATA_DIR = made.folder
        settings.LOG_DIR = Path(made.folder) / "logs"
        yield made


@pytest.fixture
def owner() -> Any:
    return factories.user("ada")


@pytest.fixture
def submit(owner) -> Any:
    project, process = factories.project(member=owner), factories.environment(runtime="process", tool=False)

    def submitted(*command: str, environment: Environment | None = None, **fields: Any) -> Job:
        fields = {
            "cpu_milli": 100,
            "memory_mib": 64,
            "termination_grace_s": 1,
            "command": list(command),
            **fields,
        }
        return factories.job(owner, project, environment or process, **fields)

    return submitted


# -- epochs ------------------------------------------------------------------------------------------


def set_heard_epoch(harness: EngineHarness, name: str, epoch: int) -> None:
    folder = harness.folder / name / "state"
    folder.mkdir(exist_ok=True)
    with Ledger(str(folder)).transaction() as state:
        state["epoch"] = epoch


def is_done(job: Job) -> bool:
    return bool(Job.objects.get(pk=job.pk).state == JobState.COMPLETED)


@pytest.mark.parametrize("epoch", [2**53 - 1, 2**63 - 2])
def test_an_epoch_never_issued_is_an_incident_of_its_node_only(harness, submit, epoch) -> None:
    pool, engine = factories.pool(), InProcessEngine()
    odd, well = (harness.mark_enrolled(harness.create_node(pool=pool, name=name)) for name in ("odd", "well"))
    set_heard_epoch(harness, "odd", epoch)

    def reported() -> bool:
        odd.refresh_from_db()
        return bool(odd.status_message)

    first = submit("true")
    assert engine.run_until(lambda: is_done(first) and reported(), 30)
    assert max(Lease.objects.values_list("epoch", flat=True)) < 100
    assert str(epoch) in odd.status_message if epoch < 2**53 else "highest_epoch" in odd.status_message
    assert not odd.reachable and not Node.objects.get(pk=well.pk).status_message
    if epoch > 2**53:
        return  # such a hello is not even read
    assert (odd.breaker_state, odd.breaker_cause) == ("quarantined", "epoch_ahead")
    assert "manage.py begin-recovery" in odd.status_message
    second = submit("true")  # new holders of every lease, as after a restart of the workers
    assert InProcessEngine().run_until(lambda: is_done(second), 30)
    assert set(Task.objects.values_list("node__name", flat=True)) == {"well"}

    set_heard_epoch(harness, "odd", 0)  # what an administrator does there
    assert engine.run_until(lambda: Node.objects.get(pk=odd.pk).reachable, 40)


def test_after_a_database_restore_nodes_return_once_confirmed(harness, submit, monkeypatch) -> None:
    node, engine = harness.mark_enrolled(harness.create_node(name="n1")), InProcessEngine()
    monkeypatch.setenv("FAIRWAY_DATA_DIR", str(harness.folder))
    before = submit("true")
    assert engine.run_until(lambda: is_done(before), 30)
    Lease.objects.all().delete()
    set_heard_epoch(harness, "n1", 500)  # given since the moment to which the database was set back

    def refused() -> bool:
        node.refresh_from_db()
        return "500" in node.status_message

    assert engine.run_until(refused, 30)
    call_command("begin_recovery")
    assert ClusterSettings.objects.get().recovery_mode
    after = submit("true")
    assert InProcessEngine().run_until(lambda: is_done(after), 60)
    assert not ClusterSettings.objects.get().recovery_mode


# -- tasks of others ---------------------------------------------------------------------------------


def test_a_node_reports_only_its_own_ranks(submit) -> None:
    first, second = (
        factories.node(factories.pool(), name=name, gpus=1, runtime="process") for name in ("n1", "n2")
    )
    Node.objects.filter(pk=second.pk).update(pool=first.pool)
    job = submit("true", tasks=2)
    with transaction.atomic():
        slots = [job_control.RankPlacement(node, [(node.gpus.get().pk, 1000)]) for node in (first, second)]
        attempt = job_control.start_attempt(job, first.pool, slots, epoch=1)
    tasks = list(attempt.task_rows.order_by("rank"))
    for task in tasks:
        Task.objects.filter(pk=task.pk).update(state="RUNNING", running_at=timezone.now())
    Attempt.objects.filter(pk=attempt.pk).update(
        state="RUNNING", running_at=timezone.now(), start_sent_at=timezone.now()
    )
    said = {
        "cluster": "t1",
        "digest": "d",
        "runtime": "process",
        "ports": {},
        "gpus": [],
        "job": job.public_id,
    }
    said |= {"attempt": 1, "progress": 5.0, "progress_age_s": 0.1, "checkpoint_age_s": 0.1}
    rank_0 = said | {"name": "a", "task": 0, "state": "exited", "exit_code": 1}
    listed = [
        rank_0,
        rank_0 | {"state": "running", "name": "b"},
        said | {"name": "c", "task": 1, "state": "running"},
    ]
    answer = {"containers": listed, "boot_id": "boot-1", "disk_full_message": None, "clock_s": time.time()}
    engine = ScriptedAgent(
        lambda: hello([]), lambda request: answer if request["verb"] == "list" else {}
    ).engine()
    factories.cluster_settings()
    lease = leases.acquire(leases.node_lease(second.public_id), "a", 60.0)
    assert lease is not None
    reconcile(NodeConnection(engine, lease, second))
    engine.close()
    assert [Task.objects.get(pk=task.pk).state for task in tasks] == ["RUNNING", "RUNNING"]
    assert AttemptProgress.objects.get(attempt=attempt).rank == 1


# -- many events -------------------------------------------------------------------------------------


def test_the_work_that_events_cause_does_not_grow_with_their_number(
    django_assert_max_num_queries, monkeypatch
) -> None:
    """What 10,000 events tell is stored, by the queries of one for each GPU and task; time allows no further ones."""
    monkeypatch.setattr(pending_events, "EVENTS_PER_S", 1e-9)
    node = factories.node(factories.pool(), name="n1", gpus=2)
    lease = leases.acquire(leases.node_lease(node.public_id), "a", 60.0)
    assert lease is not None
    actor = NodeActor(node, lease, list)
    first, second = node.gpus.order_by("pk").values_list("uuid", flat=True)
    for number in range(2_500):
        actor.handle_soon(GpuFaultReported(first, 31, 1))
        actor.handle_soon(GpuHealthChanged(second, GpuHealth.OK, f"warning {number}"))
        actor.handle_soon(InvalidEventsReceived(1, f"problem {number}"))
        actor.handle_soon(GpuHealthChanged(f"GPU-unknown-{number}", GpuHealth.LOST, "m", True))
    actor.notify("work")  # its own work is not pushed out by events
    with django_assert_max_num_queries(int(EVENTS_BURST) + 40):
        assert actor._process_inbox()
    assert GpuAlert.objects.get(gpu__uuid=first).repeat_count == 2_500
    assert Gpu.objects.get(uuid=second).health_reason == "warning 2499"
    assert "2500 events" in node.incidents.get(kind="malformed").message
    with django_assert_max_num_queries(0):
        actor._process_inbox()


@pytest.mark.parametrize("states", ["OK LOST OK", "LOST OK LOST", "OK LOST OK LOST OK", "LOST LOST OK"])
def test_merged_events_of_a_gpu_keep_the_order_of_its_last_states(states: str) -> None:
    """As the actor, which is busy meanwhile, would have handled each."""
    pending, health = PendingEvents(), [GpuHealth[name] for name in states.split()]
    for number, each in enumerate(health):
        pending.add(GpuHealthChanged("GPU-1", each, f"report {number}", each is GpuHealth.LOST))
    kept = [event for event in pending.take() if isinstance(event, GpuHealthChanged)]
    assert [event.health for event in kept][-2:] == health[-2:]
    assert kept[-1].message == f"report {len(health) - 1}"


# -- arbitrary frames --------------------------------------------------------------------------------

PASSING = {
    "portal_outboxmessage",
    "portal_cycle",
    "portal_schedulercounters",
    "portal_lease",
    "portal_attemptgpuday",
    "portal_environmentrecord",
}
"""Tables that an honest cluster writes all the while; what matters of them is looked at by itself."""
LIVE_OF_A_NODE = {"last_seen_at", "reconciled_at", "clock_skew_s"}


class Rows:
    """Every row of the record, and which of them belong to one node: its own, those of its tasks and its alerts."""

    def __init__(self, node: Node, apart: list[Job]) -> None:
        """``apart`` are jobs that the test itself makes meanwhile."""
        self._node, self._apart = node, apart

    def others(self) -> dict[str, dict[str, Any]]:
        """By table and row, what does not belong to the node."""
        tables = [name for name in connection.introspection.table_names() if name.startswith("portal_")]
        rows = {table: self._table(table) for table in sorted(set(tables) - PASSING)}
        own = self._own(rows)
        return {
            f"{table} {key}": {name: value for name, value in row.items() if name not in LIVE_OF_A_NODE}
            for table, found in rows.items()
            for key, row in found.items()
            if not own(table, row)
        }

    def _table(self, table: str) -> dict[str, dict[str, Any]]:
        with connection.cursor() as cursor:
            cursor.execute(f'SELECT to_jsonb(each)::text FROM "{table}" AS each')
            rows = [json.loads(text) for (text,) in cursor.fetchall()]
        return {str(row.get("id") or sorted(row.items(), key=str)): row for row in rows}

    def _own(self, rows: dict[str, dict[str, dict[str, Any]]]) -> Any:
        def ids(table: str, column: str, wanted: set[Any]) -> set[Any]:
            return {row["id"] for row in rows[table].values() if row[column] in wanted}

        nodes = {self._node.pk}
        gpus = ids("portal_gpu", "node_id", nodes)
        here = {row["attempt_id"] for row in rows["portal_task"].values() if row["node_id"] in nodes}
        jobs = {row["job_id"] for row in rows["portal_attempt"].values() if row["id"] in here}
        jobs |= {job.pk for job in self._apart}
        attempts = ids("portal_attempt", "job_id", jobs)
        tasks = ids("portal_task", "attempt_id", attempts)
        allocations = ids("portal_allocation", "task_id", tasks)
        named = {row["public_id"] for row in rows["portal_job"].values() if row["id"] in jobs}
        named |= {
            row["public_id"] for row in rows["portal_orphancontainer"].values() if row["node_id"] in nodes
        }
        named.add(self._node.public_id)
        columns = {
            "node_id": nodes, "gpu_id": gpus, "gpu_a_id": gpus, "claimant_id": nodes, "job_id": jobs,
            "attempt_id": attempts, "task_id": tasks, "allocation_id": allocations, "object_id": named,
        }  # fmt: skip
        themselves = {"portal_node": nodes, "portal_gpu": gpus, "portal_job": jobs, "portal_attempt": attempts,
                      "portal_task": tasks, "portal_allocation": allocations}  # fmt: skip

        def own(table: str, row: dict[str, Any]) -> bool:
            if table == "portal_nodemetricsminute" and row["node_id"] not in nodes:
                return True  # looked at by itself: an honest node's grow all the while
            if row.get("id") in themselves.get(table, ()):
                return True
            return any(row.get(column) in wanted for column, wanted in columns.items())

        return own


class Dataset:
    """An honest node with a real agent and a job on it, and a hostile one with jobs of its own; actors and cycles."""

    def __init__(self, harness: EngineHarness, submit: Any, frames: int, seed: int) -> None:
        self.submit = submit
        self.honest = harness.mark_enrolled(harness.create_node(name="honest"))
        beside = factories.node(factories.pool("beside"), name="beside")  # could run containers too
        self.hostile = factories.node(NodePool.objects.create(name="hostile"), name="hostile")
        Node.objects.filter(pk=self.hostile.pk).update(state=NodeState.CORDONED.value, boot_id="boot-1")
        self.victim = submit("sleep", "600", name="victim", pool=self.honest.pool)
        tags = ["localhost/test:1", "registry.example/lab/torch:2", "registry.example/lab/jax:3"]
        environments = [factories.environment(tool=False, image=tag) for tag in tags]
        one = "registry.example/lab/jax@sha256:" + "1" * 64
        for node in (beside, factories.node(beside.pool, name="second")):
            record_claim(environments[2], node, [{"image_id": "", "refs": tags[2:], "digests": [one]}])
        for environment in environments:  # jobs of others, without a pin and with one
            submit("true", pool=beside.pool, environment=environment)
        Job.objects.filter(pool=beside.pool).update(held=True)
        self.own = [
            submit("sleep", "600", pool=self.hostile.pool, environment=environment)
            for environment in (*environments[2:] * 3, environments[0])
        ]
        for job, gpu in zip(self.own, self.hostile.gpus.order_by("pk"), strict=True):
            with transaction.atomic():
                slot = job_control.RankPlacement(self.hostile, [(gpu.pk, 1000)])
                job_control.start_attempt(job, self.hostile.pool, [slot], epoch=1)
        jobs = [self.victim.public_id, *(job.public_id for job in self.own), "unknown"]
        gpus = [list(node.gpus.values_list("uuid", flat=True)) for node in (self.hostile, self.honest)]
        drawn = HostileFrames(seed, *gpus, jobs, images=tags)
        self.attacking = threading.Event()
        self.agent = ScriptedAgent(drawn.hello, drawn.answer, lambda role: self._gated(drawn.frames(role)))
        self._frames = frames
        self._ending = threading.Event()

    def _gated(self, frames: Iterator[Any]) -> Iterator[Any]:
        for frame in frames:
            self.attacking.wait()
            if self.agent.sent >= self._frames:
                self._ending.wait(0.2)
            yield frame

    def __enter__(self) -> Dataset:
        self._holder = leases.new_holder()
        for node, opener in ((self.honest, open_engine), (self.hostile, self._open_control)):
            lease = leases.acquire(leases.node_lease(node.public_id), self._holder, 600.0)
            assert lease is not None
            setattr(self, f"_{node.name}_actor", NodeActor(node, lease, list, opener))
        self._honest_actor.start()
        self._loop = threading.Thread(target=self._run, daemon=True)
        self._loop.start()
        return self

    def attack(self) -> None:
        self.attacking.set()
        self._hostile_actor.start()

    def _open_control(self, node: Node) -> Any:
        try:
            return self.agent.engine()
        except AgentError as error:
            raise EngineConnectError(error.message, error.code) from error

    def open_watch(self, watched: Any, on_event: Any) -> Any:
        if watched.name != "hostile":
            return open_stream(watched, on_event)
        self.attacking.wait()
        return self.agent.open("watch", on_event=on_event)

    def _run(self) -> None:
        while not self._ending.is_set():
            run_cycle("test", self._holder)
            periodic.run_periodic_pass()
            for actor in (self._honest_actor, self._hostile_actor):
                actor.notify("work")
            time.sleep(0.2)
        connection.close()

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.attacking.set()
        self._loop.join(20)
        for actor in (self._honest_actor, self._hostile_actor):
            actor.stop()
            if actor.is_alive():
                actor.join(20)

    def dispatch_s(self, jobs: list[Job]) -> float:
        """How long a job takes from its submit until it has ended on the honest node."""
        began = time.monotonic()
        jobs.append(self.submit("true", pool=self.honest.pool))
        wait_for("the job", lambda: is_done(jobs[-1]), 30)
        return time.monotonic() - began


class Ticks:
    """Gaps between the frames of a node that pages get."""

    def __init__(self, node: Node) -> None:
        self._node, self._over = node, threading.Event()
        self.gaps_s: list[float] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        at_s = last = 0.0
        while not self._over.wait(0.02):
            frame = sample_cache.latest_frames([self._node.public_id]).get(self._node.public_id)
            if frame is not None and frame["at_s"] - frame["lag_s"] > at_s + 0.5:
                at_s, now = frame["at_s"] - frame["lag_s"], time.monotonic()
                self.gaps_s += [now - last] if last else []
                last = now

    def __enter__(self) -> Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5)


def attacked(harness: EngineHarness, submit: Any, *, frames: int, seed: int, jobs_timed: int) -> None:
    timed: list[Job] = []
    began = time.monotonic()
    with Dataset(harness, submit, frames, seed) as dataset, collecting(dataset.open_watch):
        honest = dataset.honest
        wait_for("the victim", lambda: dataset.victim.attempts.filter(state="RUNNING").exists(), 30)
        wait_for("live data", lambda: sample_cache.latest_frames([honest.public_id]), 30)
        with Ticks(honest) as calm:
            reference_s = [dataset.dispatch_s(timed) for _ in range(jobs_timed)]
            wait_for("ticks", lambda: len(calm.gaps_s) >= 3)
        rows = Rows(dataset.hostile, timed)
        before = rows.others()
        dataset.attack()
        with Ticks(honest) as attacked:
            measured_s = [dataset.dispatch_s(timed) for _ in range(jobs_timed)]
            wait_for(f"{frames} frames", lambda: dataset.agent.sent >= frames, frames / 40)
            wait_for("ticks", lambda: len(attacked.gaps_s) >= 3)
            wait_for(
                "its images are read",
                lambda: ImagePresence.objects.filter(node=dataset.hostile).exists(),
            )
        after = rows.others()
        changed = {
            key: (before.get(key), after.get(key))
            for key in before | after
            if before.get(key) != after.get(key)
        }
        changed = {key: pair for key, pair in changed.items() if not _is_of(pair, timed)}
        assert not changed, changed
        assert statistics.median(measured_s) <= 2.0 * statistics.median(reference_s) + 1.0
        assert statistics.median(attacked.gaps_s) <= statistics.median(calm.gaps_s) + 1.0
        assert Lease.objects.order_by("-epoch").first().epoch < EPOCHS_NEVER_GIVEN
        wait_for("its trouble", lambda: dataset.hostile.incidents.filter(kind="malformed").exists())
    minutes = NodeMetricsMinute.objects.filter(node=honest)
    uuids = list(Gpu.objects.filter(node=honest).order_by("index").values_list("uuid", flat=True))
    assert all(row.gpu_uuids == uuids for row in minutes)
    assert {job for row in minutes for each in row.holders for job in each} <= {dataset.victim.public_id}
    joules = AttemptGpuDay.objects.filter(attempt__job=dataset.victim).values_list("joules", flat=True)
    assert sum(joules) < 1000.0 * (time.monotonic() - began), "no GPU here draws as much"


def _is_of(pair: tuple[Any, Any], jobs: list[Job]) -> bool:
    """True for rows of the jobs that the test submitted between the two looks."""
    ids, names = {job.pk for job in jobs}, {job.public_id for job in jobs}
    return any(row and (row.get("job_id") in ids or row.get("object_id") in names) for row in pair)


def test_arbitrary_frames_affect_no_other_node(harness, submit, owner) -> None:
    attacked(harness, submit, frames=500, seed=1, jobs_timed=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_arbitrary_frames_do_not_either(harness, submit, owner, seed) -> None:
    attacked(harness, submit, frames=2_500, seed=seed, jobs_timed=20)
