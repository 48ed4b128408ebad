"""Logs by offset: nothing lost or doubled between pieces, and plain text unless stamps are asked for."""

from __future__ import annotations

import pytest

from portal.models import Node, Task
from portal.services.jobs.logs import write_log_bytes
from tests.api.fixture_data import LOG


@pytest.fixture
def path(fixture_data):
    return f"/api/v1/jobs/{fixture_data.names['running']}/logs/"


def test_timestamps_are_removed_and_split_lines_joined(fixture_data, path):
    client = fixture_data.client("member")
    piece = client.get(f"{path}?rank=1").json()
    assert piece["text"] == "one\ntwo\ufffd\n"
    assert (piece["offset"], piece["next_offset"], piece["size"]) == (0, len(LOG), len(LOG))
    assert piece["complete"] is False
    stamped = client.get(f"{path}?rank=1&timestamps=true").json()["text"]
    assert stamped.startswith("2026-11-21T07:00:00.000001Z stdout F one\n")
    Task.objects.filter(rank=1).update(log_complete=True)
    assert client.get(f"{path}?rank=1&offset={len(LOG)}").json()["complete"] is True


def test_pieces_meet(fixture_data, path):
    lines = b"".join(b"line %d\n" % number for number in range(2000))
    write_log_bytes(fixture_data.names["running"], 1, 0, "raw", 0, lines)
    client = fixture_data.client("member")
    text, offset = "", 0
    while True:
        piece = client.get(f"{path}?offset={offset}&limit=1024").json()
        if piece["next_offset"] == offset:
            break
        assert piece["text"].endswith("\n")
        text, offset = text + piece["text"], piece["next_offset"]
    assert text.encode() == lines
    assert client.get(f"{path}?tail=2").json()["text"] == "line 1998\nline 1999\n"
    download = client.get(f"{path}download/")
    assert b"".join(download.streaming_content) == lines
    assert download["Content-Disposition"].startswith("attachment;")


def test_a_line_without_newline_is_returned_in_pieces(fixture_data, path):
    write_log_bytes(fixture_data.names["running"], 1, 0, "raw", 0, b"x" * 3000)
    piece = fixture_data.client("member").get(f"{path}?limit=1024").json()
    assert piece["next_offset"] == 1024


def test_missing_logs_are_404(fixture_data, path):
    client = fixture_data.client("member")
    assert client.get(path).json()["size"] == 0
    assert client.get(f"{path}download/").json()["code"] == "no_log_yet"
    assert client.get(f"{path}?rank=7").json()["code"] == "no_such_task"
    assert client.get(f"{path}?rank=1&tail=3&offset=2").status_code == 422
    waiting = f"/api/v1/jobs/{fixture_data.names['job']}/logs/"
    assert client.get(waiting).status_code == 404


def test_a_workspaces_log_is_its_owners(fixture_data):
    path = f"/api/v1/jobs/{fixture_data.names['workspace']}/logs/"
    codes = {
        name: fixture_data.client(name).get(path).status_code for name in ("member", "colleague", "manager")
    }
    assert codes == {"member": 404, "colleague": 403, "manager": 403}  # 404: it has no rank yet


def test_a_lost_connection_is_not_an_end(fixture_data, path):
    client = fixture_data.client("member")
    assert client.get(f"{path}?rank=1").json()["lost"] is None
    Node.objects.update(reachable=False, unreachable_since="2026-11-21T12:04:00Z")
    piece = client.get(f"{path}?rank=1&offset={len(LOG)}").json()
    assert (piece["text"], piece["complete"]) == ("", False)
    assert (piece["lost"]["node"], piece["lost"]["since"]) == ("node-one", "2026-11-21T12:04:00Z")
    assert "the log continues when it is restored" in piece["lost"]["message"]
    write_log_bytes(
        fixture_data.names["running"], 1, 1, "k8s", len(LOG), b"2026-11-21T07:00:01.0Z stdout F more\n"
    )
    Node.objects.update(reachable=True, unreachable_since=None)
    more = client.get(f"{path}?rank=1&offset={piece['next_offset']}").json()
    assert (more["text"], more["lost"]) == ("more\n", None)
    Node.objects.update(reachable=False)
    Task.objects.update(log_complete=True)
    assert client.get(f"{path}?rank=1").json()["lost"] is None, "all of it is here"
