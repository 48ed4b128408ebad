"""A notebook of a workspace becomes a batch job that papermill really runs."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.test import Client

from portal.errors import Conflict, NotFound
from portal.models import Attempt, Environment, Job, NotebookListing, Template, User
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.environments.process_environment import ensure_process_jupyterlab
from portal.services.jobs.notebooks import do_create_notebook_template, do_request_notebooks, get_listing
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, wait_for
from tests.gateway.gateway_harness import attempt_of, sign_in
from tests.gateway.test_jupyterlab import CACHE
from tests.gateway.test_terminals import in_thread

SERVER = "import socket,time; s=socket.create_server(('{address}', {port})); time.sleep(600)"


def cell(source: str, **metadata: Any) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "metadata": metadata,
        "source": source,
        "outputs": [],
        "execution_count": None,
        "id": f"c{abs(hash(source))}",
    }


def notebook(*cells: dict[str, Any]) -> str:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return json.dumps(
        {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": list(cells)}
    )


PARAMETERS = cell("LR = 0.5\nname = 'first run'\nquiet = False\nsizes = [1, 2]\n", tags=["parameters"])
BODY = cell("import os\nprint('rate', LR * 2, name, quiet, sizes, os.path.basename(os.getcwd()))")


@pytest.fixture
def engine(harness: EngineHarness, owner: User) -> Iterator[Path]:
    """A node of this machine whose engine works beside the test; the folder of the homes."""
    name = f"n{time.monotonic_ns()}"
    harness.mark_enrolled(harness.create_node(name=name))
    over = threading.Event()
    work = partial(in_thread, lambda: InProcessEngine().run_until(over.is_set, 300.0))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield harness.folder / name / "homes"
    over.set()
    thread.join(30)


@pytest.fixture
def workspace(engine: Path, owner: User) -> Job:
    """A running workspace. Its tool is no JupyterLab, which the portal does not need to list notebooks."""
    prefix = ensure_process_jupyterlab(CACHE)
    row = factories.environment(runtime="process")
    command = [str(prefix / "bin/python"), "-c", SERVER]
    Environment.objects.filter(pk=row.pk).update(prefix=str(prefix), tool_command=command)
    project = factories.project(member=owner)
    fields = {"gpus_per_task": 0, "memory_mib": 1024, "env": {"STYLE": "{x}"}, "kind": "workspace"}
    job = factories.job(owner, project, Environment.objects.get(pk=row.pk), **fields)
    running = Attempt.objects.filter(job=job, state="RUNNING")
    wait_for("it runs", running.exists, 40)
    return Job.objects.get(pk=job.pk)


def save(home: Path, path: str, content: str) -> None:
    """Writes a file as the account of the workspace would."""
    facts = home.stat()
    (home / path).parent.mkdir(parents=True, exist_ok=True)
    (home / path).write_text(content)
    for each in (home / path, *(home / path).relative_to(home).parents):
        os.chown(home / each, facts.st_uid, facts.st_gid)


def listed(user: User, job: Job) -> NotebookListing:
    do_request_notebooks(user, job)
    wait_for("the node answers", lambda: get_listing(user, job).listed_at, 20)
    return get_listing(user, job)


def test_a_notebook_runs_as_a_job_with_other_parameters(engine: Path, owner: User, workspace: Job) -> None:
    home = engine / owner.username
    save(home, "a b/train (1).ipynb", notebook(PARAMETERS, BODY))
    save(home, "broken.ipynb", "{")
    save(home, ".hidden/old.ipynb", notebook())
    (home / "link.ipynb").symlink_to("/etc/passwd")
    page = Client()
    page.cookies["fairway_session"] = sign_in(owner)
    address = f"/jobs/{workspace.public_id}/notebooks/"
    assert "List notebooks" in page.get(address).content.decode()
    assert page.post(f"{address}list/").status_code == 302
    wait_for("the node answers", lambda: get_listing(owner, workspace).listed_at, 20)
    listing = get_listing(owner, workspace)
    assert {row["path"]: row["problem"] for row in listing.notebooks} == {
        "a b/train (1).ipynb": "",
        "broken.ipynb": "It is not a notebook.",
    }
    shown = page.get(address).content.decode()
    assert "LR = 0.5" in shown and "sizes" in shown and 'hx-trigger="every' not in shown

    gone = page.post(f"{address}run/", {"path": "a b/train (1).ipynb"})
    form = page.get(gone.url)
    template = Template.objects.get(public_id=parse_qs(urlsplit(gone.url).query)["template"][0])
    assert (template.owner, template.scope, template.version) == (owner, "self", 1)
    assert [each["label"] for each in template.parameters] == ["LR", "name", "quiet"]
    values = form.context["form"].initial
    assert values["project"] == workspace.project.public_id
    assert values["environment"] == workspace.environment.public_id
    assert (values["name"], values["memory_gib"]) == ("train -1", "1")
    assert re.search(r'name="param[^"]*lr"', form.content.decode())
    assert do_create_notebook_template(owner, workspace, "a b/train (1).ipynb").version == 1  # unchanged

    values = {each.html_name: each.value() for each in form.context["form"]}
    filled = {name: value for name, value in values.items() if value is not None and value is not False}
    changed = {"param-lr": "2.5", "param-name": "it's $HOME", "param-quiet": "on", "max_attempts": "1"}
    made = page.post("/launch/", filled | form.context["form"].roles.as_data() | changed)
    assert made.status_code == 302, made.context["form"].errors
    job = Job.objects.get(kind="training")
    assert job.env == {"STYLE": "{x}"} and job.environment == workspace.environment
    wait_for("it ends", Attempt.objects.filter(job=job, ended_at__isnull=False).exists, 60)
    result = home / f"a b/train (1)-{job.public_id}.ipynb"
    assert attempt_of(job).state == "COMPLETED", result.read_text() if result.exists() else ""
    cells = json.loads(result.read_text())["cells"]
    printed = "".join(cells[-1]["outputs"][0]["text"])
    assert printed == "rate 5.0 it's $HOME True [1, 2] a b\n"
    _, token = do_create_token(owner, name="t", scopes=[Scope.READ, Scope.JOBS])
    body = {
        "name": "again",
        "template": template.name,
        "project": job.project.name,
        "parameters": {"lr": 2.5},
    }
    headers = {"Authorization": f"Bearer {token}"}
    again = Client().post("/api/v1/jobs/", body, content_type="application/json", headers=headers).json()
    assert again["command"][-7:-2] == ["LR", "2.5", "-r", "name", "first run"]
    overview = page.get(f"/jobs/{job.public_id}/").content.decode()
    assert f"train (1)-{job.public_id}.ipynb" in overview and "Start a notebook to open it" in overview


def test_listings_and_notebooks_that_are_not_there_are_refused(
    engine: Path, owner: User, workspace: Job
) -> None:
    assert listed(owner, workspace).notebooks == []
    with pytest.raises(NotFound, match="no such notebook"):
        do_create_notebook_template(owner, workspace, "../bob/secret.ipynb")
    member = factories.user()
    workspace.project.memberships.create(user=member, role="manager")
    client = Client()
    client.cookies["fairway_session"] = sign_in(member)
    before = get_listing(owner, workspace).requested_at
    assert client.get(f"/jobs/{workspace.public_id}/notebooks/").status_code == 403
    for path in ("list/", "run/"):
        answer = client.post(f"/jobs/{workspace.public_id}/notebooks/{path}")
        assert answer.status_code == 302
    assert get_listing(owner, workspace).requested_at == before and not Template.objects.filter(owner=member)
    batch = factories.job(owner, workspace.project, workspace.environment, gpus_per_task=0)
    with pytest.raises(Conflict, match="Only workspaces with JupyterLab"):
        do_request_notebooks(owner, batch)
    waiting = factories.job(owner, workspace.project, workspace.environment, kind="workspace", held=True)
    with pytest.raises(Conflict, match="has not started"):
        do_request_notebooks(owner, waiting)
