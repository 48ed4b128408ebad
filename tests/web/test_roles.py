"""Roles on the launch form, on the page of a job and in its log."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.urls import reverse

from portal.domain.jobs.job_spec import JobRole
from portal.models import Job
from portal.services.jobs.job_document import request_body, to_yaml
from portal.services.jobs.logs import write_log_bytes
from portal.web.jobs.launch.form import LaunchForm
from portal.web.jobs.launch.initial_values import initial_from_job
from tests import factories
from tests.web.dataset import start


@pytest.fixture
def roles(typed) -> dict[str, str]:
    """A valid form with a chief, two workers, a removed role and a blank one."""
    return typed | {
        "time_limit_s": "",
        "roles-TOTAL_FORMS": "4",
        "roles-INITIAL_FORMS": "0",
        "roles-0-name": "chief",
        "roles-0-tasks": "1",
        "roles-0-start_order": "0",
        "roles-0-ports": "grpc, http",
        "roles-1-name": "worker",
        "roles-1-tasks": "2",
        "roles-1-gpus_per_task": "1",
        "roles-1-cores": "0.5",
        "roles-1-memory_gib": "1",
        "roles-1-command": "python work.py | tee log",
        "roles-1-start_order": "1",
        "roles-1-may_fail": "on",
        "roles-2-name": "gone",
        "roles-2-tasks": "9",
        "roles-2-start_order": "0",
        "roles-2-DELETE": "on",
        "roles-3-name": "",
        "roles-3-tasks": "1",
        "roles-3-start_order": "0",
        "completion_role": "chief",
    }


def test_typed_roles_become_the_job(client_of, roles) -> None:
    assert client_of("member").post(reverse("launch"), roles).status_code == 302
    job = Job.objects.get(name="my run")
    assert (job.tasks, job.total_gpus, job.completion_role) == (3, 4, "chief")
    assert job.job_roles == (
        JobRole(
            name="chief", command=("python", "train.py", "--name", "two words"), gpus_per_task=2,
            cpu_milli=1500, memory_mib=4096, ports=("grpc", "http"),
        ),
        JobRole(
            name="worker", tasks=2, command=("/bin/sh", "-c", "python work.py | tee log"), gpus_per_task=1,
            cpu_milli=500, memory_mib=1024, ports=(), start_order=1, may_fail=True,
        ),
    )  # fmt: skip


def test_roles_in_the_form_are_submitted_unchanged(client_of, dataset, roles) -> None:
    client_of("member").post(reverse("launch"), roles)
    job = Job.objects.get(name="my run")
    page = client_of("member").get(f"{reverse('launch')}?like={job.public_id}")
    assert 'value="grpc http"' in page.content.decode()
    preview = client_of("member").post(reverse("launch-check"), page.context["form"].as_posted().data)
    assert preview.context["request_now"].roles == job.job_roles
    start = initial_from_job(job.owner, job)
    form = LaunchForm(job.owner, initial=start)
    again = LaunchForm(
        job.owner,
        {key: value for key, value in start.items() if value not in ("", None, False)} | form.roles.as_data(),
    )
    assert again.is_valid(), again.errors
    assert again.to_job_request().roles == job.job_roles


def test_the_review_omits_what_roles_inherit_from_the_job(dataset, roles) -> None:
    form = LaunchForm(dataset.people["m-okafor"], roles)
    assert form.is_valid(), form.errors
    request = form.to_job_request()
    body = request_body(request)
    assert "tasks" not in body and body["completion_role"] == "chief"
    assert body["roles"] == [
        {"name": "chief", "command": ["python", "train.py", "--name", "two words"], "ports": ["grpc", "http"]},
        {
            "name": "worker", "tasks": 2, "command": ["/bin/sh", "-c", "python work.py | tee log"],
            "gpus_per_task": 1, "cpu_milli": 500, "memory_mib": 1024, "start_order": 1, "may_fail": True,
        },
    ]  # fmt: skip
    assert "roles:\n- name: chief" in to_yaml(body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles-0-name": ""}, "Role 1, Name: This field is required."),
        ({"roles-1-tasks": "0"}, "Role worker, Tasks: Must be at least 1."),
        ({"roles-1-command": "echo 'open"}, "Role worker, Command: A quotation mark is not closed."),
        ({"roles-1-name": "chief"}, "The role chief is given twice."),
        ({"completion_role": "boss"}, "Choose one of chief, worker."),
        ({"min_tasks": "2"}, "start together"),
    ],
)
def test_invalid_roles_are_reported(client_of, roles, changes, message) -> None:
    answer = client_of("member").post(reverse("launch"), roles | changes)
    assert answer.status_code == 400
    assert message in answer.content.decode().replace("&#x27;", "'")
    check = client_of("member").post(reverse("launch-check"), roles | changes).context["check"]
    assert check.kind == "wrong"


def test_a_notebook_ignores_roles(client_of, dataset, roles) -> None:
    note = roles | {
        "kind": "workspace",
        "environment": dataset.environments["lab"].public_id,
        "gpus_per_task": "1",
    }
    assert client_of("member").post(reverse("launch"), note).status_code == 302
    assert Job.objects.get(name="my run").roles == []


def test_the_preview_lists_roles(client_of, roles) -> None:
    page = client_of("member").post(reverse("launch-check"), roles).content.decode()
    text = re.sub(r"<[^>]+>|\s", " ", page).replace("\xa0", " ")
    assert re.search(r"chief:\s+1 task, 2 GPUs, 1\.5 cores, 4 GiB; ports grpc, http", text), text
    assert re.search(r"worker:\s+2 tasks with 1 GPU, 0\.5 cores?, 1 GiB each; start order 1; may fail", text)


@pytest.fixture
def running(dataset, settings, tmp_path) -> Job:
    """A running job of chief and two workers, with a line in each log."""
    settings.LOG_DIR = tmp_path / "logs"
    job = factories.job(
        dataset.people["m-okafor"], dataset.projects["vision"], dataset.environments["batch"],
        roles=(JobRole(name="chief"), JobRole(name="worker", tasks=2, memory_mib=64, may_fail=True)),
        gpus_per_task=0, cpu_milli=100, command=["train"], completion_role="chief",
    )  # fmt: skip
    start(dataset, job, [(next(iter(dataset.nodes)), [])] * 3, ran=dt.timedelta(minutes=5))
    for rank in range(3):
        write_log_bytes(job.public_id, 1, rank, "raw", 0, b"line of %d\n" % rank)
    return job


def text_of(answer) -> str:
    return re.sub(r"<[^>]+>|\s+", " ", answer.content.decode()).replace("\xa0", " ")


def test_the_page_of_a_job_names_its_tasks_by_role(client_of, running) -> None:
    page = text_of(client_of("member").get(reverse("job", args=[running.public_id])))
    assert all(label in page for label in ("chief 0", "worker 0", "worker 1"))
    assert "rank 1" not in page
    assert re.search(r"when all tasks of the role chief\s+succeeded", page)
    assert re.search(r"worker:\s+2 tasks with 0\.1 cores?, 64 MiB each; may fail\s+train", page), page
    request = text_of(client_of("member").get(reverse("job-run", args=[running.public_id])))
    assert "completion_role" in request and "2 tasks with" in request
    jobs = text_of(client_of("member").get(reverse("jobs")))
    assert "1 chief, 2 worker" in jobs


def test_the_log_is_filtered_by_role(client_of, running) -> None:
    client = client_of("member")
    page = client.get(reverse("job-logs", args=[running.public_id]) + "?role=worker").content.decode()
    assert '<option value="1,2" selected>Role worker</option>' in page
    assert '<option value="2" >Worker 1</option>' in page
    assert 'data-labels="chief 0,worker 0,worker 1" data-ranks="0,1,2"' in page
    search = reverse("job-log-search", args=[running.public_id])
    found = client.get(search, {"q": "line", "rank": "1,2"}).json()["matches"]
    assert [match[0] for match in found] == [1, 2]
    assert len(client.get(search, {"q": "line"}).json()["matches"]) == 3


def test_charts_are_named_by_role(client_of, running) -> None:
    series = client_of("member").get(reverse("job-series", args=[running.public_id])).json()
    assert set(series["labels"].values()) <= {"chief 0", "worker 0", "worker 1"}
