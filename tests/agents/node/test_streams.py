"""The node's side of SSH connections, for real: commands and connections in tasks of both kinds of runtimes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from agents.link import AgentError, Link
from agents.node.terminals import frames
from agents.node.terminals.shell import Shell
from agents.ssh_server import open_authenticated
from tests.agents.node.conftest import LoneNode
from tests.agents.node.test_terminal import begin, marked

SECRET = "s" * 43
PORT = 18_431

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give tasks an account of their own")


class Streams:
    """One SSH connection to a task: its first stream holds it."""

    def __init__(self, link: Link, job: str) -> None:
        key = {"job": job, "attempt": 1, "task": 0}
        self.port = link.request("streams", timeout_s=20, secret=SECRET, **key)["port"]
        self.holder = self.open()

    def open(self, secret: str = SECRET) -> socket.socket:
        connect = partial(socket.create_connection, ("127.77.0.1", self.port), timeout=10)
        return open_authenticated(connect, secret)

    def run(self, data: bytes = b"", **request: Any) -> tuple[bytes, bytes, dict[str, Any]]:
        """What a stream gives: output, errors, and how it ended."""
        found = {frames.DATA: b"", frames.STDERR: b""}
        with self.open() as sock:
            sock.sendall(frames.json_frame(frames.REQUEST, request))
            sock.sendall(frames.frame(frames.DATA, data) + frames.frame(frames.EOF))
            reader = frames.FrameReader()
            sock.settimeout(20)
            while piece := sock.recv(65_536):
                for kind, payload in reader.feed(piece):
                    if kind == frames.END:
                        return found[frames.DATA], found[frames.STDERR], json.loads(payload)
                    found[kind] += payload
        raise AssertionError(f"no end after {found}")


@pytest.fixture(params=["process", "podman"])
def job(request: pytest.FixtureRequest) -> Iterator[tuple[Link, str, dict[str, Any]]]:
    """A running task: link, job and its record on the node."""
    node: LoneNode = request.getfixturevalue("node" if request.param == "process" else "podman_node")
    link, name = node.open(), f"j{request.param}"
    container = {"runtime": "podman", "image": node.image} if request.param == "podman" else {}  # type: ignore[attr-defined]
    begin(link, node.spec(name, "sleep", "600", env={"COLOUR": "teal-7"}, **container))
    yield link, name, next(iter(node.ledger()["tasks"].values()))


def test_commands_and_connections_in_a_task(job: tuple[Link, str, dict[str, Any]]) -> None:
    link, name, record = job
    streams = Streams(link, name)
    with pytest.raises(OSError, match="refused the stream"):
        streams.open("x" * 43)
    data = os.urandom(50_000)
    output, errors, end = streams.run(data, command="cat; echo $COLOUR; echo no >&2; exit 7")
    assert (output, errors, end) == (data + b"teal-7\n", b"no\n", {"exit_code": 7})
    output, errors, end = streams.run(b"echo from-$COLOUR; [ -t 0 ] || exit 3\n")
    assert (output, errors, end) == (b"from-teal-7\n", b"", {"exit_code": 3})
    output, _, end = streams.run(
        command="stty size 2>/dev/null || [ -t 1 ] && echo tty; exit 4", cols=90, rows=30
    )
    assert b"30 90" in output or b"tty" in output
    assert end == {"exit_code": 4}

    network = ["nsenter", "-t", str(record["pid"]), "-n"]  # where the task's own server would listen
    server = subprocess.Popen(
        [*network, sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(PORT)],
        cwd="/proc/self/task",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 20
        answer, end = b"", {}
        while not answer and time.monotonic() < deadline_s:
            answer, _, end = streams.run(b"GET / HTTP/1.0\r\n\r\n", port=PORT)
            time.sleep(0.1)
        assert answer.startswith(b"HTTP/1.0 200"), end
    finally:
        server.kill()
        server.wait()
    assert "refused" in streams.run(port=PORT)[2]["error"]

    kept = streams.open()
    command = "MARK=left-behind sh -c 'sleep 500; true'"
    kept.sendall(frames.json_frame(frames.REQUEST, {"command": command}))
    marked("MARK=left-behind")
    kept.close()
    marked("MARK=left-behind", there=False)
    streams.holder.close()
    with pytest.raises(OSError):
        for _ in range(100):
            streams.open().close()
            time.sleep(0.1)


def test_a_container_command_that_just_starts_is_not_left_behind() -> None:
    """The client is gone before the engine has started the command and its process id is known."""
    starts_late = """sleep 0.5; MARK=late-start setsid sleep 500 & printf '\\036%d\\036' $!; wait"""
    signals = ["sh", "-c", 'kill -s "$0" -- "$1"']
    shell = {"command": [], "piped": ["sh", "-c", starts_late], "hang_up": signals}
    started = Shell.start_without_terminal({"shell": shell, "pid": os.getpid(), "pid_start": None}, None)
    started.terminate()
    marked("MARK=late-start", there=False, within_s=2.0)


def test_streams_end_with_their_task_and_only_the_control_key_opens_them(node: LoneNode) -> None:
    link = node.open()
    begin(link, node.spec("jend", "sleep", "600"))
    streams = Streams(link, "jend")
    sock = streams.open()
    sock.settimeout(20)
    sock.sendall(frames.json_frame(frames.REQUEST, {"command": "echo begun; sleep 500"}))
    reader = frames.FrameReader()
    assert next(reader.feed(sock.recv(4096))) == (frames.DATA, b"begun\n")
    link.request("stop", timeout_s=20, epoch=1, job="jend", attempt=1, grace_s=0)
    assert next(reader.feed(sock.recv(4096)))[0] == frames.END
    assert streams.holder.recv(1) == b""
    for role in ("watch", "bulk"):
        with pytest.raises(AgentError, match=f"The role {role} may not use streams"):
            Streams(node.open(role), "jend")
    with pytest.raises(AgentError, match="is not running"):
        Streams(link, "jend")
