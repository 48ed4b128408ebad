"""Bad input and bad days: each ends in a problem with a stable code, never in a trace, HTML or a hang."""

from __future__ import annotations

import json
import time

import pytest
from django.db import OperationalError
from django.test import Client
from redis.exceptions import ConnectionError as RedisAway

from portal.api.framework.request_parsing import MAX_BODY_BYTES
from portal.api.jobs import jobs as job_routes
from portal.models import Gpu
from portal.valkey import rate_limits
from tests.api.table import JOB
from tests.factories import LAYERS

JOBS = "/api/v1/jobs/"


def post(client: Client, body, content_type: str = "application/json", path: str = JOBS, **headers: str):
    data = body if isinstance(body, str | bytes) else json.dumps(body)
    return client.post(path, data, content_type=content_type, headers=headers)


def is_problem(answer, status: int, code: str) -> dict:
    assert answer.status_code == status, answer.content
    assert answer["Content-Type"] == "application/problem+json"
    body = answer.json()
    assert body["code"] == code
    assert body["status"] == status
    assert body["detail"]
    return body


@pytest.fixture
def client(fixture_data):
    return fixture_data.client("member")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"state": "RUNNING"}, "state"),
        ({"owner": "somebody"}, "owner"),
        ({"tasks": 0}, "tasks"),
        ({"tasks": "1"}, "tasks"),
        ({"tasks": True}, "tasks"),
        ({"tasks": 10**40}, "tasks"),
        ({"gpus_per_task": -1}, "gpus_per_task"),
        ({"milli_per_gpu": 1001}, "milli_per_gpu"),
        ({"name": 7}, "name"),
        ({"command": "rm -rf /"}, "command"),
        ({"command": [1]}, "command.0"),
        ({"env": {"A": 1}}, "env.A"),
        ({"topology_constraint": {"required": "rack"}}, "topology_constraint.topology"),
        ({"topology_constraint": "rack"}, "topology_constraint"),
        ({"volumes": "team"}, "volumes"),
        ({"min_compute_capability": 0}, "min_compute_capability"),
        ({"min_compute_capability": "8.0"}, "min_compute_capability"),
        ({"mig_profile": "x" * 33}, "mig_profile"),
        ({"kind": "service"}, "kind"),
        ({"preemptible": "yes"}, "preemptible"),
        ({"time_limit_s": 10**9}, "time_limit_s"),
    ],
)
def test_fields_of_another_shape_are_400(client, change, field):
    body = is_problem(post(client, {**JOB, **change}), 400, "invalid")
    assert any(error["field"].startswith(field.split(".")[0]) for error in body["errors"]), body


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "../../etc"}, "name"),
        ({"command": []}, "command"),
        ({"env": {"LD_PRELOAD": "x"}}, "env"),
        ({"topology_constraint": {"topology": "nowhere", "required": "rack"}}, "topology_constraint"),
        ({"topology_constraint": {"topology": "hall", "required": "row"}}, "topology_constraint"),
        ({"topology_constraint": {"topology": "hall"}}, "topology_constraint"),
        ({"secrets": [{"secret": "own"}]}, "secrets"),
        ({"secrets": [{"secret": "nowhere", "variable": "A"}]}, "secrets"),
        ({"secrets": [{"secret": "own", "variable": "LD_PRELOAD"}]}, "secrets"),
        ({"secrets": [{"secret": "own", "file": "../token"}]}, "secrets"),
        ({"secrets": [{"secret": "own", "variable": "WORD"}], "env": {"WORD": "x"}}, "secrets"),
        ({"volumes": [{"volume": "nowhere"}]}, "volumes"),
        ({"volumes": [{"volume": "team", "target": "/etc/passwd"}]}, "volumes"),
        ({"volumes": [{"volume": "team", "target": "/x"}, {"volume": "team", "target": "/x/"}]}, "volumes"),
        ({"project": "nowhere"}, "project"),
        ({"environment": "nowhere"}, "environment"),
        ({"pool": "nowhere"}, "pool"),
        ({"template": "nowhere"}, "template"),
    ],
)
def test_fields_that_cannot_be_carried_out_are_422(client, change, field):
    body = is_problem(post(client, {**JOB, **change}), 422, "invalid")
    assert any(error["field"].startswith(field.split(".")[0]) for error in body["errors"]), body


def test_an_impossible_request_gets_the_nearest_possible_one(client):
    body = is_problem(post(client, {**JOB, "gpus_per_task": 9}), 422, "unsatisfiable")
    assert body["details"]["nearest"] == {"tasks": 1, "gpus_per_task": 4}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"name": NaN}',
        b'{"name": "a", "name": "b"}',
        b'{"name": "a\\u0000b"}',
        b'{"name": "\\ud800"}',
        b'{"a\\u0000": 1}',
        b"[" * 100_000,
        b'{"a":' * 20 + b"1" + b"}" * 20,
        b'{"tasks": ' + b"9" * 5000 + b"}",
        b'{"tasks": 1e999}',
    ],
)
def test_broken_json_is_400(client, raw):
    answer = post(client, raw)
    assert answer.status_code == 400
    assert answer["Content-Type"] == "application/problem+json"


