"""The options of ``fairway run`` are the fields of a job."""

from __future__ import annotations

from client.cli import build_parser
from client.cli import job_fields as fields_of
from client.fields import FLAGS, OTHERS, REFERENCES
from portal.api.jobs.job_requests import JobBody
from portal.domain.jobs.job_spec import job_fields


def test_flags_have_every_field_of_a_job_with_its_type() -> None:
    times = {"start_after": str}
    scalars = {name: rule.value_type for name, rule in job_fields().items() if rule.is_scalar}
    assert scalars | times == FLAGS
    assert JobBody().fields.keys() == {*FLAGS, *REFERENCES, *OTHERS}


def test_options_become_fields() -> None:
    given = build_parser().parse_args(
        ["run", "--name=a b", "--gpus-per-task", "2", "--no-preemptible", "--held", "--env=A=1=2", "--env=B=",
         "--param=lr=0.1", "--param=model=vit", "--after=x", "--set=retry_exit_codes=[3]", "--priority=-5",
         "--", "python", "train.py", "--epochs", "3"],
    )  # fmt: skip
    assert fields_of(given) == {
        "name": "a b", "gpus_per_task": 2, "preemptible": False, "held": True, "env": {"A": "1=2", "B": ""},
        "parameters": {"lr": 0.1, "model": "vit"}, "dependencies": ["x"], "retry_exit_codes": [3], "priority": -5,
        "command": ["python", "train.py", "--epochs", "3"],
    }  # fmt: skip
