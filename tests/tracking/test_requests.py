"""What the tracking server reads is what the portal has checked, whatever the bytes of a request."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from portal.api.experiments.mlflow_bodies import checked_body, write_body
from portal.domain.experiments.tracking import JOB_TAG, RESERVED_TAG_PREFIX, USER_TAG
from portal.errors import FairwayError, Forbidden, InvalidRequest
from portal.models import User
from portal.services.jobs.tracking import tracking_url
from portal.tracking.endpoints import EndpointAccess, find_endpoint
from tests.tracking.conftest import TrackingWorld
from tests.tracking.test_isolation import requests_with

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
FORGED = {"key": JOB_TAG, "value": "forged", "tags": [{"key": USER_TAG, "value": "forged"}]}
CREATES = {"runs/create", "logged-models"}
"""Their reserved tags are replaced: MLflow's client sets some of them."""


class Api:
    """Requests with the token of a member, as any HTTP client sends them."""

    def __init__(self, tracking: TrackingWorld) -> None:
        self.mlflow = tracking.client()
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {os.environ['MLFLOW_TRACKING_TOKEN']}"
        self.at = f"{tracking_url(tracking.project.public_id)}/api"

    def send(self, method: str, path: str, body: bytes = b"") -> requests.Response:
        prepared = self.session.prepare_request(requests.Request(method, self.at, data=body))
        prepared.url = f"{self.at}/{path}"  # as it is: requests would normalize it
        return self.session.send(prepared, timeout=30)


@pytest.mark.django_db(transaction=True)
def test_reserved_tags_cannot_be_forged_in_any_encoding(tracking: TrackingWorld) -> None:
    api = Api(tracking)
    experiment = api.mlflow.create_experiment("tags")
    run = api.mlflow.create_run(experiment).info.run_id
    api.mlflow.create_registered_model("model")
    offered = [
        *requests_with(run, experiment, "a"),
        ("DELETE", f"2.0/mlflow/logged-models/m/tags/{JOB_TAG}", {}),
    ]
    tried = set()
    for method, path, body in offered:
        endpoint = find_endpoint(method, path)
        assert endpoint is not None, path
        if endpoint.is_artifact or endpoint.access is EndpointAccess.READ:
            continue
        tried.add(endpoint.name)
        for encoding in ENCODINGS:
            answer = api.send(method, path, json.dumps(body | FORGED).encode(encoding))
            wanted = 200 if endpoint.name in CREATES else 403
            assert answer.status_code == wanted, (path, encoding, answer.text)
    assert len(tried) > 25 and tried >= CREATES
    for each in api.mlflow.search_runs([experiment]):
        assert each.data.tags[USER_TAG] == each.info.user_id == tracking.member.username
        assert not any(name.startswith(RESERVED_TAG_PREFIX) for name in each.data.tags)
    for model in api.mlflow.search_logged_models([experiment]):
        assert model.tags == {USER_TAG: tracking.member.username}


def read(body: bytes, endpoint: str = "runs/set-tag") -> Any:
    return json.loads(write_body(checked_body(body, endpoint, User(username="ada"), None)))


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (b'{"key": "a", "key": "fairway.job"}', Forbidden),
        (b'{"key": "\\u0066airway.job"}', Forbidden),
        (json.dumps('{"key": "fairway.job"}').encode(), Forbidden),
        (b'{"tags": [{"key": "a"}, {"key": "a", "key": "mlflow.user"}]}', Forbidden),
        *[
            (b'{"tags": %s}' % tags, InvalidRequest)
            for tags in (b'{"key": "a"}', b'"a"', b"5", b"[5]", b'[["key", "fairway.job"]]')
        ],
        (b'{"value": "\\u0000"}', InvalidRequest),
        (b'{"value": "\\\\\\u0000"}', InvalidRequest),
        (b'{"value": "\\ud800"}', InvalidRequest),
        (b'{"value": ' + b"9" * 5000 + b"}", InvalidRequest),
        (b'{"a":' * 100_000, InvalidRequest),
        (b"[" * 100_000, InvalidRequest),
        (b"[]", InvalidRequest),
        (b"null", InvalidRequest),
        (b"\xff\xfe", InvalidRequest),
        (b"key=fairway.job", InvalidRequest),
    ],
)
def test_a_body_that_hides_something_is_refused(body: bytes, refusal: type[FairwayError]) -> None:
    with pytest.raises(refusal):
        read(body)


@pytest.mark.parametrize("endpoint", ["runs/log-metric", "runs/log-parameter", "runs/log-batch"])
def test_metrics_and_parameters_have_any_name(endpoint: str) -> None:
    content = {
        "key": "fairway.loss",
        "metrics": [{"key": "fairway.loss"}],
        "params": [{"key": USER_TAG}],
        "tags": None,
    }
    assert read(json.dumps(content).encode(), endpoint) == content


