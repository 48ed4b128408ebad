"""A rerun repeats request, image and seed; what differs is listed before and after. Notes and tags of jobs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import Attempt, AuditEntry, EnvironmentRecord, Gpu, Job, Node, Task, User, Volume
from portal.selectors.jobs.jobs import JobFilter, get_job, list_jobs
from portal.selectors.jobs.reruns import rerun_relations
from portal.services.jobs.annotations import do_annotate_job, job_note, job_tags
from portal.services.jobs.environment_records import save_record
from portal.services.jobs.reruns import compare_with_source, do_rerun
from portal.services.jobs.submission import do_cancel_job
from tests import factories

pytestmark = pytest.mark.django_db
DIGEST, NEWER = (f"registry.example.org/torch@sha256:{each * 64}" for each in "ab")
COMMIT = "1" * 40


@pytest.fixture
def ended() -> Job:
    """A job that ran with an image by digest and a seed, and was recorded."""
    node = factories.node(factories.pool())
    Node.objects.filter(pk=node.pk).update(agent_info={"driver": "550.54"}, runtime="podman")
    owner = factories.user()
    environment = factories.environment(tool=False, image="registry.example.org/torch:2", image_digest=DIGEST)
    job = factories.job(
        owner,
        factories.project(member=owner, viewer=factories.user("viewer")),
        environment,
        command=["python", "t.py"],
        seed=7,
    )
    do_cancel_job(owner, job)
    record(job)
    return get_job(owner, job.public_id)


def record(job: Job, **columns: Any) -> None:
    gpu = Gpu.objects.first()
    plain = {
        "requested_at": timezone.now(), "recorded_at": timezone.now(), "git_commit": COMMIT, "git_diff_bytes": 0,
        "packages": ["numpy==2.1.0", "torch==2.13.0"], "driver": "550.54", "gpu_model": gpu.model if gpu else "",
    }  # fmt: skip
    EnvironmentRecord.objects.create(job=job, **plain | columns)


def codes(drift: Any) -> list[str]:
    return [each.code for each in drift]


def test_a_rerun_has_the_request_the_image_and_the_seed_of_its_source(ended: Job) -> None:
    drift, fresh = do_rerun(ended.owner, ended)
    assert fresh is not None and drift == []
    assert (fresh.command, fresh.seed, fresh.image_digest) == (["python", "t.py"], 7, DIGEST)
    assert rerun_relations(fresh).source == ended
    assert rerun_relations(ended).reruns == [fresh]


def test_a_dry_run_lists_differences_and_submits_nothing(ended: Job) -> None:
    ended.environment.image_digest = NEWER
    ended.environment.save()
    Node.objects.update(agent_info={"driver": "560.1"})
    Gpu.objects.update(model="H100 80GB")
    EnvironmentRecord.objects.update(git_diff_bytes=12, gpu_model="A100 40GB")
    Job.objects.filter(pk=ended.pk).update(seed=None)
    job = get_job(ended.owner, ended.public_id)
    drift, fresh = do_rerun(job.owner, job, dry_run=True)
    assert fresh is None and Job.objects.count() == 1
    assert codes(drift) == [
        "environment_changed", "image_not_present", "driver", "gpu_model", "no_seed", "not_committed",
    ]  # fmt: skip
    assert "It ran with driver 550.54. Ready nodes only have 560.1." in [each.message for each in drift]
    _, fresh = do_rerun(job.owner, job)
    assert fresh is not None and fresh.image_digest == DIGEST


def test_a_missing_volume_is_listed_and_prevents_the_rerun(ended: Job) -> None:
    Volume.objects.create(name="imagenet", kind="host_path", scope="shared", path="/data")
    Job.objects.filter(pk=ended.pk).update(
        volumes=[{"volume": "imagenet", "target": "/data", "read_only": True}]
    )
    Volume.objects.all().delete()
    job = get_job(ended.owner, ended.public_id)
    drift, _ = do_rerun(job.owner, job, dry_run=True)
    assert codes(drift)[0] == "volumes_unavailable" and drift[0].blocking
    with pytest.raises(Conflict) as refusal:
        do_rerun(job.owner, job)
    assert refusal.value.code == "volumes_unavailable" and Job.objects.count() == 1


def test_the_environment_of_a_rerun_is_compared_with_its_source(ended: Job) -> None:
    _, fresh = do_rerun(ended.owner, ended)
    assert fresh is not None and compare_with_source(fresh) is None
    record(fresh, git_commit="2" * 40, packages=["numpy==2.2.0", "torch==2.13.0"])
    differences = compare_with_source(fresh) or []
    assert codes(differences) == ["git_commit", "packages"]
    assert differences[1].message == "Packages: - numpy==2.1.0, + numpy==2.2.0."
    EnvironmentRecord.objects.filter(job=fresh).update(
        git_commit=COMMIT, packages=["numpy==2.1.0", "torch==2.13.0"]
    )
    assert compare_with_source(fresh) == []


def test_a_job_that_has_not_ended_is_not_repeated(ended: Job) -> None:
    _, fresh = do_rerun(ended.owner, ended)
    assert fresh is not None
    with pytest.raises(Conflict, match="has not ended"):
        do_rerun(ended.owner, fresh)
    with pytest.raises(Forbidden):
        do_rerun(User.objects.get(username="viewer"), ended)


def test_reported_environments_are_validated_and_truncated() -> None:
    node = factories.node(factories.pool())
    owner = factories.user()
    job = factories.job(owner, factories.project(member=owner), factories.environment(tool=False))
    attempt = Attempt.objects.create(job=job, number=1, pool=node.pool, leader_epoch=1, state="RUNNING")
    task = Task.objects.create(attempt=attempt, rank=0, node=node)
    lines = [
        b'{"directory": "/home/ada/vit", "commit": "zzz", "branch": ["x"], "remote": "a\\u0000b"}',
        b"[1]", b"{broken", b"[" * 20_000, b'{"version": "\\ud800", "untracked": ["\\udfff.py"]}',
        b'{"packages": ["a==1", 5], "version": "3.11.7", "executable": 7, "diff_bytes": -1}', b'{"branch": "cut',
    ]  # fmt: skip
    save_record(task, b"\n".join(lines))
    row = EnvironmentRecord.objects.get(job=job)
    assert (row.git_directory, row.git_commit, row.git_branch) == ("/home/ada/vit", "", "")
    assert (row.packages, row.python_version, row.python, row.git_diff_bytes) == (
        ["a==1"],
        "3.11.7",
        "",
        None,
    )
    assert "\x00" not in row.git_remote
    assert row.untracked_files == ["\N{REPLACEMENT CHARACTER}.py"]


def test_tags_and_note_are_searched_shown_and_audited(ended: Job) -> None:
    owner = ended.owner
    do_annotate_job(owner, ended, note=" best so far ", tags=["paper", " paper", "seed 7", ""])
    job = get_job(owner, ended.public_id)
    assert (job_note(job), job_tags(job)) == ("best so far", ["paper", "seed 7"])
    do_annotate_job(owner, job, tags=["paper"])
    assert job_note(get_job(owner, job.public_id)) == "best so far"
    assert list(list_jobs(owner, JobFilter(tag="paper"))) == [job]
    assert list(list_jobs(owner, JobFilter(tag="pap"))) == []
    assert AuditEntry.objects.filter(action="job.annotate").count() == 2
    for wrong in (["x" * 51], ["<b>"], [str(n) for n in range(21)]):
        with pytest.raises(InvalidRequest):
            do_annotate_job(owner, job, tags=wrong)
    page = Client()
    page.force_login(owner)
    assert "paper" in page.get("/jobs/?tag=paper").content.decode()
    assert "No jobs match" in page.get("/jobs/?tag=other").content.decode()
    assert "best so far" in page.get(f"/jobs/{job.public_id}/run/").content.decode()


def test_pages_show_the_record_and_the_drift_and_give_files(ended: Job) -> None:
    EnvironmentRecord.objects.update(git_diff="-a\n+b\n", git_diff_bytes=6)
    page = Client()
    page.force_login(ended.owner)
    text = page.get(f"/jobs/{ended.public_id}/run/").content.decode()
    assert COMMIT in text and "torch==2.13.0" in text and "+b" in text
    at = f"/jobs/{ended.public_id}/environment/"
    assert page.get(f"{at}requirements.txt").content == b"numpy==2.1.0\ntorch==2.13.0\n"
    assert page.get(f"{at}changes.diff").content == b"-a\n+b\n"
    assert json.loads(page.get(f"{at}environment.json").content)["seed"] == 7
    assert page.get(f"{at}passwd").status_code == 404
    assert "uncommitted changes (6 bytes)" in page.get(f"/jobs/{ended.public_id}/rerun/").content.decode()
    answer = page.post(f"/jobs/{ended.public_id}/rerun/", follow=True)
    assert f"it repeats {ended.public_id}" in answer.content.decode()
    other = Client()
    other.force_login(User.objects.get(username="viewer"))
    assert "+b" not in other.get(f"/jobs/{ended.public_id}/run/").content.decode()
