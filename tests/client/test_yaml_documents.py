"""Documents that are no jobs, and values that are none: page, REST and command line say the same, with the line."""

from __future__ import annotations

import html
import io
import re
import sys
from typing import Any

import pytest
from django.test import Client

from client import cli
from portal.models import Job
from portal.services.accounts.tokens import Scope, do_create_token
from tests import factories

HEAD = "name: run\nproject: {project}\nenvironment: {environment}\ncommand: [python, train.py]\n"
REFUSED = {
    "list": ("- name: a\n", 1, "such as name: my-job"),
    "list after a comment": ("# jobs\n- name: a\n- name: b\n", 2, "submit each on its own"),
    "text": ("hello\n", 1, "such as name: my-job"),
    "comment": ("# nothing\n", 1, "such as name: my-job"),
    "script": ("#!/bin/bash\n#SBATCH --time=1\npython train.py\n", 1, "as program"),
    "manifest": ("# k8s\napiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\n", 2, "environment for image"),
    "sweep": ("searcher: grid\njob: {}\n", 2, "Submit it with REST"),
    "experiment": ("name: e\nentrypoint: python x.py\nsearcher: {name: single}\n", 2, "page Sweeps"),
    "compose": ("services: {a: {image: x}}\n", 1, "a job of its own"),
    "several documents": (HEAD + "---\nname: b\n", 5, "on its own"),
    "alias": (HEAD + "env: &e {A: x}\nsecrets: *e\n", 6, "write the value out"),
    "merge": (HEAD + "<<: {tasks: 2}\n", 5, "Merge keys"),
    "tab": (HEAD + "env:\n\tA: x\n", 6, "with spaces"),
    "colon": (HEAD + "gpu_model: a: b\n", 5, "into quotes"),
    "bracket": (HEAD + "env: {A: x\n", 6, "Close each"),
    "twice": (HEAD + "tasks: 1\ntasks: 2\n", 6, "occurs twice"),
    "number in env": (HEAD + "env:\n  A: 1\n", 6, "put it into quotes"),
    "switch in env": (HEAD + "env: {A: true}\n", 5, "put it into quotes"),
    "unknown field": (HEAD + "tsks: 2\n", 5, "Did you mean tasks?"),
    "unknown field of a volume": (
        HEAD + "volumes:\n- volume: v\n  readonly: true\n",
        7,
        "Did you mean read_only?",
    ),
    "switch word": (HEAD + "held: yes\n", 5, "Must be true or false; yes is text"),
    "number as text": (HEAD + "code_ref: 1e3\n", 5, "put it into quotes"),
    "number in a command": (HEAD.replace("train.py", "--lr, 0.1"), 4, "put it into quotes"),
    "command as text": (
        HEAD.replace("[python, train.py]", "python 'a b'"),
        4,
        'list of words: ["python", "a b"]',
    ),
    "minutes or hours": (HEAD + "time_limit_s: 2:30\n", 5, "hours:minutes:seconds"),
    "no duration": (HEAD + "time_limit_s: soon\n", 5, "90 min"),
    "decimal size": (HEAD + "memory_mib: 4G\n", 5, "Write it with Gi"),
    "no thousandths": (HEAD + "cpu_milli: half\n", 5, "500m"),
    "size of a role": (HEAD + "roles:\n- {name: a, memory_mib: 4GB}\n", 6, "Write it with Gi"),
}
ACCEPTED = {
    "time_limit_s: 2:30:00": 9000, "time_limit_s: 2h": 7200, "time_limit_s: 1-00:00:00": 86_400,
    "memory_mib: 4Gi": 4096, "cpu_milli: 500m": 500, "shm_mib: 64Mi": 64, "termination_grace_s: 1 min": 60,
    "max_attempts: 010": 10,
}  # fmt: skip


@pytest.fixture
def surfaces(
    transactional_db: None, live_server: Any, monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Any
) -> Any:
    """The dataset, a client that is signed in, and the environment of the command."""
    settings.LOG_DIR = tmp_path / "logs"
    factories.cluster_settings()
    dataset = factories.basic_cluster()
    token = do_create_token(dataset["owner"], name="t", scopes=[Scope.READ, Scope.JOBS])[1]
    monkeypatch.setenv("FAIRWAY_URL", live_server.url)
    monkeypatch.setenv("FAIRWAY_TOKEN", token)
    client = Client()
    client.force_login(dataset["owner"])
    return dataset, client


def submitted(client: Client, monkeypatch: pytest.MonkeyPatch, capsys: Any, text: str) -> dict[str, str]:
    """What each surface answers."""
    page = client.post("/launch/import/", {"yaml": text})
    rest = client.post("/api/v1/jobs/", text.encode(), content_type="application/yaml")
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = cli.main(["run", "-f", "-"])
    shown = capsys.readouterr()
    assert code == (cli.OK if rest.status_code == 201 else cli.REFUSED)
    assert page.status_code == (200 if rest.status_code == 201 else 400)
    problem = rest.json()
    said = " ".join([problem.get("detail", ""), *(each["message"] for each in problem.get("errors", ()))])
    return {"page": html.unescape(page.content.decode()), "REST": said, "CLI": shown.err}


def test_the_same_is_refused_with_line_and_suggestion(surfaces, monkeypatch, capsys) -> None:
    dataset, client = surfaces
    wrong = []
    for name, (text, line, suggestion) in REFUSED.items():
        text = text.replace("{project}", dataset["project"].name).replace(
            "{environment}", dataset["environment"].name
        )
        for surface, said in submitted(client, monkeypatch, capsys, text).items():
            if suggestion not in said or not re.search(rf"line {line}\b", said, re.IGNORECASE):
                wrong.append((name, surface, re.findall(r"[^<>]*\b[Ll]ine \d[^<>]*", said) or said[:200]))
    assert not wrong
    assert not Job.objects.exists()


def test_amounts_are_read_alike(surfaces, monkeypatch, capsys) -> None:
    dataset, client = surfaces
    for text, amount in ACCEPTED.items():
        field = text.partition(":")[0]
        document = (
            HEAD.format(project=dataset["project"].name, environment=dataset["environment"].name)
            + text
            + "\n"
        )
        submitted(client, monkeypatch, capsys, document)
        made = list(Job.objects.order_by("-id").values_list(field, flat=True)[:2])
        assert made == [amount, amount], (text, made)
