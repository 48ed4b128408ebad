"""The program of the first release is upgraded to this one under running jobs, and rolled back both ways.

`test_upgrade.py` does it in every run with a recorded database; here the tag itself runs, with a machine over SSH.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from portal.version import VERSION
from tests.release_checkout import FIRST_RELEASE, check_out, python_for
from tests.rig.images import RigImage, rig_image
from tests.rig.rig import Rig
from tests.stories.operator_client import COUNTER, Operator, end_counter
from tests.stories.portal import CHECKOUT, StoryPortal
from tests.stories.users import eventually
from tests.time_budget import budget_s
from tests.upgrade.test_upgrade import MAX_WITHOUT_STARTS_S

pytestmark = [pytest.mark.rig, pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1200)]

SINGLES = 5


@pytest.fixture
def image() -> RigImage:
    return rig_image("tiny")


@pytest.fixture
def rig(image: RigImage) -> Iterator[Rig]:
    """A machine with sshd, podman and the image."""
    with Rig(1, image_stores=[image.store]) as made:
        yield made


@pytest.fixture
def released() -> Iterator[Path]:
    """The program of the first release."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-release-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield check_out(folder / "program", FIRST_RELEASE, python_for(None, folder))
    shutil.rmtree(folder, ignore_errors=True)


def test_the_first_release_is_upgraded_and_rolled_back_under_running_jobs(
    rig: Rig,
    released: Path,
    image: RigImage,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (machine,) = rig.nodes
    with StoryPortal("--no-local-node", checkout=released) as portal:
        operator = Operator(portal)
        operator.add_node(machine, "node1")
        operator.add_environment(image.name)
        counter = operator.submit("counter", COUNTER)
        run_singles(operator, "before")
        backup = portal.folder / "before.tar"
        done = portal.manage("backup", str(backup))
        assert done.returncode == 0, done.stderr
        at_backup = frozenset(operator.acknowledged)
        unknown = operator.submit("after-the-backup", COUNTER)
        operator.wait_running(unknown)

        forward_s = change_program(portal, operator, CHECKOUT, "upgraded")
        assert f"Fairway {VERSION} is ready" in portal.tail(200)
        run_singles(operator, "upgraded")
        check(operator, counter, unknown)

        back_s = change_program(portal, operator, released, "rolled-back")
        run_singles(operator, "rolled-back")
        check(operator, counter, unknown)

        restored_s = restore(portal, operator, backup)
        operator.post(f"recovery/containers/{unknown_container(operator, unknown)}/adopt/")
        first = operator.submit("first-after-the-restore", "true")
        operator.wait(first, "COMPLETED", within_s=90)
        operator.acknowledged[unknown] = str(operator.job(unknown)["name"])
        lost = operator.check_jobs(may_be_lost=frozenset(operator.acknowledged) - at_backup)
        assert not lost & {unknown, first}
        operator.check_counter(counter)
        for job in (counter, unknown):
            end_counter(machine, job)
            operator.wait(job, "COMPLETED")
        operator.check_counter(counter, ended=True)
    with capsys.disabled():
        print(
            f"\n{FIRST_RELEASE} to this version: {forward_s:.1f} s without new starts, back {back_s:.1f} s, "
            f"{restored_s:.1f} s for the restore of its backup; {len(lost)} jobs acknowledged after it were lost"
        )


def run_singles(operator: Operator, when: str) -> None:
    jobs = [operator.submit(f"{when}-{number}", f"echo {when} {number}") for number in range(SINGLES)]
    for number, job in enumerate(jobs):
        operator.wait(job, "COMPLETED")
        assert eventually(lambda job=job: operator.lines(job)) == [f"{when} {number}"]
        assert operator.attempts(job) == ["COMPLETED"]


def change_program(portal: StoryPortal, operator: Operator, program: Path, name: str) -> float:
    """Ctrl-C, another program, `up`; return the seconds without new starts."""
    limit_s = budget_s(MAX_WITHOUT_STARTS_S)
    began_s = time.monotonic()
    portal.stop()
    portal.checkout = program
    portal.start()
    first = operator.submit(f"first-{name}", "true")
    eventually(lambda: operator.job(first)["attempts"], MAX_WITHOUT_STARTS_S, "a job starts")
    without_s = time.monotonic() - began_s
    assert without_s <= max(limit_s, budget_s(MAX_WITHOUT_STARTS_S))
    operator.wait(first, "COMPLETED")
    return without_s


def check(operator: Operator, *counters: str) -> None:
    operator.check_jobs()
    for counter in counters:
        operator.check_counter(counter)


def restore(portal: StoryPortal, operator: Operator, backup: Path) -> float:
    """Restore with the program of the release into an empty data folder, and start it; return the seconds it took."""
    portal.stop()
    portal.data = portal.folder / "restored"
    began_s = time.monotonic()
    done = portal.manage("restore", str(backup))
    took_s = time.monotonic() - began_s
    assert "Restored cluster" in done.stdout, done.stderr
    portal.start()
    operator.use(portal)
    return took_s


def unknown_container(operator: Operator, job: str) -> str:
    (found,) = eventually(lambda: operator.get("recovery/containers/")["items"], 60, "the unknown container")
    assert found["job_id"] == job
    return str(found["id"])
