"""An elastic job on two nodes with real agents and processes: it grows, gives back, loses a task, and completes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.engines.ssh import NodeEngine
from portal.models import Job, Node
from portal.services.jobs import do_cancel_job
from portal.services.nodes import do_set_node_state
from portal.words.states import JobState, NodeState
from tests import record
from tests.engine_room import Engine, EngineRoom, containers_alive, engine_room, held_milli, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

LOOPS = """
echo "$FAIRWAY_TASKS of $FAIRWAY_TASKS_MIN to $FAIRWAY_TASKS_MAX" > "{told}-$FAIRWAY_TASK"
while true; do
  [ -e "{end}" ] && exit 0
  [ -e "{fail}-$FAIRWAY_TASK" ] && exit 3
  sleep 0.1
done
"""


@pytest.fixture(scope="module")
def shared_room():
    with engine_room() as room:
        yield room


@pytest.fixture
def room(shared_room, settings):
    settings.DATA_DIR = shared_room.folder
    settings.LOG_DIR = Path(shared_room.folder) / "logs"
    return shared_room


class Stand:
    """Two nodes of one GPU each, and a job of one to two tasks that runs until it is told to end."""

    def __init__(self, room: EngineRoom, name: str) -> None:
        self.room, self.engine = room, Engine()
        self.folder = room.folder / f"word-{name}"
        self.folder.mkdir(mode=0o777)
        self.folder.chmod(0o777)
        self.owner, self.manager = record.person("ada"), record.person("cem")
        self.project = record.project(member=self.owner, manager=self.manager)
        self.environment = record.environment(runtime="process", tool=False)
        pool = record.pool()
        self.names = [f"{name}{number}" for number in (1, 2)]
        self.nodes = [room.known(room.node(pool=pool, gpus=1, name=each), gpus=1) for each in self.names]

    def submit(self, who: str = "owner", command: str | None = None, **fields) -> Job:
        script = command or LOOPS.format(
            told=self.folder / "told", end=self.folder / "end", fail=self.folder / "fail"
        )
        fields = {"memory_mib": 64, "stop_grace_s": 1, **fields}
        return record.job(
            getattr(self, who), self.project, self.environment, command=["sh", "-c", script], **fields
        )

    def reach(self, job: Job, look, within_s: float = 30.0) -> None:
        story = "\n".join(f"{e.kind} {e.before}>{e.after} {e.reason} {e.sentence}" for e in job.events.all())
        assert self.engine.run_until(look, within_s), story

    def run(self, job: Job) -> dict[int, str]:
        """The tasks that run by the record, with their nodes."""
        job.refresh_from_db()
        rows = job.attempts.order_by("number").last()
        tasks = rows.task_rows.filter(gone=False, state="RUNNING").select_related("node") if rows else ()
        return {task.rank: task.node.name for task in tasks}

    def told(self) -> list[str]:
        """What the tasks were told of each other, each as it began."""
        return [path.read_text().strip() for path in sorted(self.folder.glob("told-*"))]

    def alive(self) -> list[str]:
        """The containers that live on both nodes."""
        return sorted(name for each in self.names for name in containers_alive(self.room.folder / each))

    def ended(self, job: Job, state: JobState = JobState.COMPLETED):
        def look() -> bool:
            job.refresh_from_db()
            return job.state == state

        return look


@pytest.fixture
def stand(room, request):
    return Stand(room, f"e{abs(hash(request.node.name)) % 10**8}")


def test_it_grows_onto_a_free_node_shrinks_for_one_that_goes_first_and_completes(stand) -> None:
    other = stand.submit(command="sleep 600")
    stand.reach(other, lambda: len(stand.run(other)) == 1)
    job = stand.submit(tasks=2, min_tasks=1)
    stand.reach(job, lambda: set(stand.run(job)) == {0})
    attempt = job.attempts.get()
    assert attempt.state == "RUNNING"
    do_cancel_job(stand.owner, other)
    stand.reach(job, lambda: set(stand.run(job)) == {0, 1})
    assert sorted(stand.run(job).values()) == stand.names
    wait_for("told", lambda: stand.told() == ["1 of 1 to 2", "2 of 1 to 2"])

    urgent = stand.submit("manager", command="sleep 600", priority=50)
    stand.reach(urgent, lambda: len(stand.run(urgent)) == 1)
    assert set(stand.run(job)) == {0} and job.attempts.count() == 1
    assert len([name for name in stand.alive() if job.public_id in name]) == 1

    do_cancel_job(stand.manager, urgent)
    stand.reach(job, lambda: set(stand.run(job)) == {0, 2})
    (stand.folder / "end").touch()
    stand.reach(job, stand.ended(job))
    assert job.attempts.count() == 1 and held_milli() == 0 and stand.alive() == []
    assert list(job.attempts.get().task_rows.values_list("rank", "state").order_by("rank")) == [
        (0, "COMPLETED"),
        (1, "PREEMPTED"),
        (2, "COMPLETED"),
    ]
    stand.engine.run_until(lambda: not attempt.task_rows.filter(log_complete=False).exists(), 20)
    assert not attempt.task_rows.filter(log_complete=False).exists()


def test_a_task_that_fails_and_a_node_that_restarts_leave_the_others_alone(stand, monkeypatch) -> None:
    monkeypatch.setattr("portal.services.endings.pause_s", lambda failures: 0.0)
    job = stand.submit(tasks=2, min_tasks=1)
    stand.reach(job, lambda: set(stand.run(job)) == {0, 1})
    (stand.folder / "fail-1").touch()
    stand.reach(job, lambda: set(stand.run(job)) == {0, 2})
    stand.room.reboot(stand.run(job)[2], boot="boot-9")
    stand.reach(job, lambda: set(stand.run(job)) == {0, 3})
    assert job.attempts.count() == 1
    kinds = list(job.events.filter(kind="task_lost").values_list("reason", flat=True))
    assert kinds == ["exit_code", "node_rebooted"]
    (stand.folder / "end").touch()
    stand.reach(job, stand.ended(job))
    assert held_milli() == 0 and stand.alive() == []


def test_a_node_that_is_drained_loses_only_the_tasks_there(stand) -> None:
    job = stand.submit(tasks=2, min_tasks=1)
    stand.reach(job, lambda: set(stand.run(job)) == {0, 1})
    node = Node.objects.get(name=stand.run(job)[1])
    do_set_node_state(record.person("root", admin=True), node, NodeState.DRAINED, reason="dust")
    stand.reach(job, lambda: set(stand.run(job)) == {0})
    assert job.attempts.get().stop_wanted_at is None
    (stand.folder / "end").touch()
    stand.reach(job, stand.ended(job))


def test_an_agent_that_cannot_end_one_task_alone_gives_the_whole_attempt_back(stand, monkeypatch) -> None:
    monkeypatch.setattr(NodeEngine, "stops_tasks", property(lambda engine: False))
    job = stand.submit(tasks=2, min_tasks=1)
    stand.reach(job, lambda: set(stand.run(job)) == {0, 1})
    urgent = stand.submit("manager", command="sleep 600", priority=50)
    stand.reach(urgent, lambda: len(stand.run(urgent)) == 1)
    stand.reach(job, lambda: job.attempts.count() == 2 and len(stand.run(job)) == 1)
    assert job.attempts.get(number=1).state == "PREEMPTED"
