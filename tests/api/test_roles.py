"""Roles in REST: the body of a submission, the answer, and logs by role."""

from __future__ import annotations

import pytest

from portal.models import Job, Node
from portal.services.jobs.logs import write_log_bytes
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement

ROLES = [
    {"name": "chief", "ports": ["grpc"]},
    {
        "name": "worker",
        "tasks": 2,
        "command": ["work"],
        "gpus_per_task": 0,
        "start_order": 1,
        "may_fail": True,
    },
]


@pytest.fixture
def body(fixture_data) -> dict[str, object]:
    names = fixture_data.names
    return {
        "name": "with-roles",
        "project": names["project"],
        "environment": names["batch"],
        "command": ["train"],
        "gpus_per_task": 0,
        "cpu_milli": 100,
        "memory_mib": 64,
        "roles": ROLES,
        "completion_role": "chief",
    }


def post(fixture_data, body, path: str = ""):
    headers = {"Idempotency-Key": "00000000-0000-4000-8000-000000000001"} if not path else {}
    return fixture_data.client("member").post(
        f"/api/v1/jobs/{path}", body, content_type="application/json", headers=headers
    )


def test_roles_are_submitted_and_returned_complete(fixture_data, body) -> None:
    answer = post(fixture_data, body)
    assert answer.status_code == 201, answer.content
    job = answer.json()
    assert (job["tasks"], job["total_milli"], job["completion_role"]) == (3, 0, "chief")
    assert job["roles"] == [
        {
            "name": "chief", "tasks": 1, "command": ["train"], "gpus_per_task": 0, "cpu_milli": 100,
            "memory_mib": 64, "ports": ["grpc"], "start_order": 0, "may_fail": False,
        },
        {
            "name": "worker", "tasks": 2, "command": ["work"], "gpus_per_task": 0, "cpu_milli": 100,
            "memory_mib": 64, "ports": [], "start_order": 1, "may_fail": True,
        },
    ]  # fmt: skip
    assert post(fixture_data, body | {"roles": job["roles"]}, "preview/").status_code == 200


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({"roles": [{"name": "chief"}, {"name": "chief"}]}, 422, "roles"),
        ({"roles": [{"tasks": 2}]}, 400, "roles"),
        ({"roles": [{"name": "a", "taks": 2}]}, 400, "roles"),
        ({"roles": [{"name": "a", "tasks": "2"}]}, 400, "roles"),
        ({"roles": {"name": "a"}}, 400, "roles"),
        ({"completion_role": "boss"}, 422, "completion_role"),
        ({"min_succeeded": 4}, 422, "min_succeeded"),
        ({"min_tasks": 3}, 422, "min_tasks"),
        ({"tasks": 5}, 422, "tasks"),
    ],
)
def test_invalid_roles_are_refused_by_field(fixture_data, body, changes, status, named) -> None:
    answer = post(fixture_data, body | changes)
    assert answer.status_code == status, answer.content
    assert {error["field"].split(".")[0] for error in answer.json()["errors"]} == {named}


def test_a_workspace_has_no_roles(fixture_data, body) -> None:
    answer = fixture_data.client("member").post(
        "/api/v1/workspaces/", body, content_type="application/json",
        headers={"Idempotency-Key": "00000000-0000-4000-8000-000000000002"},
    )  # fmt: skip
    assert answer.status_code == 400
    assert "roles" in {error["field"] for error in answer.json()["errors"]}


@pytest.fixture
def path(fixture_data, body) -> str:
    """The URL of a running job with a line in each log."""
    job = Job.objects.get(public_id=post(fixture_data, body).json()["id"])
    node = Node.objects.filter(state="ready").first()
    job_control.start_attempt(job, node.pool, [RankPlacement(node, [])] * 3, epoch=1)
    for rank in range(3):
        write_log_bytes(job.public_id, 1, rank, "raw", 0, b"line of %d\n" % rank)
    return f"/api/v1/jobs/{job.public_id}/"


def test_tasks_have_a_role_and_its_ports(fixture_data, path) -> None:
    (attempt,) = fixture_data.client("member").get(path).json()["attempts"]
    assert [(task["role"], task["role_index"]) for task in attempt["tasks"]] == [
        ("chief", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert [list(task["ports"]) for task in attempt["tasks"]] == [["grpc"], [], []]


def test_logs_are_read_and_searched_by_role(fixture_data, path) -> None:
    client = fixture_data.client("member")
    piece = client.get(f"{path}logs/?role=worker&role_index=1").json()
    assert (piece["rank"], piece["label"], piece["text"]) == (2, "worker 1", "line of 2\n")
    assert client.get(f"{path}logs/?role=worker").json()["rank"] == 1
    found = client.get(f"{path}logs/search/?q=line&role=worker").json()["matches"]
    assert [(match["rank"], match["label"]) for match in found] == [(1, "worker 0"), (2, "worker 1")]
    assert client.get(f"{path}logs/?role=worker&role_index=2").status_code == 422
    assert client.get(f"{path}logs/?role=worker&rank=1").status_code == 422
    assert client.get(f"{path}logs/search/?q=line&role=worker&rank=1").status_code == 422
    assert client.get(f"{path}logs/?role=boss").json()["code"] == "no_such_role"
