"""An operator's story: install, add nodes, run jobs, back up, upgrade, reinstall a node, restore elsewhere, retire.

The installation starts as release 0.1.0 and belongs to an account without privileges, on a PostgreSQL whose owner
role is no superuser. After each step every acknowledged job is there once, and a counter that was started in the
first step has never been interrupted. Times are printed (docs/benchmarks.md), never asserted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.keys import fingerprint
from portal.standalone.account import service_account, set_owner
from portal.standalone.processes.exec_child import exec_command
from portal.standalone.servers.binaries import find_postgres
from portal.version import VERSION
from tests.release_checkout import FIRST_RELEASE, check_out, python_for
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.rig.rig import Rig
from tests.standalone.postgres_servers import OWNER, PASSWORD, SERVICES, SUPERUSER, OwnPostgres, own_postgres
from tests.stories.operator_client import COUNTER, POOL, REST, Operator, end_counter
from tests.stories.portal import StoryPortal, free_port
from tests.stories.users import eventually

pytestmark = [pytest.mark.rig, pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1500)]

SINGLES = 6
ARCHIVE_TIMEOUT_S = 10
NAMES = ("node1", "node2")


@pytest.fixture
def rig(tiny_image: RigImage) -> Iterator[Rig]:
    """Two machines with sshd, podman and the image, not yet nodes of anything."""
    with Rig(2, image_stores=[tiny_image.store]) as made:
        yield made


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder, with a space in its path, that every account can pass through."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-operator ", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Figures:
    """Prints what was measured as it is known."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._began_s = capsys, time.monotonic()

    def show(self, text: str) -> None:
        with self._capsys.disabled():
            print(f"\n{time.monotonic() - self._began_s:5.0f} s  {text}", end="", flush=True)


