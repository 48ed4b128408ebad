"""Measured scaling on the job page, as advice at launch, and in REST."""

from __future__ import annotations

import datetime as dt

from django.urls import reverse
from django.utils import timezone

from portal.models import Attempt, AttemptProgress, Job
from portal.selectors.jobs.progress import job_scaling_fingerprint


def words(answer) -> str:
    return " ".join(answer.content.decode().replace("&nbsp;", " ").replace("\u00a0", " ").split())


def measure(job: Job, gpus: int, per_s: float, launcher: str = "none") -> None:
    """An ended run of the job's program that had this rate."""
    now, pool = timezone.now(), job.attempts.order_by("-number")[0].pool
    alike = Job.objects.create(
        project=job.project, owner=job.owner, environment=job.environment, state="COMPLETED"
    )
    attempt = Attempt.objects.create(
        job=alike, number=1, pool=pool, leader_epoch=1, state="COMPLETED", ended_at=now
    )
    AttemptProgress.objects.create(
        attempt=attempt, rank=0, start_units=0, start_at=now - dt.timedelta(seconds=100),
        completed_units=100 * per_s, reported_at=now, scaling_fingerprint=job_scaling_fingerprint(job),
        workload_fingerprint=f"of {gpus}", gpus=gpus, gpu_model="NVIDIA H200", nodes=1, islands=1, levels=0,
        launcher=launcher,
    )  # fmt: skip


def test_the_job_page_and_rest_show_the_efficiency(dataset, client_of):
    job, client = dataset.jobs["vit-h-pretrain"], client_of("member")
    Job.objects.filter(pk=job.pk).update(gpu_model="NVIDIA H200")
    address, rest = reverse("job", args=[job.public_id]), f"/api/v1/jobs/{job.public_id}/"
    gpus = job.tasks * job.gpus_per_task
    measure(job, gpus, 390.0)
    assert "Efficiency" not in words(client.get(address))
    assert client.get(rest).json()["scaling"] == []
    measure(job, 1, 50.0)
    page = words(client.get(address))
    assert f"{gpus} GPUs give 7.8×" in page
    assert "the throughput of 1 GPU; efficiency 49" in page
    assert client.get(rest).json()["scaling"] == [
        {"gpus": 1, "per_s": 50.0, "attempts": 1, "speedup": 1.0, "efficiency_percent": 100},
        {"gpus": gpus, "per_s": 390.0, "attempts": 1, "speedup": 7.8, "efficiency_percent": 49},
    ]


def test_the_launch_page_and_the_preview_name_a_cheaper_size(dataset, client_of, typed):
    client = client_of("member")
    typed |= {"gpus_per_task": "4", "env": ""}
    assert client.post(reverse("launch"), typed).status_code == 302
    job = Job.objects.get(name="my run")
    pool = dataset.jobs["vit-h-pretrain"].attempts.get().pool
    Attempt.objects.create(
        job=job, number=1, pool=pool, leader_epoch=1, state="COMPLETED", ended_at=timezone.now()
    )
    assert "of linear" not in words(client.post(reverse("launch-check"), typed))
    measure(job, 2, 393.0)
    measure(job, 4, 488.0)
    page = words(client.post(reverse("launch-check"), typed))
    assert "4 GPUs run at 62 %" in page
    assert "2 GPUs cost 38" in page
    body = {
        "name": "my run", "project": job.project.public_id, "environment": job.environment.public_id,
        "command": job.command, "gpus_per_task": 4, "memory_mib": 4096,
    }  # fmt: skip
    measure(job, 4, 600.0, "torchrun")
    assert "torchrun is the fastest launcher</b> measured on" in words(
        client.post(reverse("launch-check"), typed)
    )
    preview = client.post("/api/v1/jobs/preview/", body, content_type="application/json").json()
    assert [each["launcher"] for each in preview["launcher_rates"]] == ["torchrun", "none"]
    assert preview["cheaper"] == {"gpus": 2, "efficiency_percent": 100, "saving_percent": 38}
    assert [point["gpus"] for point in preview["scaling"]] == [2, 4]
    smaller = client.post(
        "/api/v1/jobs/preview/", body | {"gpus_per_task": 2}, content_type="application/json"
    )
    assert smaller.json()["cheaper"] is None


def test_measured_launchers_of_the_program_are_compared(dataset, client_of, typed):
    client, job = client_of("member"), dataset.jobs["vit-h-pretrain"]
    Job.objects.filter(pk=job.pk).update(gpu_model="NVIDIA H200", launcher="tensorflow")
    address = f"/api/v1/jobs/{job.public_id}/"
    measure(job, job.total_gpus, 390.0, "tensorflow multi_worker")
    assert client.get(address).json()["launcher_rates"] == []
    measure(job, job.total_gpus, 195.0, "tensorflow parameter_server")
    ring, server = client.get(address).json()["launcher_rates"]
    assert ring == {"launcher": "tensorflow multi_worker", "per_s": 390.0, "attempts": 1, "percent": 100}
    assert (server["launcher"], server["percent"]) == ("tensorflow parameter_server", 50)
    page = words(client.get(reverse("job", args=[job.public_id])))
    assert "Launchers" in page and "tensorflow parameter_server" in page