def test_a_broken_text_full_of_quotes_costs_no_more_than_another(client):
    began = time.process_time()
    assert post(client, b'"' + b'\\"' * (MAX_BODY_BYTES // 2 - 1)).status_code == 400
    assert time.process_time() - began < 2


def test_an_overflowing_number_is_reported(fixture_data):
    quota = f"/api/v1/quotas/{fixture_data.rows['quota'].public_id}/"
    body = b'{"guaranteed_milli": 0, "limit_milli": null, "priority": 0, "weight": ' + b"9" * 400 + b"}"
    answer = fixture_data.client("admin").put(quota, body, content_type="application/json")
    assert is_problem(answer, 400, "invalid")["errors"][0]["field"] == "weight"


def test_the_limit_per_user_is_kept_unless_it_is_given(fixture_data):
    quota = f"/api/v1/quotas/{fixture_data.rows['quota'].public_id}/"
    client = fixture_data.client("admin")

    def send(verb, **body):
        tag = client.get(quota)["ETag"]
        return getattr(client, verb)(
            quota, json.dumps(body), content_type="application/json", headers={"If-Match": tag}
        )

    four = {"guaranteed_milli": 0, "limit_milli": None, "priority": 0, "weight": 1.0}
    assert client.get(quota).json()["user_limit_milli"] is None
    assert send("patch", user_limit_milli=0).json()["user_limit_milli"] == 0
    assert send("put", **four).json()["user_limit_milli"] == 0
    assert send("put", **four, user_limit_milli=None).json()["user_limit_milli"] is None
    for nonsense in (-1, "2", True, 1.5, 10**9):
        answer = send("patch", user_limit_milli=nonsense)
        assert is_problem(answer, 400, "invalid")["errors"][0]["field"] == "user_limit_milli"
    changes = client.get(f"{quota}changes/").json()["items"]
    assert [row["after"]["user_limit_milli"] for row in changes][:2] == [None, 0]


def test_a_job_may_start_after_jobs_visible_to_its_owner(fixture_data):
    client = fixture_data.client("member")
    first = post(client, json.dumps(JOB)).json()["id"]
    answer = post(
        client, json.dumps(JOB | {"dependencies": [first, first], "ignore_dependency_failure": True})
    )
    assert answer.status_code == 201
    chained = answer.json()
    assert [(one["job"]["id"], one["state"]) for one in chained["dependencies"]] == [(first, "PENDING")]
    assert chained["ignore_dependency_failure"] is True
    (following,) = client.get(f"{JOBS}{first}/").json()["dependents"]
    assert following["job"]["id"] == chained["id"]
    for nonsense in (
        "x",
        [1],
        [None],
        [[]],
        [""],
        ["x" * 64],
        ["\u0000"],
        {"a": 1},
        None,
        ["y"] * 21,
        ["nobody"],
    ):
        refused = post(client, json.dumps(JOB | {"dependencies": nonsense}))
        assert refused.status_code == (422 if nonsense == ["nobody"] else 400), nonsense
        assert refused["Content-Type"] == "application/problem+json"
    for nonsense in ("true", 1, None):
        assert post(client, json.dumps(JOB | {"ignore_dependency_failure": nonsense})).status_code == 400


def test_a_job_requests_a_gpu_model_and_a_topology_level(fixture_data):
    client = fixture_data.client("member")
    Gpu.objects.filter(index=3).update(mig_profile="1g.10gb", compute_capability=9.0)
    near = {"topology": "hall", "required": "rack", "preferred": None}
    asked = {"mig_profile": "1g.10gb", "min_compute_capability": 8.0, "topology_constraint": near}
    answer = post(client, JOB | {"tasks": 1, "gpus_per_task": 1} | asked)
    assert answer.status_code == 201, answer.content
    shown = client.get(f"{JOBS}{answer.json()['id']}/").json()
    assert {name: shown[name] for name in asked} == asked


def test_cursor_of_another_list_is_refused(client):
    is_problem(client.get(f"{JOBS}?cursor=abc"), 422, "invalid_cursor")


def test_too_large_is_413(client):
    is_problem(post(client, b'{"name": "' + b"x" * MAX_BODY_BYTES + b'"}'), 413, "too_large")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "x"])
def test_another_content_type_is_415(client, kind):
    is_problem(post(client, json.dumps(JOB), kind), 415, "unsupported_media_type")


