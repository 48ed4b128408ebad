"""YAML in REST: the same fields as JSON, errors with lines, and a job's request that can be submitted again."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from portal.domain.jobs.job_spec import job_fields
from portal.models import Job
from portal.services.accounts.tokens import Scope

YAML = """\
name: from yaml
project: vision
environment: batch
command: [python, train.py]
env: {SEED: "1"}
start_after: 2027-01-01T08:00:00+01:00
rank_overrides:
  0: {LR: "0.1"}
"""


def post(fixture_data: Any, text: str, **headers: str) -> Any:
    client = fixture_data.client("member")
    kind = (
        {"content_type": "application/yaml"} if text else {"CONTENT_TYPE": "application/yaml"}
    )  # also without a body
    return client.generic("POST", "/api/v1/jobs/", text, headers=headers, **kind)


def test_a_yaml_job_is_submitted_once_per_key_and_read_back(fixture_data) -> None:
    made = [post(fixture_data, YAML, **{"Idempotency-Key": "k"}) for _ in range(2)]
    assert [answer.status_code for answer in made] == [201, 201], made[0].content
    assert made[0].json()["id"] == made[1].json()["id"]
    assert made[0].json()["start_after"] == "2027-01-01T07:00:00Z"
    job = Job.objects.get(name="from yaml")
    assert (job.command, job.env, job.rank_overrides) == (
        ["python", "train.py"],
        {"SEED": "1"},
        {"0": {"LR": "0.1"}},
    )

    text = fixture_data.client("member").get(f"/api/v1/jobs/{job.public_id}/spec.yaml").content.decode()
    again = post(fixture_data, text)
    assert again.status_code == 201, (again.content, text)
    copy = Job.objects.get(public_id=again.json()["id"])
    assert copy.pk != job.pk
    for name in job_fields():
        assert getattr(copy, name) == getattr(job, name), name


def test_variables_and_secrets_are_shown_to_those_who_control_the_job(fixture_data) -> None:
    job = post(fixture_data, YAML).json()["id"]
    text = fixture_data.client("viewer").get(f"/api/v1/jobs/{job}/spec.yaml").content.decode()
    assert "SEED" not in text
    assert text.startswith("# Left out, because you may not control this job: env, rank_overrides.\n")
    assert yaml.safe_load(text)["name"] == "from yaml"


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (YAML + "tsks: 3\ntasks: many\n", 400, "Unknown field. Did you mean tasks? (line 9)"),
        (YAML + "tsks: 3\ntasks: many\n", 400, "Must be a whole number. (line 10)"),
        (YAML.replace("vision", "nowhere"), 422, "There is no such project, or you may not use it. (line 2)"),
        (YAML.replace("+01:00", ""), 400, "such as 2027-03-01T08:00:00+01:00. (line 6)"),
        ("a: [", 400, "It is not valid YAML"),
        ("", 400, "It must be a mapping from line 1 on, such as name: my-job."),
        (
            YAML + "<<: {tasks: 2}\n",
            400,
            "Merge keys (<<) are not supported, in line 9; write the fields out.",
        ),
        (YAML + "tasks: ٢\n", 400, "Must be a whole number. (line 9)"),
        (YAML + "time_limit_s: ٢h\n", 400, "such as 45 s, 90 min, 2h, 1d or 2:30:00. (line 9)"),
        ("- a", 400, "It is a list, from line 1 on."),
        (
            YAML + "kind: workspace\n",
            422,
            "A workspace runs the tool of its environment; leave the command empty. (line 4)",
        ),
    ],
)
def test_errors_name_field_and_line(fixture_data, text, status, message) -> None:
    answer = post(fixture_data, text)
    assert answer.status_code == status
    shown = answer.json()
    assert (
        message in [*(each["message"] for each in shown.get("errors", [])), shown["detail"]]
        or message in shown["detail"]
        or any(message in each["message"] for each in shown.get("errors", []))
    )


def test_a_workspace_needs_its_scope(fixture_data) -> None:
    body = {"name": "lab", "project": "vision", "environment": "lab", "kind": "workspace"}
    for scopes, status in (((Scope.JOBS,), 403), ((Scope.JOBS, Scope.WORKSPACES), 201)):
        headers = fixture_data.bearer("member", *scopes)
        answer = fixture_data.client("anonymous").post(
            "/api/v1/jobs/", body, content_type="application/json", headers=headers
        )
        assert answer.status_code == status, answer.content