def test_an_operator_loses_no_job(
    rig: Rig, tiny_image: RigImage, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, account = Figures(capsys), service_account()
    machines = dict(zip(NAMES, rig.nodes, strict=True))
    python = python_for(account, place)
    with contextlib.ExitStack() as left:
        server = left.enter_context(own_postgres(find_postgres().major))
        prepare_server(server)
        installed = check_out(place / "installed", FIRST_RELEASE, python, account)
        portal = portal_on(server, "first", installed, account)
        left.callback(portal.remove)
        portal.start()
        check_roles(server, portal)
        operator = Operator(portal)
        figures.show(f"installed {FIRST_RELEASE} as {account}: ready after {portal.took_s:.1f} s")
        counter = run_jobs(operator, machines, tiny_image)
        figures.show(f"{len(operator.acknowledged)} jobs on two nodes")
        first = back_up_first_release(portal, operator, server, place)
        figures.show(f"backup of {FIRST_RELEASE}: {first.stat().st_size / 1e6:.1f} MB")
        upgrade(portal, operator, check_out(place / "present", None, python, account), figures)
        operator.check_counter(counter)
        reinstall(operator, machines, counter, figures)
        elsewhere = portal_on(server, "elsewhere", portal.checkout, account)
        left.callback(elsewhere.remove)
        running = restore_elsewhere(portal, elsewhere, operator, place, figures)
        operator.check_counter(counter)
        recover_to_a_point_in_time(elsewhere, operator, server, left, figures)
        for job in (counter, running):
            operator.check_counter(job)
        retire(operator, machines, (counter, running))
        figures.show(f"retired, after {operator.submitted} acknowledged jobs\n")


# -- the steps -------------------------------------------------------------------------------------


def prepare_server(server: OwnPostgres) -> None:
    """Create the owner of docs/operations.md; archive each segment of the WAL so many seconds after its first row."""
    archive = server.folder / "archive"
    archive.mkdir()
    set_owner(archive, service_account(), 0o700)
    for setting, value in (
        ("archive_mode", "on"),
        ("archive_timeout", f"{ARCHIVE_TIMEOUT_S}s"),
        ("archive_command", f'test ! -f "{archive}/%f" && cp "%p" "{archive}/%f"'),
        ("restore_command", f'cp "{archive}/%f" "%p"'),
    ):
        server.execute(f"ALTER SYSTEM SET {setting} = '{value}'")
    server.stop()
    server.start()
    server.create_roles()


def check_roles(server: OwnPostgres, portal: StoryPortal) -> None:
    """Check that nothing here has privileges: neither the process nor a role of the database."""
    assert os.stat(f"/proc/{portal.process_id}").st_uid != 0
    roles = "SELECT rolname, rolsuper FROM pg_roles WHERE rolname = ANY(%s) ORDER BY 1"
    assert server.execute(roles, [OWNER, SERVICES]) == [(OWNER, False), (SERVICES, False)]


def portal_on(
    server: OwnPostgres, database: str, checkout: Path, account: str | None, *, create: bool = True
) -> StoryPortal:
    """Return a portal, not started, with an empty data folder and, if it is created, an empty database."""
    if create:
        server.create_database(database)
    named = server.environment(database, Path("/"))
    servers = {name: named[name] for name in ("DATABASE_URL", "DATABASE_OWNER_URL")}
    return StoryPortal("--no-local-node", checkout=checkout, account=account, **servers)


def run_jobs(operator: Operator, machines: dict[str, RigNode], image: RigImage) -> str:
    """Add both machines; run singles, a gang over both, and a counter, whose id is returned."""
    for name, machine in machines.items():
        operator.add_node(machine, name)
    operator.add_environment(image.name)
    run_gang(operator, "gang")
    counter = operator.submit("counter", COUNTER)
    singles = [operator.submit(f"single-{number}", f"echo ran {number}") for number in range(SINGLES)]
    for number, job in enumerate(singles):
        operator.wait(job, "COMPLETED")
        assert eventually(lambda job=job: operator.lines(job)) == [f"ran {number}"]
    operator.wait_running(counter)
    operator.check_jobs()
    return counter


def run_gang(operator: Operator, name: str, **fields: Any) -> None:
    """Run a job that needs a task on each machine, whose counter may hold one of the four GPUs."""
    gang = operator.submit(name, "hostname", tasks=2, gpus_per_task=3, **fields)
    operator.wait(gang, "COMPLETED", within_s=90)
    tasks = operator.job(gang)["attempts"][-1]["tasks"]
    assert {task["node"]["name"] for task in tasks} == set(NAMES)


def back_up_first_release(portal: StoryPortal, operator: Operator, server: OwnPostgres, place: Path) -> Path:
    """Back up as the changelog says for 0.1.0: its owner needs the rights of the services' role for it."""
    (place / "safe").mkdir(mode=0o700)
    if portal.account:
        shutil.chown(place / "safe", portal.account)
    target = place / "safe" / "first.tar"
    refused = portal.manage("backup", str(target))
    assert "permission denied for table" in refused.stderr, refused.stderr
    assert not target.exists()
    server.execute(f'GRANT "{SERVICES}" TO "{OWNER}"', role=OWNER)
    done = portal.manage("backup", str(target))
    assert done.returncode == 0, done.stderr
    operator.check_jobs()
    return target


def upgrade(portal: StoryPortal, operator: Operator, present: Path, figures: Figures) -> None:
    """Build the new program, Ctrl-C, `up`: jobs keep running; the time without new starts is printed."""
    portal.checkout = present
    done = portal.manage("build")
    assert done.returncode == 0, done.stderr
    began_s = time.monotonic()
    portal.stop()
    stopped_s = time.monotonic() - began_s
    portal.start()
    ready_s = time.monotonic() - began_s
    first = operator.submit("first-after-the-upgrade", "echo upgraded")
    eventually(lambda: operator.job(first)["attempts"], 90, "a job starts after the upgrade")
    figures.show(
        f"upgrade: {time.monotonic() - began_s:.1f} s without new starts ({stopped_s:.1f} s until the old program "
        f"has ended, {ready_s:.1f} s until the new one answers)"
    )
    assert f"Fairway {VERSION} is ready" in portal.tail(200)
    operator.wait(first, "COMPLETED")
    for name in NAMES:
        eventually(lambda name=name: operator.is_ready(name), 90, f"{name} answers the new portal")
    operator.check_jobs()


def reinstall(operator: Operator, machines: dict[str, RigNode], counter: str, figures: Figures) -> None:
    """Reinstall the machine without the counter; confirm its new host key and set it up again."""
    (name,) = set(NAMES) - {operator.node_of(counter)}
    machine = machines[name]
    lost = operator.submit(
        "on-the-reinstalled-node", "sleep 20; echo again", pool=POOL, preferred_nodes=[name]
    )
    operator.wait_running(lost)
    assert operator.node_of(lost) == name
    old_key = machine.host_key()
    machine.reinstall()
    eventually(
        lambda: fingerprint(machine.host_key()) in operator.get(f"nodes/{name}/")["status_message"],
        60,
        "the portal shows the new key",
    )
    began_s = time.monotonic()
    keys = operator.get(f"nodes/{name}/host-keys/")
    assert (keys["known"]["fingerprint"], keys["presented"]["fingerprint"]) == (
        fingerprint(old_key),
        fingerprint(machine.host_key()),
    )
    wanted = {"fingerprint": fingerprint(machine.host_key()), "reason": "a new disk"}
    operator.post(f"nodes/{name}/confirm-key/", wanted)
    script = operator.get(f"nodes/{name}/setup-script/")["script"]
    machine.execute("sh", "-s", text_in=script, timeout_s=120)
    eventually(lambda: operator.is_ready(name), 90, "the reinstalled node is ready")
    figures.show(f"reinstalled {name}: ready {time.monotonic() - began_s:.1f} s after its key was confirmed")
    operator.wait(lost, "COMPLETED", within_s=120)
    assert operator.attempts(lost) in (["NODE_FAIL", "COMPLETED"], ["COMPLETED", "NODE_FAIL"])
    run_gang(operator, "gang-on-the-reinstalled-node")
    operator.check_counter(counter)
    operator.check_jobs()


def restore_elsewhere(
    portal: StoryPortal, elsewhere: StoryPortal, operator: Operator, place: Path, figures: Figures
) -> str:
    """Back up, go on, lose the portal's machine, restore into another folder and database.

    What was acknowledged after the backup is lost, apart from the task that still runs, which is adopted: return it.
    """
    backup = place / "safe" / "second.tar"
    ending = operator.submit("ends-after-the-backup", "sleep 15; echo ended")
    operator.wait_running(ending)
    done = portal.manage("backup", str(backup))
    assert done.returncode == 0, done.stderr
    at_backup, backup_s = frozenset(operator.acknowledged), time.monotonic()
    later = [operator.submit(f"later-{number}", "true") for number in range(3)]
    running = operator.submit("runs-after-the-backup", COUNTER)
    for job in (*later, ending):
        operator.wait(job, "COMPLETED", within_s=90)
    operator.wait_running(running)
    operator.check_jobs()
    portal.kill()
    age_s, begun_s = time.monotonic() - backup_s, time.monotonic()

    done = elsewhere.manage("restore", str(backup))
    assert "Restored cluster" in done.stdout, done.stderr
    restored_s = time.monotonic() - begun_s
    elsewhere.start()
    operator.use(elsewhere)  # its token is in the backup
    ready_s = time.monotonic() - begun_s
    since = frozenset(operator.acknowledged) - at_backup
    first = operator.submit("first-after-the-restore", "echo first")
    (unknown,) = eventually(
        lambda: operator.get("recovery/containers/")["items"], 60, "the unknown container is found"
    )
    assert unknown["job_id"] == running
    operator.post(f"recovery/containers/{unknown['id']}/adopt/")
    eventually(lambda: operator.job(first)["attempts"], 90, "a job starts after the restore")
    recovered_s = time.monotonic() - begun_s
    operator.wait(first, "COMPLETED")
    operator.wait(ending, "COMPLETED", within_s=90)
    assert not operator.get("recovery/")["recovery_mode"]
    operator.acknowledged[running] = str(operator.job(running)["name"])  # a placeholder has another
    lost = operator.check_jobs(may_be_lost=since)
    assert lost == frozenset(later)
    figures.show(
        f"RPO with a backup {age_s:.0f} s before the failure: {len(lost)} of {len(since)} jobs acknowledged since "
        "are lost, all of which had ended; the one that ran was adopted"
    )
    figures.show(
        f"RTO: {recovered_s:.1f} s from the begin of `restore` ({restored_s:.1f} s) until the portal answers "
        f"({ready_s:.1f} s) and a job starts"
    )
    return running


def recover_to_a_point_in_time(
    portal: StoryPortal,
    operator: Operator,
    server: OwnPostgres,
    left: contextlib.ExitStack,
    figures: Figures,
) -> None:
    """Lose the machine of portal and database; recover from a base backup, the archived WAL, and the copied keys."""
    base = OwnPostgres(server.folder / "recovered", server.binaries, free_port())
    base.folder.mkdir()
    set_owner(base.folder, service_account(), 0o700)
    base.data = base.folder / "postgres"
    take = [server.binaries.program("pg_basebackup"), "--pgdata", str(base.data), "--checkpoint", "fast"]
    take += [
        "--host",
        "127.0.0.1",
        "--port",
        str(server.port),
        "--username",
        SUPERUSER,
        "--wal-method",
        "none",
    ]
    done = subprocess.run(
        exec_command(take, account=service_account()),
        env=os.environ | {"PGPASSWORD": PASSWORD},
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = [operator.submit(f"archived-{number}", "true") for number in range(3)]
    for job in kept:
        operator.wait(job, "COMPLETED")
    ((segment,),) = server.execute("SELECT pg_walfile_name(pg_current_wal_lsn())")
    archived = "SELECT last_archived_wal >= %s FROM pg_stat_archiver"
    eventually(lambda: server.execute(archived, segment) == [(True,)], 60, "the WAL is archived")
    last = frozenset(operator.submit(f"at-the-end-{number}", "true") for number in range(3))
    server.crash()
    portal.kill()

    begun_s = time.monotonic()
    (base.data / "recovery.signal").touch()
    base.start()
    left.callback(base.stop)
    recovering = "SELECT pg_is_in_recovery()"
    eventually(lambda: base.execute(recovering) == [(False,)], 60, "PostgreSQL has recovered")
    recovered = portal_on(base, "elsewhere", portal.checkout, portal.account, create=False)
    left.callback(recovered.remove)
    for name in ("keys", "secret_key"):
        copy = ["cp", "--archive", str(portal.data / name), str(recovered.data / name)]
        subprocess.run(copy, check=True)
    done = recovered.manage("begin-recovery")
    assert done.returncode == 0, done.stderr
    recovered.start()
    operator.use(recovered)
    first = operator.submit("first-after-the-recovery", "true")
    eventually(lambda: operator.job(first)["attempts"], 90, "a job starts after the recovery")
    recovered_s = time.monotonic() - begun_s
    operator.wait(first, "COMPLETED")
    lost = operator.check_jobs(may_be_lost=last)
    for job in last - lost:
        operator.wait(job, "COMPLETED")
    figures.show(
        f"RPO with WAL archived within {ARCHIVE_TIMEOUT_S} s: {len(lost)} of {len(last)} jobs lost, which were "
        f"acknowledged right before the failure, and none of {len(kept)} before them; RTO {recovered_s:.1f} s"
    )


def retire(operator: Operator, machines: dict[str, RigNode], running: tuple[str, ...]) -> None:
    """A node with work is not retired; when it has ended, both are, and nothing is left on the machines."""
    for job in running:
        name = operator.node_of(job)
        refused = operator.api.post(f"{REST}nodes/{name}/retire/", json={"reason": "the end"})
        assert refused.status_code == 409 and refused.json()["code"] == "node_busy", refused.text
        end_counter(machines[name], job)
        operator.wait(job, "COMPLETED")
    operator.check_counter(running[0], ended=True)
    for name, machine in machines.items():
        assert machine.podman("ps", "--quiet").split() == []
        operator.post(f"nodes/{name}/retire/", {"reason": "the end"})
    assert operator.get("nodes/")["items"] == []