def test_of_a_repeated_key_the_checked_one_is_sent() -> None:
    assert read(b'{"key": "fairway.job", "key": "mine"}') == {"key": "mine"}
    assert read(b'{"value": "\\\\u0000"}') == {"value": "\\u0000"}
    assert read(b'{"value": 1e999, "step": 9223372036854775807}') == {
        "value": float("inf"),
        "step": 2**63 - 1,
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=5), st.sampled_from(ENCODINGS))
def test_everything_else_arrives_unchanged(content: dict[str, Any], encoding: str) -> None:
    try:
        sent = json.dumps(content, ensure_ascii=False).encode(encoding)
    except UnicodeEncodeError:
        return
    try:
        assert read(sent, "runs/log-batch") == content
    except InvalidRequest:
        assert "\\u0000" in json.dumps(content)


KEPT = [
    "ü.txt", "a b.txt", "😀", "a?b", "a&b=c", "50%.png", "a%zz", "a+b", "a;b", "a:b", "C:/x", "a*", "back\\slash",
    "x" * 255, "workspaces/x/y", "~", "...", ".hidden", "-", "日本/語", "a\u2028b", "%", "'\"<>",
]  # fmt: skip
REFUSED = [
    "\x00",
    "a\x00b",
    "a\nb",
    "\x1b[2J",
    ".",
    "..",
    "./x",
    "x/.",
    "x/../y",
    "/x",
    "/workspaces/x/y",
    "a//b.txt",
    "a//b/c.txt",
    "file:x",
    "x/FILE:///etc/passwd",
    "a#b",
    "%41",
    "%2e%2e/x",
    "x" * 256,
]


@pytest.mark.django_db(transaction=True)
def test_an_artifact_has_the_name_it_was_given_or_is_refused(tracking: TrackingWorld) -> None:
    api = Api(tracking)
    run = api.mlflow.create_run(api.mlflow.create_experiment("names")).info
    folder = f"2.0/mlflow-artifacts/artifacts/{run.experiment_id}/{run.run_id}/artifacts"

    def names() -> list[str]:
        answer = api.send("GET", f"2.0/mlflow/artifacts/list?run_id={run.run_id}")
        return [each["path"] for each in answer.json().get("files", [])]

    for name in KEPT:
        at = f"{folder}/{quote(name)}"
        content = name.encode()
        assert api.send("PUT", at, content).status_code == 200, name
        assert api.send("GET", at).content == content, name
        top = name.partition("/")[0]
        assert names() == [top]
        assert api.send("DELETE", f"{folder}/{quote(top)}").status_code == 200, name
        assert names() == [], name
    for name in REFUSED:
        for method in ("PUT", "GET", "DELETE"):
            answer = api.send(method, f"{folder}/{quote(name, safe='/')}".replace("/./", "/%2e/"))
            assert answer.status_code == 400 and "artifact" in answer.json()["message"], (method, name)
        if "." in name.split("/"):
            continue  # that of a list is the folder itself: test_mlflow_client.py
        for query in (f"path={quote(name)}", f"path={quote(name)}&path=ok", f"path=ok&path={quote(name)}"):
            answer = api.send("GET", f"2.0/mlflow/artifacts/list?run_id={run.run_id}&{query}")
            assert answer.status_code == 400, (query, answer.text)
    assert api.send("DELETE", "2.0/mlflow-artifacts/artifacts/").status_code == 400
    for at in (f"{folder}/", f"{folder}/x/"):
        assert api.send("PUT", at).status_code == 400
    assert api.send("PUT", f"{folder}/part.bin", bytes(range(256))).status_code == 200
    api.session.headers["Range"] = "bytes=10-19"
    part = api.send("GET", f"{folder}/part.bin")
    assert (part.status_code, part.headers["Content-Range"]) == (206, "bytes 10-19/256")
    assert part.content == bytes(range(10, 20)) and part.headers["Content-Length"] == "10"
    for validator, status in ((part.headers["ETag"], 206), ('"other"', 200)):
        api.session.headers["If-Range"] = validator
        assert api.send("GET", f"{folder}/part.bin").status_code == status
    del api.session.headers["If-Range"]
    for ignored in ("bytes=5-2", "bytes=0-1,5-6", "bytes=-", "lines=0-1"):
        api.session.headers["Range"] = ignored
        whole = api.send("GET", f"{folder}/part.bin")
        assert (whole.status_code, whole.content) == (200, bytes(range(256))), ignored
    api.session.headers["Range"] = "bytes=256-"
    beyond = api.send("GET", f"{folder}/part.bin")
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, "bytes */256")
    del api.session.headers["Range"]
    assert api.send("GET", f"{folder}/missing.txt").status_code == 404
    assert api.send("GET", "2.0/mlflow/artifacts/list?run_id=%C3%BC").status_code == 404
