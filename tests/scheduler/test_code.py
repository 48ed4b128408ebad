"""The code of a job is checked out by the real agent, recorded on its attempt, and repeated by reruns."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.errors import Conflict, InvalidRequest, NotFound
from portal.models import Attempt, ClusterSettings, CodeArchive, EnvironmentRecord, Job, Node
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs import code_archives
from portal.services.jobs.code import record_code_commit
from portal.services.jobs.code_archives import delete_unused_archives, do_store_archive
from portal.services.jobs.environment_records import recording_wait_s
from portal.services.jobs.failures import identify_failures
from portal.services.jobs.logs import log_path
from portal.services.jobs.reruns import do_rerun, find_drift
from portal.services.projects.secrets import do_save_secret
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, harness, shared_harness
from tests.git_servers import Repository, https_server, silent_server
from tests.rig.images import RigImage, rig_image
from tests.two_rig_nodes import describe, two_rig_nodes, wait_until
from tests.two_rig_nodes import submit as submit_to_rig

__all__ = ["harness", "shared_harness"]
pytestmark = pytest.mark.django_db(transaction=True)
TOKEN = "t0ken-of-the-project"


@pytest.fixture
def served() -> Iterator[dict[str, Any]]:
    """A repository over https with a token, and the fields of a job with its code."""
    with tempfile.TemporaryDirectory(prefix="fairway-git-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        repository = Repository(folder / "served")
        with https_server(folder / "served", TOKEN) as (url, certificate):
            yield {
                "repository": repository,
                "fields": {
                    "code_repository": f"{url}/lab/vit.git",
                    "env": {"GIT_SSL_CAINFO": str(certificate)},
                    "secrets": [{"secret": "git", "owner_type": "project", "file": "git_token"}],
                },
            }


@pytest.fixture
def submit(harness: EngineHarness) -> Any:
    """Submits a job of a project that keeps the token as a secret, for a real agent without containers."""
    harness.mark_enrolled(
        harness.create_node(name=f"n{len(list(harness.folder.iterdir()))}x", gpus=2), gpus=2
    )
    manager = factories.user()
    project = factories.project(manager=manager)
    do_save_secret(manager, project, "git", TOKEN)
    environment = factories.environment(runtime="process", tool=False)

    def made(*command: str, **fields: Any) -> Job:
        fields = {"command": list(command), "memory_mib": 256, "seed": 1, "max_attempts": 1} | fields
        return factories.job(manager, project, environment, **fields)

    made.owner, made.project = manager, project  # type: ignore[attr-defined]
    return made


def finish(job: Job, state: str = JobState.COMPLETED, within_s: float = 60.0) -> Job:
    def ended() -> bool:
        job.refresh_from_db()
        return job.state == state

    assert InProcessEngine().run_until(ended, within_s), describe(job)
    return get_job(job.owner, job.public_id)


def output(job: Job, attempt: int = 1) -> str:
    return log_path(job.public_id, attempt, 0, "k8s").read_text()


def test_the_commit_that_ran_is_recorded_and_a_rerun_checks_it_out_after_the_branch_moved(
    served, submit
) -> None:
    job = finish(submit("/bin/sh", "-c", "cat train.py; pwd; echo $FAIRWAY_CODE_DIR", **served["fields"]))
    first = served["repository"].first
    attempt = job.attempts.get()
    assert attempt.code_commit == first
    assert attempt.code_ready_at is not None and attempt.running_at is not None
    assert attempt.running_at <= attempt.code_ready_at <= attempt.ended_at
    assert "print('first version')" in output(job)
    assert TOKEN not in output(job)
    ran_in, announced = (line.split()[-1] for line in output(job).splitlines()[-2:])
    assert ran_in == announced and ran_in.endswith("/tmp/code")
    assert job.events.filter(kind="code", message=f"It checked out commit {first}.").exists()

    served["repository"].commit("train.py", "print('second version')\n")
    served["repository"].publish()
    later = finish(submit("cat", "train.py", **served["fields"]))
    assert "second version" in output(later) and later.attempts.get().code_commit != first
    drift, fresh = do_rerun(job.owner, job)
    assert fresh is not None and fresh.code_ref == first
    assert "commit_unknown" not in {each.code for each in drift}
    again = finish(fresh)
    assert "first version" in output(again) and again.attempts.get().code_commit == first

    served["repository"].forget_history()
    _, fresh = do_rerun(job.owner, job)
    assert fresh is not None
    lost = finish(fresh, JobState.FAILED)
    assert f"fatal: reference is not a tree: {first}" in output(lost)
    assert _rule(lost) == "git_reference"


def test_a_retry_uses_the_commit_of_the_first_attempt(served, submit) -> None:
    command = "cat train.py; [ $FAIRWAY_ATTEMPT = 2 ]"
    fields = {"max_attempts": 2, "retry_on": ["command_failure"], "retry_backoff_s": 1}
    job = submit("/bin/sh", "-c", command, **served["fields"] | fields)
    assert InProcessEngine().run_until(Attempt.objects.filter(job=job, ended_at__isnull=False).exists, 60)
    served["repository"].commit("train.py", "print('second version')\n")
    served["repository"].publish()
    finish(job)
    assert "first version" in output(job, 2)
    assert set(job.attempts.values_list("code_commit", flat=True)) == {served["repository"].first}


@pytest.mark.long
def test_tasks_with_different_commits_end_the_attempt(served, submit) -> None:
    job = submit("sleep", "60", **served["fields"])
    recorded = Attempt.objects.filter(job=job).exclude(code_commit="")
    assert InProcessEngine().run_until(recorded.exists, 60), describe(job)
    record_code_commit(recorded.select_related("job").get(), "f" * 40, None)
    job = finish(job, JobState.FAILED)
    assert job.reason == EndReason.CODE_CHANGED
    first = served["repository"].first
    assert job.message == (
        f"Its tasks checked out different commits, {first[:12]} and ffffffffffff: its branch or tag moved. The next "
        f"attempt checks out {first[:12]}."
    )


def test_a_server_that_hangs_and_a_repository_above_the_limit_end_the_start(served, submit) -> None:
    ClusterSettings.objects.update(policy={"code_time_limit_s": 2.0})
    with silent_server() as url:
        fields = {"code_repository": f"{url}/lab/vit.git"}
        job = finish(submit("true", **served["fields"] | fields), JobState.FAILED)
    assert "took longer than the limit of 2 s." in output(job)
    assert (_rule(job), job.attempts.get().code_commit) == ("code_timeout", "")
    assert "commit_unknown" in {each.code for each in find_drift(job.owner, job)}

    ClusterSettings.objects.update(policy={"code_size_limit_mib": 1.0})
    for number in range(4):
        served["repository"].commit(f"data{number}", os.urandom(2**20))
    served["repository"].publish()
    job = submit("true", **served["fields"])
    finish(job, JobState.FAILED)
    assert "larger than the limit of 1 MiB." in output(job) and _rule(job) == "code_too_large"


def test_a_wrong_token_is_recognized(served, submit) -> None:
    job = submit("true", **served["fields"])
    do_save_secret(job.owner, job.project, "git", "wrong")
    finish(job, JobState.FAILED)
    assert _rule(job) == "git_authentication"


def _rule(job: Job) -> str:
    identify_failures()
    return job.attempts.order_by("-number")[0].failure_rule


def test_code_without_a_key_a_host_key_or_its_folder_is_refused() -> None:
    owner = factories.user()
    project, environment = factories.project(member=owner), factories.environment(tool=False)
    factories.node(factories.pool())

    def refused(**fields: Any) -> dict[str, str]:
        with pytest.raises(InvalidRequest) as caught:
            factories.job(owner, project, environment, **fields)
        return dict(caught.value.fields)

    ssh = "git@git.example.org:lab/vit.git"
    assert "deploy key" in refused(code_repository=ssh)["code_repository"]
    key = [{"secret": "deploy", "owner_type": "project", "file": "git_key"}]
    assert refused(code_repository=ssh, secrets=key)["code_host_key"].startswith("Enter the host key")
    assert refused(code_ref="main") == {"code_ref": "Enter the repository, too."}
    for url in (
        "https://ada:pw@git.example.org/vit",
        "file:///srv/vit",
        "ext::sh -c id",
        "-u@x:y",
        "http://x/y",
    ):
        assert "without a password" in refused(code_repository=url)["code_repository"], url
    for ref in ("--upload-pack=x", "a..b", "a b", "+main", "main:x"):
        assert "code_ref" in refused(code_repository="https://git.example.org/vit", code_ref=ref), ref


@pytest.mark.long
def test_the_record_waits_for_the_checkout(served, submit) -> None:
    job = submit("sleep", "30", **served["fields"])
    assert InProcessEngine().run_until(EnvironmentRecord.objects.filter(job=job).exists, 60), describe(job)
    record = EnvironmentRecord.objects.get(job=job)
    assert record.git_commit == served["repository"].first
    assert record.git_remote == served["fields"]["code_repository"]
    attempt = job.attempts.get()
    task = attempt.task_rows.get()
    task.environment_recorded = False
    assert recording_wait_s(task) is not None
    task.attempt.code_commit = ""
    assert recording_wait_s(task) is None


def packed(**files: bytes) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in files.items():
            header = tarfile.TarInfo(name.replace("__", "/"))
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    made.seek(0)
    return made


def test_an_archive_is_unpacked_for_each_task_and_a_path_is_entered(submit, harness) -> None:
    large = os.urandom(700_000)  # more than one piece
    store = partial(do_store_archive, submit.owner, submit.project)
    archive = packed(src__train=b"print('packed')", data=large).getvalue()
    row = store(io.BytesIO(archive))
    assert store(io.BytesIO(archive)).pk == row.pk
    zeros = store(packed(zeros=bytes(3 * 2**20)))
    command = "id -u; stat -c %u src/train; python3 src/train; sha256sum < data; echo $FAIRWAY_CODE_DIR"
    command += "; mkdir -p $HOME/vit/src; echo 'print(7)' > $HOME/vit/src/main.py"
    job = finish(submit("/bin/sh", "-c", command, code_archive=row.sha256))
    lines = [line.split(" ", 3)[-1] for line in output(job).splitlines()]
    assert lines[0] == lines[1] and (lines[0] != "0" or os.geteuid() != 0)
    assert lines[2] == "packed" and hashlib.sha256(large).hexdigest() in lines[3]
    assert lines[4].endswith("/tmp/code")

    (upload,) = harness.folder.glob(f"*/**/uploads/{row.sha256}")
    upload.write_bytes(b"damaged".ljust(row.size_bytes, b"."))
    again = submit("test", "-e", "src/train", gpus_per_task=0, code_archive=row.sha256)
    path = submit("python3", "main.py", gpus_per_task=0, code_path="vit/src")
    gone = submit("true", gpus_per_task=0, code_path="gone")
    finish(again)
    assert output(finish(path)).splitlines()[-1].endswith("7")
    assert "gone, cannot be entered" in output(finish(gone, JobState.FAILED))

    ClusterSettings.objects.update(policy={"code_size_limit_mib": 1.0})
    bomb = submit("true", gpus_per_task=0, code_archive=zeros.sha256)
    lost = submit("true", gpus_per_task=0, code_archive=row.sha256)
    CodeArchive.objects.filter(pk=row.pk).delete()
    limited = finish(bomb, JobState.FAILED).message
    assert "The unpacked archive is larger than the limit of 1 MiB." in limited
    assert "no longer stored. Upload it again." in finish(lost, JobState.FAILED).message


def test_code_has_one_source_of_the_project_and_a_path_inside_its_volumes() -> None:
    owner = factories.user()
    project, environment = factories.project(member=owner), factories.environment(tool=False)
    other = factories.project("other", member=owner)
    factories.node(factories.pool())
    sha256 = do_store_archive(owner, other, packed(a=b"1")).sha256

    def refused(**fields: Any) -> dict[str, str]:
        with pytest.raises(InvalidRequest) as caught:
            factories.job(owner, project, environment, **fields)
        return dict(caught.value.fields)

    assert "has no such archive" in refused(code_archive=sha256)["code_archive"]
    assert "64 hexadecimal digits" in refused(code_archive="main")["code_archive"]
    both = refused(code_repository="https://git.example.org/vit", code_path="vit")
    assert both == {"code_path": "A job has one source of code: a git repository, an archive or a path."}
    assert "neither in the home nor in a volume" in refused(code_path="/etc")["code_path"]
    assert "must not contain .." in refused(code_path="../bob")["code_path"].lower()
    with pytest.raises(NotFound):
        do_store_archive(factories.user(), project, packed(a=b"1"))


def test_unused_archives_are_deleted_and_limited(monkeypatch) -> None:
    owner = factories.user()
    project, environment = factories.project(member=owner), factories.environment(tool=False)
    factories.node(factories.pool())
    used = do_store_archive(owner, project, packed(a=b"1"))
    do_store_archive(owner, project, packed(a=b"2"))
    factories.job(owner, project, environment, code_archive=used.sha256)
    CodeArchive.objects.update(used_at=timezone.now() - dt.timedelta(days=31))
    delete_unused_archives()
    assert list(CodeArchive.objects.values_list("pk", flat=True)) == [used.pk]
    monkeypatch.setattr(code_archives, "MAX_UNUSED_BYTES", 200)
    do_store_archive(owner, project, packed(a=b"3"))
    with pytest.raises(Conflict, match="archives that no job uses"):
        do_store_archive(owner, project, packed(a=os.urandom(300)))


SERVE = """
mkdir -p /tmp/served /run/sshd; cd /tmp/served
git init -qb main tree
echo "print('from git')" > tree/train.py
git -C tree add .
git -C tree -c user.name=ada -c user.email=ada@example.org commit -qm first
git clone -q --bare tree vit.git
for each in host_key deploy; do ssh-keygen -qt ed25519 -N '' -f $each; done
cp deploy.pub authorized_keys
git -C tree rev-parse HEAD; cut -d' ' -f1,2 host_key.pub; cat deploy
"""


@pytest.fixture(scope="module")
def git_image() -> RigImage:
    return rig_image("tiny", programs=("git", "ssh"))


@pytest.mark.rig
def test_two_containers_check_out_over_ssh_with_the_deploy_key_of_their_project(
    make_rig, rig_cluster, git_image: RigImage, settings, tmp_path: Path
) -> None:
    stores = [[git_image.store]] * 2
    made = two_rig_nodes(make_rig, rig_cluster, git_image, stores, settings, tmp_path)
    near, far = made["machines"]
    Node.objects.filter(name=far.name).update(state="cordoned")
    outside = far.address.rpartition(".")[0] + ".250"
    far.execute("ip", "address", "add", f"{outside}/32", "dev", "eth0")
    near.execute("ip", "route", "add", f"{outside}/32", "via", far.address)
    commit, host_key, key = far.execute("sh", "-ec", SERVE).stdout.split("\n", 2)
    options = {
        "HostKey": "/tmp/served/host_key", "AuthorizedKeysFile": "/tmp/served/authorized_keys", "UsePAM": "no",
        "StrictModes": "no", "PidFile": "none", "ListenAddress": outside, "PermitRootLogin": "yes",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    server = subprocess.Popen(
        [*far.console(), "/usr/sbin/sshd", "-D", "-f", "/dev/null", "-p", "2222", *words]
    )
    try:
        project = made["project"]
        do_save_secret(factories.user(admin=True), project, "deploy", key.strip())
        time.sleep(1)
        job = submit_to_rig(
            made, "python3", "-c", "import os; exec(open('train.py').read()); print(os.getcwd())", tasks=2,
            gpus_per_task=2, code_repository=f"ssh://root@{outside}:2222/tmp/served/vit.git", code_ref="main",
            code_host_key=host_key, secrets=[{"secret": "deploy", "owner_type": "project", "file": "git_key"}],
        )  # fmt: skip
        wait_until(made, lambda: job.refresh_from_db() or job.state in ("COMPLETED", "FAILED"), job)
        text = log_path(job.public_id, 1, 1, "k8s").read_text()
        assert job.state == JobState.COMPLETED, text
        assert "from git" in text and text.splitlines()[-1].endswith(" /code")
        assert job.attempts.get().code_commit == commit
    finally:
        server.kill()
        server.wait()
    assert near.execute("sh", "-c", "find / -xdev -name fairway.code").stdout.strip() == ""