def test_other_methods_are_405_with_allow(client):
    for method in ("put", "patch", "delete", "options", "trace"):
        answer = getattr(client, method)(JOBS)
        is_problem(answer, 405, "method_not_allowed")
        assert set(answer["Allow"].split(", ")) == {"GET", "HEAD", "POST"}


@pytest.mark.parametrize("path", ["/api/docs/", "/api/docs/start.js", "/healthz", "/readyz", "/jobs/"])
def test_wrong_method_outside_rest_views_has_allow(client, path):
    answer = client.put(path)
    assert (answer.status_code, answer["Allow"]) == (405, "GET, HEAD")


def test_unknown_parameters_and_orders_are_refused(client):
    for query in (
        "colour=red",
        "order=owner__password",
        "state=ODD",
        "limit=0",
        "limit=201",
        "limit=x",
        "project=a&project=b",
        "owner__is_admin=true",
        "search=%00",
    ):
        assert client.get(f"{JOBS}?{query}").status_code == 400, query


@pytest.mark.parametrize(
    "path", ["/api/", "/api", "/api/v1/", "/api/v1/nothing/", "/api/v2/jobs/", "/api/v1/jobs/%00/"]
)
def test_unknown_addresses_are_problems(client, path):
    is_problem(client.get(path), 404, "not_found")


def test_a_missing_slash_is_pointed_out(client):
    assert "/api/v1/jobs/" in is_problem(client.post("/api/v1/jobs", {}), 404, "not_found")["detail"]


def test_a_wrong_host_is_a_problem(client):
    answer = client.get(JOBS, headers={"Host": "evil.example"})
    assert answer.status_code == 400
    assert answer["Content-Type"] == "application/problem+json"


def test_a_session_needs_the_csrf_token(fixture_data):
    client = Client(enforce_csrf_checks=True)
    client.force_login(fixture_data.people["member"])
    is_problem(post(client, JOB), 403, "csrf_failed")
    assert client.get(JOBS).status_code == 200


def test_unexpected_errors_leave_no_trace(client, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(job_routes, "list_jobs", broken)
    body = is_problem(client.get(JOBS), 500, "internal")
    assert "secret" not in json.dumps(body)


@pytest.mark.parametrize("failure", [OperationalError("gone"), RedisAway("gone")])
def test_a_missing_dependency_is_503(client, monkeypatch, failure):
    def away(*_):
        raise failure

    monkeypatch.setattr(job_routes, "list_jobs", away)
    answer = client.get(JOBS)
    is_problem(answer, 503, "unavailable")
    assert int(answer["Retry-After"]) > 0


def test_too_many_requests_are_429(client, monkeypatch):
    monkeypatch.setattr(rate_limits, "REQUESTS", rate_limits.RateLimit("anything", 3, 3600))
    answers = [client.get("/api/v1/me/") for _ in range(4)]
    body = is_problem(answers[-1], 429, "too_many_requests")
    assert answers[-1]["Retry-After"] in body["detail"]
    assert answers[2].status_code == 200


def test_rate_limits_apply_without_redis(monkeypatch):
    class Away:
        def __init__(self, within_s: float) -> None:
            pass

        def pipeline(self, **_):
            raise RedisAway("gone")

    monkeypatch.setattr(rate_limits, "valkey_client", Away)
    rate = rate_limits.RateLimit("tight", 2, 3600)
    assert [rate_limits.consume(rate, "somebody") > 0 for _ in range(3)] == [False, False, True]


def test_html_is_never_served(client):
    answer = client.get(JOBS, headers={"Accept": "text/html"})
    assert answer.status_code == 200
    assert answer["Content-Type"] == "application/json"


def test_a_number_that_is_too_large_for_a_float_is_refused_wherever_it_is(client):
    """JSON reads 1e400 as infinity, which no column of the database stores."""
    body = json.dumps(LAYERS | {"totals": {"x": 7}}).replace("7", "-1e400")
    body = '{"project": "vision", "name": "large", "profile": ' + body + "}"
    problem = is_problem(post(client, body, path="/api/v1/profiles/"), 400, "malformed")
    assert "too large" in problem["detail"]
    for text in ('{"tasks": 1e400}', "[1e999]", '{"a": {"b": [1E+309]}}'):
        assert "too large" in is_problem(post(client, text), 400, "malformed")["detail"]


def test_a_profile_may_be_larger_than_other_bodies(client):
    """A graph of 5,000 nodes takes more than 256 KiB, which is the limit of every other route."""
    fields = {"project": "vision", "name": "deep"}
    graph = "x" * (MAX_BODY_BYTES + 1)
    problem = is_problem(post(client, fields | {"graph": graph}, path="/api/v1/profiles/"), 422, "invalid")
    assert "Line 1 is neither a node" in problem["errors"][0]["message"]
    large = post(client, fields | {"graph": graph * 5}, path="/api/v1/profiles/")
    assert "larger than 1280 KiB" in is_problem(large, 413, "too_large")["detail"]
