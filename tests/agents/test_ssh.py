"""SSH links: pinned keys, typed refusals, time limits, and a stream that carries lines."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents import ssh
from agents.keys import Purpose, fingerprint, make_keys, read_public_key
from agents.ssh import (
    AgentMissingError,
    AuthenticationError,
    HostKeyMismatchError,
    NodeUnreachableError,
    SshStep,
    SshTarget,
    agent_missing_error,
    connect_with_key,
    open_stream,
    scan_host_key,
)
from tests.rig.loopback import LoopbackSshd
from tests.time_budget import budget_s

LINE_LIMIT_BYTES = 1024 * 1024
Keys = dict[Purpose, Path]


def say_hello(stream: ssh.SshStream, role: str) -> dict[str, object]:
    stream.write(json.dumps({"role": role, "protocol": 1, "cluster": "rig"}).encode() + b"\n")
    answer: dict[str, object] = json.loads(stream.readline(LINE_LIMIT_BYTES))
    return answer


def test_a_stream_carries_lines_both_ways(target: SshTarget, key_pairs: Keys) -> None:
    stream = open_stream(target, key_pairs["control"], "control")
    try:
        assert "hello" in say_hello(stream, "control")
        stream.write(b'{"id": 7, "text": "' + b"x" * 500_000 + b'"}\n')
        assert json.loads(stream.readline(LINE_LIMIT_BYTES))["id"] == 7
        until_s = time.monotonic() + 10  # what it says beside its lines comes by a thread of its own
        while "echo agent is ready" not in stream.stderr_text() and time.monotonic() < until_s:
            time.sleep(0.02)
        assert "echo agent is ready" in stream.stderr_text()
    finally:
        stream.close()
    assert stream.readline(LINE_LIMIT_BYTES) == b""


def test_a_key_opens_its_own_role_only(target: SshTarget, key_pairs: Keys) -> None:
    stream = open_stream(target, key_pairs["watch"], "control")
    assert say_hello(stream, "control")["code"] == "forbidden"
    stream.close()


def test_scanning_shows_the_host_key_without_login(sshd: LoopbackSshd) -> None:
    shown = scan_host_key(sshd.host, sshd.port)
    assert shown.line == sshd.host_key
    assert shown.fingerprint == fingerprint(sshd.host_key)
    assert "Accepted" not in (sshd.folder / "sshd.log").read_text()


def test_another_host_key_of_the_same_type_is_refused_before_any_login(
    sshd: LoopbackSshd, target: SshTarget, key_pairs: Keys, tmp_path: Path
) -> None:
    other = read_public_key(make_keys(tmp_path / "other", "rig")["control"])
    with pytest.raises(HostKeyMismatchError) as refused:
        connect_with_key(replace(target, host_key=other), key_pairs["control"])
    assert refused.value.presented == sshd.host_key
    assert fingerprint(sshd.host_key) in str(refused.value)
    assert "Accepted" not in (sshd.folder / "sshd.log").read_text()


def test_a_host_key_of_another_type_than_pinned_is_refused(target: SshTarget, key_pairs: Keys) -> None:
    pinned = "ecdsa-sha2-nistp256 " + target.host_key.split()[1]
    with pytest.raises(HostKeyMismatchError):
        connect_with_key(replace(target, host_key=pinned), key_pairs["control"])


def test_a_key_unknown_to_the_node_is_refused(target: SshTarget, tmp_path: Path) -> None:
    outsider = make_keys(tmp_path / "stranger", "rig")["control"]
    with pytest.raises(AuthenticationError, match="rejects the portal's key for the account"):
        connect_with_key(target, outsider)


def test_a_closed_port_and_an_unknown_name_are_distinguished(key_pairs: Keys, target: SshTarget) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(NodeUnreachableError, match="no sshd listens on the port"):
            connect_with_key(replace(target, port=port), key_pairs["control"])
    with pytest.raises(NodeUnreachableError) as unknown:
        connect_with_key(replace(target, host="no-such-node.invalid"), key_pairs["control"])
    assert unknown.value.step is SshStep.RESOLVE


@pytest.mark.parametrize("first_words", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", b"SSH-2.0-silent\r\n"])
def test_a_server_other_than_sshd_costs_at_most_one_time_limit(
    first_words: bytes, key_pairs: Keys, target: SshTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ssh.STEP_TIMEOUT_S <= 5
    monkeypatch.setattr(ssh, "STEP_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            connection, _ = server.accept()
            held.append(connection)
            connection.sendall(first_words)

        threading.Thread(target=serve, daemon=True).start()
        began_s = time.monotonic()
        with pytest.raises(NodeUnreachableError, match="responds, but not as an SSH server"):
            connect_with_key(replace(target, port=server.getsockname()[1]), key_pairs["control"])
        assert time.monotonic() - began_s < budget_s(ssh.STEP_TIMEOUT_S + 2.5)
        for connection in held:
            connection.close()


def test_a_missing_agent_is_reported_with_instructions(
    sshd: LoopbackSshd, target: SshTarget, key_pairs: Keys
) -> None:
    keys = sshd.folder / "authorized_keys"
    keys.write_text(
        f'restrict,command="/nowhere/fairway-node control" {read_public_key(key_pairs["control"])}\n'
    )
    stream = open_stream(target, key_pairs["control"], "control")
    assert stream.readline(LINE_LIMIT_BYTES) == b""
    explained = agent_missing_error(stream)
    assert isinstance(explained, AgentMissingError)
    assert "run the enrolment script" in str(explained)
    stream.close()


def test_an_agent_that_exits_at_once_is_quoted(
    sshd: LoopbackSshd, target: SshTarget, key_pairs: Keys
) -> None:
    keys = sshd.folder / "authorized_keys"
    dying = "echo 'fairway-node: the disk is full.' >&2; exit 78"
    keys.write_text(f'restrict,command="{dying}" {read_public_key(key_pairs["control"])}\n')
    stream = open_stream(target, key_pairs["control"], "control")
    assert stream.readline(LINE_LIMIT_BYTES) == b""
    assert str(agent_missing_error(stream)).endswith("did not start: the disk is full.")
    stream.close()


def test_a_frozen_node_is_cut_by_the_watchdog(
    sshd: LoopbackSshd, target: SshTarget, key_pairs: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel still acknowledges every packet, so only the missing sign of life tells."""
    monkeypatch.setattr(ssh, "KEEPALIVE_INTERVAL_S", 1)
    monkeypatch.setattr(ssh, "INACTIVITY_TIMEOUT_S", 2.5)
    stream = open_stream(target, key_pairs["control"], "control")
    say_hello(stream, "control")
    time.sleep(3.5)  # an idle link lives
    stream.write(b'{"id": 1}\n')
    assert stream.readline(LINE_LIMIT_BYTES)
    sshd.freeze()
    try:
        began_s = time.monotonic()
        assert stream.readline(LINE_LIMIT_BYTES) == b""
        assert time.monotonic() - began_s < budget_s(5)
        assert "nothing was received" in stream.end_reason()
    finally:
        sshd.thaw()
        stream.close()


