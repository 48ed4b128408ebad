"""A client that openapi-python-client generates from the OpenAPI document is used against the portal."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from django.core.wsgi import get_wsgi_application

from portal.api.schema import openapi_document
from portal.services.accounts.tokens import Scope
from tests.api.fixture_data import FixtureData
from tests.api.table import JOB

pytestmark = pytest.mark.usefixtures("wsgi_on_one_connection")
PACKAGE = "generated_fairway_client"
NOT_GENERATED = {"metrics"}
"""Answers that are no JSON; the generator has no class for them, but the operation."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The generated package, importable, and what the generator wrote."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "document.json").write_text(json.dumps(openapi_document()))
    (folder / "config.yml").write_text("post_hooks: []\n")
    made = subprocess.run(
        [
            *(sys.executable, "-m", "openapi_python_client", "generate", "--meta=none"),
            *(f"--path={folder / 'document.json'}", f"--config={folder / 'config.yml'}"),
            f"--output-path={folder / PACKAGE}",
        ],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert "will not be generated" not in made.stdout
    sys.path.insert(0, str(folder))
    yield PACKAGE
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


class Generated:
    """The generated functions by operation, with a token of an actor."""

    def __init__(self, package: str, fixture_data: FixtureData, actor: str) -> None:
        self.package = package
        token = fixture_data.bearer(actor, Scope.ADMIN)["Authorization"].removeprefix("Bearer ")
        module = importlib.import_module(f"{package}.client")
        self.client = module.AuthenticatedClient(base_url="http://localhost", token=token)
        transport = httpx.WSGITransport(app=get_wsgi_application())
        self.client.set_httpx_client(
            httpx.Client(
                transport=transport,
                base_url="http://localhost",
                headers={"Authorization": f"Bearer {token}"},
            )
        )

    def module(self, operation: str) -> Any:
        root = Path(importlib.import_module(f"{self.package}.api").__file__ or "").parent
        (path,) = root.glob(f"*/{operation}.py")
        return importlib.import_module(f"{self.package}.api.{path.parent.name}.{operation}")

    def call(self, operation: str, *keys: str, **given: Any) -> Any:
        """Return the response; ``body`` is a dictionary, of which the generated class is made."""
        function = self.module(operation).sync_detailed
        if "body" in given:
            kind = inspect.get_annotations(function, eval_str=True)["body"]
            for option in getattr(kind, "__args__", (kind,)):
                if hasattr(option, "from_dict"):
                    given["body"] = option.from_dict(given["body"])
                    break
        return function(*keys, client=self.client, **given)


@pytest.fixture
def member(package: str, fixture_data: FixtureData) -> Generated:
    return Generated(package, fixture_data, "member")


def test_every_operation_has_a_function(package: str) -> None:
    root = Path(importlib.import_module(f"{package}.api").__file__ or "").parent
    names = {path.stem for path in root.glob("*/*.py")}
    described = {
        each["operationId"] for methods in openapi_document()["paths"].values() for each in methods.values()
    }
    assert described <= names | NOT_GENERATED


def test_every_list_is_read_with_nothing_but_defaults(member: Generated) -> None:
    """A generated client sends the defaults that the document states."""
    for path, methods in openapi_document()["paths"].items():
        operation = methods.get("get")
        if operation is None or "{" in path or not path.startswith("/api/v1/"):
            continue
        if any(each.get("required") for each in operation.get("parameters", ())):
            continue
        answer = member.call(operation["operationId"])
        assert answer.status_code in (HTTPStatus.OK, HTTPStatus.FORBIDDEN), (path, answer.content)
        if answer.status_code == HTTPStatus.OK:
            assert answer.parsed is not None, path


def test_jobs_are_submitted_paged_followed_and_cancelled(
    member: Generated, fixture_data: FixtureData
) -> None:
    made = [member.call("jobs_submit", body=JOB, idempotency_key="one") for _ in range(2)]
    assert [answer.status_code for answer in made] == [HTTPStatus.CREATED] * 2, made[0].content
    job = made[0].parsed
    assert made[1].parsed.id == job.id
    member.call("jobs_submit", body=JOB | {"name": "another"})

    seen: list[str] = []
    page = member.call("jobs_list", limit=1).parsed
    while True:
        seen += [each.id for each in page.items]
        if page.next_ is None:
            break
        cursor = parse_qs(urlsplit(page.next_).query)["cursor"][0]
        page = member.call("jobs_list", limit=1, cursor=cursor).parsed
    assert len(seen) == len(set(seen)) > 2
    assert job.id in seen

    log = member.call("jobs_logs", fixture_data.names["running"], rank=1).parsed
    assert log.next_offset == log.size > 0
    rest = member.call("jobs_logs", fixture_data.names["running"], rank=1, offset=log.next_offset).parsed
    assert rest.text == ""

    ended = member.call("jobs_cancel", job.id, body={})
    assert ended.status_code == HTTPStatus.OK
    assert ended.parsed.state.value == "CANCELLED"
    assert member.call("jobs_get", job.id).parsed.state.value == "CANCELLED"


def test_a_quota_is_changed_with_if_match(package: str, fixture_data: FixtureData) -> None:
    admin, quota = Generated(package, fixture_data, "admin"), fixture_data.names["quota"]
    read = admin.call("quotas_get", quota)
    old = read.headers["etag"]
    changed = admin.call("quotas_patch", quota, body={"limit_milli": 3000}, if_match=old)
    assert changed.status_code == HTTPStatus.OK, changed.content
    assert changed.parsed.limit_milli == 3000
    assert changed.parsed.weight == read.parsed.weight
    late = admin.call("quotas_patch", quota, body={"limit_milli": 1000}, if_match=old)
    assert late.status_code == HTTPStatus.PRECONDITION_FAILED
    assert late.parsed.code == "precondition_failed"
