"""Records an installation of this release, for the tests of later ones. Once for each release, in its commit:

.venv/bin/python -m pytest -q tests/upgrade/record.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from agents.bundle import build_archive
from agents.engines.node_engine import NodeEngine
from agents.verbs import START, Verb
from portal.domain.jobs.schedules import ScheduleSpec
from portal.domain.storage.volumes import VolumeKind
from portal.services.jobs.schedules import do_create_schedule
from portal.services.jobs.submission import JobRequest, do_cancel_job, do_hold_job
from portal.services.projects.projects import QuotaValues, do_change_quota
from portal.services.projects.secrets import do_save_secret
from portal.services.storage.volumes import VolumeInput, do_save_volume
from portal.version import VERSION
from tests import factories
from tests.engine_harness import InProcessEngine, engine_harness
from tests.upgrade.recording import RECORDED, SECRET_KEY, check_no_paths, dump_database, store_agent_program

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parent.parent.parent


def test_record(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.SECRET_KEY = SECRET_KEY
    started: list[tuple[int, dict[str, Any]]] = []
    request = NodeEngine.request

    def note_start(self: NodeEngine, verb: Verb, read: Any, **fields: Any) -> Any:
        if verb is START:
            started.append((fields["epoch"], json.loads(json.dumps(fields["spec"]))))
        return request(self, verb, read, **fields)

    monkeypatch.setattr(NodeEngine, "request", note_start)
    target = RECORDED / VERSION
    target.mkdir(exist_ok=True)
    with engine_harness() as harness:
        settings.DATA_DIR, settings.LOG_DIR = harness.folder, harness.folder / "logs"
        running = make_installation(harness)
        dump_database(target / "database.sql.gz", harness.folder)
        row = next(each for each in started if each[1]["job"] == running.public_id)
        text = json.dumps(row, indent=1).replace(str(harness.folder), "@FOLDER@")
        (target / "start.json").write_text(text + "\n")
        build_archive(harness.folder / "built.pyz")
        store_agent_program(harness.folder / "built.pyz", target / "agent.pyz.xz")
    migrations = sorted((ROOT / "portal" / "migrations").glob("[0-9]*.py"))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in migrations}
    (target / "migrations.json").write_text(json.dumps(digests, indent=2) + "\n")
    check_no_paths(target)


def make_installation(harness: Any) -> Any:
    """Fill the database through the services; return the one job that runs."""
    admin, ada = factories.user("root", admin=True), factories.user("ada")
    node = harness.mark_enrolled(harness.create_node(name="n1"))
    project = factories.project("vision", member=ada, manager=admin)
    child = factories.project("vision-lab", parent=project, member=ada)
    environment = factories.environment("plain", runtime="process", tool=False)
    do_change_quota(
        admin, project, node.pool, QuotaValues(guaranteed_milli=2000, limit_milli=4000), version=None
    )
    do_save_volume(admin, VolumeInput("sets", VolumeKind.HOST_PATH, path="/data/sets", read_only=True))
    do_save_secret(ada, ada, "token", "a value")

    def submit(name: str, *command: str, **fields: Any) -> Any:
        common = {
            "cpu_milli": 100,
            "memory_mib": 64,
            "termination_grace_s": 1,
            "name": name,
            "command": list(command),
        }
        return factories.job(ada, fields.pop("project", project), environment, **common | fields)

    flag = harness.folder / "end"
    count = f"i=0; while [ ! -e {flag} ]; do echo $i; i=$((i+1)); sleep 0.2; done; echo end $i"
    running = submit("running", "sh", "-c", count)
    ended = [submit("completed", "true"), submit("failed", "false"), submit("cancelled", "sleep", "600")]
    held, large = submit("held", "true", project=child), submit("queued", "true", gpus_per_task=4)
    do_hold_job(ada, held, True)
    request = JobRequest(project=project, environment=environment, name="nightly", command=["true"])
    do_create_schedule(ada, ScheduleSpec(cron="30 2 * * *", time_zone="Europe/Berlin"), request)
    cancelled = False

    def done() -> bool:
        nonlocal cancelled
        for job in (*ended, running, large):
            job.refresh_from_db()
        if ended[2].attempts.filter(state="RUNNING").exists() and not cancelled:
            cancelled = bool(do_cancel_job(ada, ended[2])) or True
        states = [job.state for job in ended]
        return states == ["COMPLETED", "FAILED", "CANCELLED"] and running.attempts.get().state == "RUNNING"

    assert InProcessEngine().run_until(done, 60)
    return running
