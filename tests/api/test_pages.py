"""Pages of lists: complete, without doubles, stable while rows arrive, and only ours to continue."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from django.core import signing
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from portal.models import GpuAlert, InvalidRow, Job, JobVerdict
from portal.services.accounts.tokens import Scope
from tests import factories
from tests.api.table import ROWS

JOBS = "/api/v1/jobs/"
COUNTS = Path(__file__).parent.parent / "query_counts.json"


@pytest.fixture
def client(fixture_data):
    return fixture_data.client("member")


def more_jobs(fixture_data, number: int) -> None:
    rows = fixture_data.rows
    for index in range(number):
        factories.job(
            fixture_data.people["member"],
            rows["project"],
            rows["batch"],
            name=f"n{index % 3}",
            priority=-(index % 2),
        )


def walk(client, path: str) -> list[dict]:
    found: list[dict] = []
    while path:
        body = client.get(path).json()
        found += body["items"]
        path = body["next"]
    return found


@pytest.mark.parametrize("order", ["-submitted", "submitted", "name", "-name", "priority", "-priority"])
def test_pages_are_complete_and_without_doubles(fixture_data, client, order):
    more_jobs(fixture_data, 11)
    found = [job["id"] for job in walk(client, f"{JOBS}?limit=3&order={order}")]
    assert len(found) == len(set(found)) == Job.objects.count()
    key = {"submitted": "submitted_at"}.get(order.lstrip("-"), order.lstrip("-"))
    values = [job[key] for job in walk(client, f"{JOBS}?limit=4&order={order}")]
    assert values == sorted(values, reverse=order.startswith("-"))


def test_rows_that_arrive_shift_no_page(fixture_data, client):
    more_jobs(fixture_data, 6)
    first = client.get(f"{JOBS}?limit=4").json()
    more_jobs(fixture_data, 3)
    rest = walk(client, first["next"])
    ids = [job["id"] for job in first["items"] + rest]
    assert len(ids) == len(set(ids)) == Job.objects.count() - 3


def test_a_cursor_is_sealed_and_belongs_to_its_list(fixture_data, client):
    more_jobs(fixture_data, 4)
    following = client.get(f"{JOBS}?limit=2&search=n").json()["next"]
    cursor = parse_qs(urlsplit(following).query)["cursor"][0]
    by_name = client.get(f"{JOBS}?limit=1&order=name").json()
    mark = parse_qs(urlsplit(by_name["next"]).query)["cursor"][0]
    assert by_name["items"][0]["name"].encode() not in b64decode(mark.split(".")[-1], b"-_")
    assert client.get(f"{JOBS}?limit=2&search=n&cursor={cursor}").status_code == 200
    for path in (
        f"{JOBS}?limit=2&cursor={cursor}",
        f"{JOBS}?limit=2&search=n&cursor={cursor[:-1]}",
        f"/api/v1/workspaces/?cursor={cursor}",
        f"{JOBS}?cursor={signing.dumps([1, 2, 3], salt='other')}",
        f"{JOBS}?cursor={signing.dumps(5, salt='fairway.cursor')}",
    ):
        answer = client.get(path)
        assert answer.status_code == 422, path
        assert answer.json()["code"] == "invalid_cursor"


def test_filters_narrow(fixture_data, client):
    more_jobs(fixture_data, 3)
    total = Job.objects.count()
    for query, expected in (
        ("state=PENDING", total - 3),
        ("state=PENDING&state=CANCELLED", total - 1),
        ("state=RUNNING", 1),
        ("kind=workspace", 2),
        ("project=vision", total),
        ("project=nlp", 0),
        ("owner=member-x", total),
        ("owner=viewer-x", 0),
        ("search=TRAIN", 1),
        (f"search={fixture_data.names['job']}", 1),
        ("live=false", 2),
        ("live=true&kind=training", total - 4),
        ("pool=main-pool", 0),
    ):
        assert len(client.get(f"{JOBS}?{query}").json()["items"]) == expected, query


def test_search_treats_wildcards_literally(client):
    assert client.get(f"{JOBS}?search=%25").json()["items"] == []
    assert client.get(f"{JOBS}?search=_").json()["items"] == []


LISTS = [
    row
    for row in ROWS
    if row.name.endswith("_list") or row.name in {"jobs_get", "jobs_events", "quota_changes"}
]


@pytest.mark.parametrize("row", LISTS, ids=lambda row: row.name)
def test_query_counts_do_not_grow(row, fixture_data):
    """Pinned in tests/query_counts.json under ``api.<operation>``; the same with three times the rows."""
    pinned = json.loads(COUNTS.read_text())[f"api.{row.name}"]
    reader = ("member", Scope.READ) if "member" in row.allowed else ("admin", Scope.ADMIN)
    headers = fixture_data.bearer(*reader)
    client = fixture_data.client("anonymous")
    path = "/api/v1/" + row.path.format(**fixture_data.names)
    client.get(path, headers=headers)  # the first use of a token writes its last_used_at
    for rows in (0, 9):
        more_jobs(fixture_data, rows)
        for number in range(rows // 3):
            factories.project(
                f"p-{row.name.replace('_', '-')}-{number}", member=fixture_data.people["member"]
            )
            gpu = factories.node(fixture_data.rows["pool"]).gpus.all()[0]
            GpuAlert.objects.create(gpu=gpu, kind="foreign", first_at=timezone.now(), last_at=timezone.now())
            InvalidRow.objects.create(
                kind="node", row=f"n-{number}", field="f", message="m", first_at=timezone.now()
            )
            factories.pool()
            factories.environment()
        for job in Job.objects.filter(state="PENDING", verdict__isnull=True):
            JobVerdict.objects.create(
                job=job,
                code="project_limit",
                message="x",
                jobs_ahead=[],
                decided_at=job.submitted_at,
                code_since=job.submitted_at,
            )
        with CaptureQueriesContext(
            connection,
        ) as queries:
            assert client.get(path, headers=headers).status_code == 200
        assert len(queries) == pinned, [query["sql"][:150] for query in queries]
