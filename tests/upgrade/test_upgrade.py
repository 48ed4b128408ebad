"""Each recorded release is upgraded with its rows and a job that its agent has started."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.urls import reverse

from agents.engines.node_engine import NodeEngine
from agents.engines.replies import StartResult
from agents.verbs import START
from portal.database.roles import as_owner
from portal.domain.states import JobState
from portal.models import Gpu, Job, Node, Project, Secret, User
from portal.services.jobs.logs import log_path
from portal.services.jobs.submission import do_hold_job
from portal.web.display.navigation import NAVIGATION
from tests.agent_program import copy_agent_program
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive, engine_harness
from tests.upgrade.recording import (
    RECORDED,
    SECRET_KEY,
    agent_program,
    check_no_paths,
    recorded_database,
    start_request,
)

pytestmark = pytest.mark.django_db(transaction=True)

MAX_WITHOUT_STARTS_S = 60.0
RELEASES = sorted(path.name for path in RECORDED.iterdir())
SCHEMA = {
    "columns": "SELECT table_name, column_name, data_type, is_nullable, column_default, is_identity "
    "FROM information_schema.columns WHERE table_schema = 'public'",
    "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = 'public'::regnamespace AND contype <> 'n'",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "triggers": "SELECT tgrelid::regclass::text, tgname, pg_get_triggerdef(oid) FROM pg_trigger "
    "WHERE NOT tgisinternal",
    "functions": "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace "
    "AND prolang <> (SELECT oid FROM pg_language WHERE lanname = 'c')",
    "privileges": "SELECT grantee, table_name, privilege_type FROM information_schema.table_privileges "
    "WHERE table_schema = 'public'",
}


@pytest.fixture
def harness(settings: Any) -> Iterator[EngineHarness]:
    with engine_harness() as made:
        settings.SECRET_KEY = SECRET_KEY
        settings.DATA_DIR, settings.LOG_DIR = made.folder, made.folder / "logs"
        yield made


def schema() -> dict[str, set[tuple[Any, ...]]]:
    with as_owner(), connection.cursor() as cursor:
        found = {}
        for what, query in SCHEMA.items():
            cursor.execute(query)
            found[what] = {tuple(map(plain, row)) for row in cursor.fetchall()}
        return found


def plain(value: Any) -> Any:
    """Return a definition without the casts and parentheses that PostgreSQL adds when it reads its own output."""
    return re.sub(r"::(character varying|text)(\[\])?|[()]", "", value) if isinstance(value, str) else value


def start_recorded_job(harness: EngineHarness, release: str) -> None:
    """Run the recorded job on this machine with the agent of its release, as the node was before the upgrade."""
    with as_owner():  # `migrate` has not granted the services' role anything here
        node = Node.objects.only("settings").get()
    home = harness.folder / "n1"
    home.mkdir(mode=0o755)
    (home / "boot_id").write_text("boot-1")
    harness.write_gpus("n1", [f"SIM-n1-{index}" for index in range(4)])
    program, words = harness.folder / "old.pyz", harness.folder / "old.json"
    program.write_bytes(agent_program(release))
    words.write_text(json.dumps(node.settings))
    engine = NodeEngine.local(program, words, cluster=node.settings["cluster"])
    epoch, spec = start_request(release, harness.folder)
    engine.request(START, StartResult.from_wire, epoch=epoch, spec=spec)
    assert containers_alive(harness.folder)
    engine.close()
    harness.clusters.add(node.settings["cluster"])


def lines(job: Job) -> list[str]:
    """Return what the job has written, from the portal's copy."""
    path = log_path(job.public_id, 1, 0, "k8s")
    return [line.split(" ", 3)[3] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("release", RELEASES)
def test_a_recorded_release_is_upgraded_under_a_running_job(
    release: str, harness: EngineHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = schema()
    with recorded_database(release, harness.folder):
        start_recorded_job(harness, release)
        began_s = time.monotonic()
        call_command("migrate", verbosity=0)
        migrated_s = time.monotonic() - began_s
        for what, rows in schema().items():
            assert rows == fresh[what], f"{what} of an upgraded database differ from those of a new one"

        running = Job.objects.get(name="running")
        queued = Job.objects.get(name="held")
        do_hold_job(queued.owner, queued, False)
        copy_agent_program(harness.folder / "agent" / "agent.pyz")
        engine = InProcessEngine()
        assert engine.run_until(lambda: Job.objects.get(pk=queued.pk).attempt_count > 0, MAX_WITHOUT_STARTS_S)
        without_s = time.monotonic() - began_s
        assert without_s <= MAX_WITHOUT_STARTS_S
        read_pages()
        (harness.folder / "end").touch()
        waiting = Job.objects.filter(name__in=("running", "held", "queued")).exclude(state=JobState.COMPLETED)
        over = lambda: not waiting.exists() and not Gpu.objects.filter(used_milli__gt=0).exists()  # noqa: E731
        assert engine.run_until(over, 40), [(j.name, j.state, j.message) for j in Job.objects.all()]
        assert running.attempts.count() == 1
        told = lines(running)
        numbers = [line for line in told if line.isdigit()]
        assert len(numbers) > 3
        assert told == [*map(str, range(len(numbers))), f"end {len(numbers)}"]
    with capsys.disabled():
        print(f"\n{release}: migrated in {migrated_s:.1f} s, {without_s:.1f} s without new starts")


def read_pages() -> None:
    """Open every page of the sidebar and every job as an administrator, over the recorded rows."""
    admin = User.objects.get(username="root")
    client = Client()
    client.force_login(admin)
    for group in NAVIGATION.values():
        for item in group:
            assert client.get(reverse(item.view)).status_code == 200, item.view
    for job in Job.objects.all():
        assert client.get(reverse("job", args=[job.public_id])).status_code == 200, job.name
        assert client.get(f"/api/v1/jobs/{job.public_id}/").status_code == 200, job.name
    assert Project.objects.count() == 2
    assert Secret.objects.count() == 1


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_files_name_no_machine(release: str) -> None:
    check_no_paths(RECORDED / release)
    assert sum(path.stat().st_size for path in (RECORDED / release).iterdir()) < 300_000
