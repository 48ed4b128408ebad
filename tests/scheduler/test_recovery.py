"""A restore of an older backup while nodes have moved on (I18), with real processes and a real dump."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from django.db import connection, connections, transaction

from portal.database.roles import as_owner, grant_service_privileges
from portal.domain.states import JobState
from portal.models import AuditEntry, ClusterSettings, Gpu, Job, Node, OrphanContainer, Task
from portal.services.cluster.recovery import begin_recovery, do_adopt_orphan, do_stop_orphan
from portal.services.jobs.submission import do_cancel_job, do_hold_job
from portal.standalone.postgres_tools import ToolProcess, find_tool
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive, engine_harness

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def harness(settings):
    with engine_harness() as harness:
        settings.DATA_DIR = harness.folder
        settings.LOG_DIR = Path(harness.folder) / "logs"
        yield harness


def major() -> int:
    connection.ensure_connection()
    return connection.connection.info.server_version // 10_000


def run(name: str, *arguments: str) -> None:
    """Run pg_dump or pg_restore as the owner."""
    with as_owner(), ToolProcess(find_tool(name, major()), arguments) as program:
        program.finish()


def dump(to: Path) -> None:
    run("pg_dump", "--format=custom", "--file", str(to))


def restore(of: Path) -> None:
    """What `manage.py restore` does with a database, in place of the one that lives on."""
    name = connection.settings_dict["NAME"]
    connections.close_all()
    how = ("--clean", "--if-exists", "--no-owner", "--exit-on-error", "--single-transaction")
    run("pg_restore", *how, "--dbname", name, str(of))
    with as_owner():
        grant_service_privileges()
    with transaction.atomic():
        begin_recovery()


class Told:
    """The scene, and the law that is looked at in every turn of the engine."""

    def __init__(self, harness: EngineHarness) -> None:
        self.harness, self.engine = harness, InProcessEngine()
        self.admin, self.owner = factories.user("root", admin=True), factories.user("ada")
        self.node = harness.mark_enrolled(harness.create_node(name="n1"))
        self.project = factories.project("vision", member=self.owner)
        self.environment = factories.environment(runtime="process", tool=False)

    def submit(self, *command: str, **fields) -> Job:
        fields = {
            "cpu_milli": 100,
            "memory_mib": 64,
            "termination_grace_s": 1,
            "command": list(command),
            **fields,
        }
        return factories.job(self.owner, self.project, self.environment, **fields)

    def reach(self, look, within_s: float = 30.0) -> None:
        def one_turn() -> bool:
            self.no_gpu_is_given_twice()
            return look()

        assert self.engine.run_until(one_turn, within_s), story()

    def running(self, *jobs: Job) -> None:
        for job in jobs:
            self.reach(lambda job=job: job.attempts.filter(state="RUNNING").exists())

    def no_gpu_is_given_twice(self) -> None:
        """What the record promises and what lives beside it on the node never pass a GPU's thousand."""
        held = Counter(dict(Gpu.objects.values_list("uuid", "used_milli")))
        recorded = set(Job.objects.filter(state="RUNNING").values_list("public_id", flat=True))
        path = self.harness.folder / "n1" / "state" / "ledger.json"
        ledger = json.loads(path.read_text()) if path.exists() else {"tasks": {}}
        on_node: Counter[str] = Counter()
        for task in ledger["tasks"].values():
            if task["phase"] != "exited":
                for share in task["gpus"]:
                    on_node[share["uuid"]] += share["milli"]
                    if task["job"] not in recorded and not ClusterSettings.objects.get().recovery_mode:
                        held[share["uuid"]] += share["milli"]
        assert all(milli <= 1000 for milli in (held | on_node).values()), (held, on_node)


def story() -> str:
    """How every job stands, for a test that waited in vain."""
    return "\n".join(
        f"{job.name} {job.state} {job.message} {getattr(getattr(job, 'standing', None), 'message', '')}"
        f" {[(task.attempt.state, task.status_message) for task in Task.objects.filter(attempt__job=job)]}"
        for job in Job.objects.order_by("pk")
    )


def unknown() -> dict[str, OrphanContainer]:
    return {row.job: row for row in OrphanContainer.objects.filter(removed_at__isnull=True, decision="")}


def test_jobs_started_after_the_backup_await_the_administrator(harness, tmp_path) -> None:
    reported, flag, file = Told(harness), harness.folder / "end", tmp_path / "older.dump"
    until_told = ("sh", "-c", f"while [ ! -e {flag} ]; do sleep 0.1; done")
    ended, queued = reported.submit("sleep", "600", name="ended"), reported.submit(*until_told, name="queued")
    do_hold_job(reported.owner, queued, True)
    reported.running(ended)
    dump(file)

    do_cancel_job(reported.owner, ended)
    reported.reach(lambda: not containers_alive(harness.folder))
    do_hold_job(reported.owner, queued, False)
    kept, stopped = reported.submit(*until_told, gpus_per_task=2), reported.submit("sleep", "600")
    reported.running(queued, kept, stopped)
    alive = containers_alive(harness.folder)
    assert len(alive) == 3
    newer_ids = {queued.public_id, kept.public_id, stopped.public_id}
    restore(file)
    assert not Job.objects.filter(public_id=kept.public_id).exists()

    late = reported.submit("true", name="late", gpus_per_task=4)
    reported.reach(lambda: set(unknown()) == newer_ids)
    reported.reach(lambda: Job.objects.get(pk=ended.pk).state == "PENDING")  # nothing of it is there any more
    do_cancel_job(reported.owner, Job.objects.get(pk=ended.pk))
    assert containers_alive(harness.folder) == alive, "nothing is ended by itself"
    rows = unknown()
    assert rows[kept.public_id].owner == reported.owner.public_id
    assert rows[kept.public_id].project == reported.project.public_id
    assert [share["milli"] for share in rows[kept.public_id].gpus] == [1000, 1000]
    assert Node.objects.get().reconciled_at is None

    do_stop_orphan(reported.admin, rows[stopped.public_id])
    stub = do_adopt_orphan(reported.admin, rows[kept.public_id])
    again = do_adopt_orphan(reported.admin, rows[queued.public_id])
    assert (stub.public_id, stub.owner, stub.project) == (kept.public_id, reported.owner, reported.project)
    assert (again.pk, again.is_placeholder, again.attempt_count) == (queued.pk, False, 1)
    assert sum(Gpu.objects.values_list("used_milli", flat=True)) == 3000
    reported.reach(lambda: not ClusterSettings.objects.get().recovery_mode)
    assert not any(stopped.public_id in name for name in containers_alive(harness.folder))
    assert OrphanContainer.objects.get(job=stopped.public_id).removed_at is not None
    ledger = json.loads((harness.folder / "n1" / "state" / "ledger.json").read_text())
    assert ledger["jobs"][stopped.public_id]["tombstones"] == [1]
    for name in alive:
        if stopped.public_id not in name:
            assert name in containers_alive(harness.folder), "what is kept runs on"
    late.refresh_from_db()
    assert late.state == "PENDING", "two of its four GPUs are held by what was kept"

    flag.touch()
    for job in (stub, again, late):
        reported.reach(lambda job=job: Job.objects.get(pk=job.pk).state == JobState.COMPLETED, within_s=40)
    assert Job.objects.get(pk=stub.pk).attempts.get().task_rows.get().exit_code == 0
    acts = set(AuditEntry.objects.values_list("action", flat=True))
    assert {"container.unknown", "container.adopt", "container.stop", "container.gone"} <= acts
    assert "cluster.recovered" in acts
