"""Launchers on pages: options of the form, ranks before the launch, and ranks of an attempt."""

from __future__ import annotations

import pytest
from django.urls import reverse

from portal.models import Job, Node, NodePool
from portal.services.jobs.attempt_secrets import create_attempt_secret
from portal.services.lifecycle.job_control import RankPlacement, start_attempt
from portal.web.jobs.launch.form import LaunchForm
from portal.web.jobs.launch.initial_values import initial_from_job

pytestmark = pytest.mark.django_db

HOROVOD = {
    "launcher": "horovod",
    "tasks": "2",
    "gpus_per_task": "1",
    "horovod-fusion_threshold_mb": "32",
    "horovod-cycle_time_ms": "",
    "torchrun-max_restarts": "7",
    "rank_overrides": "1 NAME=of rank 1\n1 DEBUG=x",
}


@pytest.fixture
def request_fields(dataset, typed):
    NodePool.objects.update(allow_host_network=True)
    return typed | HOROVOD


def test_options_of_the_chosen_launcher_are_stored_and_copied(dataset, client_of, request_fields) -> None:
    answer = client_of("member").post(reverse("launch"), request_fields)
    assert answer.status_code == 302, answer.content.decode()
    job = Job.objects.get(name="my run")
    assert job.launcher_options == {"fusion_threshold_mb": 32}
    assert job.rank_overrides == {"1": {"NAME": "of rank 1", "DEBUG": "x"}}
    user = dataset.people["m-okafor"]
    copied = LaunchForm(user, initial=initial_from_job(user, job))
    shown = {name: copied[name].value() for name in copied.initial if name in copied.fields}
    again = LaunchForm(user, request_fields | shown | {"name": "again"})
    assert again.is_valid(), again.errors
    assert again.to_job_request().launcher_options == job.launcher_options
    assert again.to_job_request().rank_overrides == job.rank_overrides
    assert again.to_job_request().time_limit_s == job.time_limit_s == 90 * 60


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("horovod-fusion_threshold_mb", "5000", "Must be at most 4096"),
        ("rank_overrides", "NAME=x", "is not RANK NAME=value"),
        ("rank_overrides", "2 NAME=x", "There is no rank 2"),
        ("rank_overrides", "1 CUDA_VISIBLE_DEVICES=0", "is set by Fairway"),
    ],
)
def test_invalid_launcher_options_are_reported(client_of, request_fields, field, value, message) -> None:
    answer = client_of("member").post(reverse("launch"), request_fields | {field: value})
    assert answer.status_code == 400 and message in answer.content.decode()
    assert not Job.objects.filter(name="my run").exists()


def test_the_review_shows_each_rank_before_the_launch(client_of, request_fields) -> None:
    review = client_of("member").post(reverse("launch-check"), request_fields).content.decode()
    assert "HOROVOD_FUSION_THRESHOLD" in review and str(32 * 2**20) in review
    assert "&lt;address of rank 1&gt;" in review
    assert "NAME=of rank 1" in review and "$FAIRWAY_SECRETS/hostfile" in review
    assert "Private; only the tasks of the job have it." in review and "{fairway:" not in review
    wrong = request_fields | {"launcher": "tensorflow", "tensorflow-strategy": "mirrored"}
    assert "has one task" in client_of("member").post(reverse("launch-check"), wrong).content.decode()


def test_the_page_of_a_job_shows_the_ranks_of_its_attempt(dataset, client_of, request_fields) -> None:
    client_of("member").post(reverse("launch"), request_fields)
    job = Job.objects.get(name="my run")
    node = Node.objects.select_related("pool").get(pk=next(iter(dataset.nodes.values())).pk)
    node.agent_info = {**node.agent_info, "capabilities": ["rendezvous_port", "launch_files"]}
    node.save()
    secret = create_attempt_secret(job)
    start_attempt(job, node.pool, [RankPlacement(node, ())] * 2, epoch=1, secret=secret)
    page = client_of("member").get(reverse("job-run", args=[job.public_id])).content.decode()
    assert "What the tasks of attempt 1" in page and "horovodrun --gloo --start-timeout 60 -np 2" in page
    assert "DEBUG=x" in page and "ssh-ed25519" not in page
    assert "PRIVATE KEY" not in page and "{fairway:" not in page