@pytest.mark.rig
def test_a_half_open_connection_ends_within_the_silence_limit(  # type: ignore[no-untyped-def]
    make_rig, rig_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "KEEPALIVE_INTERVAL_S", 1)
    monkeypatch.setattr(ssh, "INACTIVITY_TIMEOUT_S", 3.0)
    node = make_rig(1).nodes[0]
    rig_cluster.enrol(node)
    stream = rig_cluster.open_bare(node)
    assert "hello" in say_hello(stream, "control")
    node.half_open()
    began_s = time.monotonic()
    assert stream.readline(LINE_LIMIT_BYTES) == b""
    assert time.monotonic() - began_s < budget_s(ssh.INACTIVITY_TIMEOUT_S + 2)
    again = rig_cluster.open_bare(node)  # the node itself is well
    assert "hello" in say_hello(again, "control")
    again.close()


@pytest.mark.rig
def test_a_cut_node_is_unreachable_within_the_limit(make_rig, rig_cluster) -> None:  # type: ignore[no-untyped-def]
    node = make_rig(1).nodes[0]
    rig_cluster.enrol(node)
    target = rig_cluster.target(node)
    node.cut()
    began_s = time.monotonic()
    with pytest.raises(NodeUnreachableError, match="does not respond within 5 s"):
        connect_with_key(target, rig_cluster.keys["control"])
    assert time.monotonic() - began_s < budget_s(ssh.STEP_TIMEOUT_S + 1)
    node.heal()
    connect_with_key(target, rig_cluster.keys["control"]).close()


@pytest.mark.rig
def test_a_machine_in_place_of_the_node_is_refused(make_rig, rig_cluster) -> None:  # type: ignore[no-untyped-def]
    node = make_rig(1).nodes[0]
    rig_cluster.enrol(node)
    target = rig_cluster.target(node)
    node.change_host_key()
    with pytest.raises(HostKeyMismatchError, match="Nothing was sent to it"):
        connect_with_key(target, rig_cluster.keys["control"])
