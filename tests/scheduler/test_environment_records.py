"""Code and packages of jobs are recorded beside the real task, by the real agent."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from portal.domain.states import JobState
from portal.models import EnvironmentRecord, Job
from portal.services.environments.process_environment import world_readable_python
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, harness, shared_harness
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.two_rig_nodes import submit as submit_to_rig
from tests.two_rig_nodes import two_rig_nodes, wait_until

__all__ = ["harness", "shared_harness"]
pytestmark = pytest.mark.django_db(transaction=True)
URL = "https://ada:hunter2@git.example.org/lab/vit.git"


FolderMaker = Callable[[], Path]


@pytest.fixture
def folder() -> Iterator[FolderMaker]:
    """Makes folders that accounts of jobs may enter."""
    with ExitStack() as stack:

        def make() -> Path:
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairway-code-")))
            made.chmod(0o755)
            return made

        yield make


@pytest.fixture
def repository(folder: FolderMaker) -> Path:
    """A working tree with a commit, a change of it and a file that git does not know."""
    code = folder()
    git = ("git", "-C", str(code), "-c", "user.name=ada", "-c", "user.email=ada@example.org")
    (code / "train.py").write_text("import time\ntime.sleep(60)\n")
    for words in (
        ("init", "-qb", "vit"),
        ("add", "."),
        ("commit", "-qm", "first"),
        ("remote", "add", "origin", URL),
    ):
        subprocess.run([*git, *words], check=True)
    (code / "train.py").write_text("import time\ntime.sleep(120)\n")
    (code / "notes.txt").write_text("x")
    return code


def recorded(job: Job, within_s: float = 60.0) -> EnvironmentRecord:
    rows = EnvironmentRecord.objects.filter(job=job)
    assert InProcessEngine().run_until(rows.exists, within_s)
    return rows.get()


def submit(harness: EngineHarness, *command: str, **fields) -> Job:
    harness.mark_enrolled(
        harness.create_node(name=f"n{len(list(harness.folder.iterdir()))}x", gpus=1), gpus=1
    )
    owner = factories.user()
    environment = factories.environment(runtime="process", tool=False)
    return factories.job(
        owner, factories.project(member=owner), environment, command=list(command), memory_mib=256, **fields
    )


def test_a_job_records_its_code_and_packages_and_runs_on(harness: EngineHarness, repository: Path) -> None:
    python = str(world_readable_python())
    job = submit(harness, "/bin/sh", "-c", f"cd {repository} && exec {python} train.py", seed=7)
    record = recorded(job)
    head = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert (record.git_commit, record.git_branch) == (head, "vit")
    assert record.git_remote == "https://git.example.org/lab/vit.git"
    assert "-time.sleep(60)" in record.git_diff and "+time.sleep(120)" in record.git_diff
    assert record.diff_is_complete and record.untracked_files == ["notes.txt"]
    assert record.python == python and record.python_version.startswith("3.")
    assert any(line.startswith("pip==") for line in record.packages) or record.packages
    assert (record.gpu_model, record.problem) == ("Test 80", "")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING


@pytest.mark.long
def test_a_recording_that_hangs_ends_without_the_job(harness: EngineHarness, folder: FolderMaker) -> None:
    blocking = folder()
    (blocking / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (blocking / "git").chmod(0o755)
    job = submit(harness, "/bin/sleep", "90", env={"PATH": f"{blocking}:/usr/local/bin:/usr/bin:/bin"})
    record = recorded(job, 80.0)
    assert record.git_commit == ""
    job.refresh_from_db()
    assert job.state == JobState.RUNNING


@pytest.mark.rig
def test_a_container_is_recorded_by_its_own_python(
    make_rig, rig_cluster: RigCluster, tiny_image: RigImage, settings, tmp_path: Path
) -> None:
    made = two_rig_nodes(
        make_rig, rig_cluster, tiny_image, [[tiny_image.store], [tiny_image.store]], settings, tmp_path
    )
    job = submit_to_rig(made, "python3", "-c", "import time; time.sleep(90)", memory_mib=64)
    wait_until(made, EnvironmentRecord.objects.filter(job=job).exists, job)
    record = EnvironmentRecord.objects.get(job=job)
    assert (record.problem, record.git_commit) == ("", "")
    assert record.python_version and record.python.endswith("python3")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
