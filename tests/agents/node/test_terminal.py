"""Terminals of a node, for real: the agent opens them, a plain socket enters them, and shells answer."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.link import AgentError
from agents.node.terminals import websocket
from agents.node.terminals.terminal import WINDOW_BYTES
from tests.agents.node.conftest import LoneNode

SECRET = "s" * 43
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give tasks an account of their own")


class Browser:
    """The other side of a terminal, with what it printed and what it said."""

    def __init__(self, port: int, secret: str = SECRET) -> None:
        self._sock = socket.create_connection(("127.77.0.1", port), timeout=10)
        key = base64.b64encode(os.urandom(16)).decode()
        self._sock.sendall(
            f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Authorization: Bearer {secret}\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        self._data = b""
        self.printed = b""
        self.shown = 0
        self.words: list[dict[str, Any]] = []
        self.closed = False
        head = self._until(b"\r\n\r\n")
        self.entered = head.startswith(b"HTTP/1.1 101")

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            piece = self._sock.recv(4096)
            if not piece:
                return b""
            self._data += piece
        head, _, self._data = self._data.partition(mark)
        return head

    def send(self, payload: bytes, kind: int = websocket.BINARY) -> None:
        size, mask = len(payload), os.urandom(4)
        head = bytes([0x80 | kind])
        head += bytes([0x80 | size]) if size < 126 else bytes([0xFE]) + size.to_bytes(2, "big")
        self._sock.sendall(head + mask + bytes(c ^ mask[n % 4] for n, c in enumerate(payload)))

    def say(self, **word: int) -> None:
        self.send(json.dumps(word).encode(), websocket.TEXT)

    def take(self, timeout_s: float = 0.2, *, shows: bool = True) -> None:
        """Reads what comes within a moment; ``shows``: it is said to be seen."""
        self._sock.settimeout(timeout_s)
        try:
            piece = self._sock.recv(65_536)
        except TimeoutError:
            return
        except OSError:
            piece = b""
        self.closed |= not piece
        self._data += piece
        while len(self._data) >= 2:
            size, at = self._data[1], 2
            if size >= 126:
                at = 4 if size == 126 else 10
                size = int.from_bytes(self._data[2:at], "big")
            if len(self._data) < at + size:
                break
            kind, payload = self._data[0] & 0x0F, self._data[at : at + size]
            self._data = self._data[at + size :]
            if kind == websocket.BINARY:
                self.printed += payload
            elif kind == websocket.TEXT:
                self.words.append(json.loads(payload))
        if shows and len(self.printed) > self.shown and not self.closed:
            self.shown = len(self.printed)
            with contextlib.suppress(OSError):
                self.say(seen=self.shown)

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
        until_s = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < until_s and not self.closed, (self.printed[-2000:], self.words)
            self.take()

    def hear(self, text: str) -> None:
        self.wait_for(lambda: text.encode() in self.printed)

    def ask(self, line: str, answer: str) -> str:
        """Types a line and gives what was printed since, once the answer is among it."""
        begin = len(self.printed)
        self.send(line.encode() + b"\n")
        self.wait_for(lambda: answer.encode() in self.printed[begin:].replace(line.encode(), b""))
        return self.printed[begin:].decode()

    def end(self) -> dict[str, Any]:
        """What is said at the end."""
        self.wait_for(lambda: bool(self.words))
        return self.words[-1]

    def leave(self) -> None:
        self._sock.close()


def open_terminal(link: Any, job: str, **more: Any) -> int:
    fields = {"job": job, "attempt": 1, "task": 0, "secret": SECRET, "cols": 80, "rows": 24, "idle_s": 600}
    return int(link.request("terminal", timeout_s=20, **{**fields, **more})["port"])


def begin(link: Any, spec: dict[str, Any]) -> None:
    link.request("start", timeout_s=30, epoch=1, spec=spec)


def processes_with(marker: str) -> list[int]:
    """Processes that have this variable; by it a shell and all it started are known."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as stream:
            if marker.encode() in stream.read():
                found.append(int(pid))
    return found


def marked(marker: str, *, there: bool = True, within_s: float = 20.0) -> None:
    """Waits until there are such processes, or none any more."""
    until_s = time.monotonic() + within_s
    while bool(found := processes_with(marker)) != there:
        assert time.monotonic() < until_s, found
        time.sleep(0.05)


@pytest.fixture
def task(node: LoneNode) -> Iterator[tuple[LoneNode, Any]]:
    """A task of the runtime process, with a variable and a home of its own."""
    link = node.open()
    begin(
        link,
        node.spec(
            "jterm",
            "sleep",
            "600",
            env={"COLOUR": "teal-7"},
            mounts=[{"kind": "home", "source": "ada", "target": "/home/ada"}],
        ),
    )
    yield node, link


@needs_root
def test_a_shell_runs_beside_its_task_and_sees_no_agent_files(task, monkeypatch) -> None:
    node, link = task
    browser = Browser(open_terminal(link, "jterm"))
    reported = browser.ask(
        'echo $COLOUR; id -u; grep NoNewPrivs /proc/self/status; pwd; tty; ls -A /tmp; echo "[${SHLVL}]$TERM-en""d"',
        "xterm-256color-end",
    )
    assert (
        "teal-7" in reported and "NoNewPrivs:\t1" in reported and str(node.folder / "homes/ada") in reported
    )
    assert "/dev/pts/" in reported
    uid = next(line for line in reported.splitlines() if line.strip().isdigit() and int(line) > 1_000_000)
    record = next(iter(node.ledger()["tasks"].values()))
    assert int(uid) == record["task_uid"]
    assert os.readlink(f"/proc/{record['pid']}/ns/mnt") in browser.ask(
        "readlink /proc/self/ns/mnt; echo x=1", "x=1"
    )
    variables = browser.ask('env | cut -d= -f1 | tr "\\n" " "; echo o""k', "ok")
    ours = {
        "FAIRWAY_NODE_SETTINGS",
        "SSH_CONNECTION",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "DATABASE_URL",
        "XDG_RUNTIME_DIR",
    }
    assert not ours & set(variables.split())
    assert "sockets 0" in browser.ask(
        "echo sockets $(ls -l /proc/$$/fd | grep -c -E 'socket|shim|terminals')", "sockets 0"
    )
    browser.say(cols=132, rows=43)
    browser.ask("sleep 0.2; stty size", "43 132")
    browser.send(b"exit 3\n")
    assert browser.end() == {"ended": "exited", "exit_code": 3}


def test_processes_of_a_shell_end_with_its_connection(task) -> None:
    _, link = task
    browser = Browser(open_terminal(link, "jterm"))
    browser.ask(
        "export MARK=left-behind; nohup sleep 500 >/dev/null 2>&1 & sleep 501 & echo be''gun", "begun"
    )
    browser.ask("sh -c 'sleep 502' & echo tw''o", "two")
    marked("MARK=left-behind")
    browser.leave()
    marked("MARK=left-behind", there=False)


def test_a_terminal_ends_with_its_task(task) -> None:
    _, link = task
    browser = Browser(open_terminal(link, "jterm"))
    browser.ask("echo her''e", "here")
    link.request("stop", timeout_s=20, epoch=1, job="jterm", attempt=1, grace_s=0)
    assert browser.end()["ended"] == "task_ended"


def test_an_idle_terminal_is_closed(task) -> None:
    _, link = task
    browser = Browser(open_terminal(link, "jterm", idle_s=2))
    browser.ask("while :; do echo wo''rks; sleep 0.2; done", "works")  # what is printed is no keystroke
    assert browser.end()["ended"] == "idle"


def test_an_unauthorised_connection_is_refused_and_blocks_nobody(task) -> None:
    _, link = task
    port = open_terminal(link, "jterm")
    silent = [socket.create_connection(("127.77.0.1", port), timeout=5) for _ in range(4)]
    assert not Browser(port, secret="t" * 43).entered
    browser = Browser(port)
    assert browser.entered
    browser.ask("echo we''ll", "well")
    with pytest.raises(OSError):
        socket.create_connection(("127.77.0.1", port), timeout=5)  # it let one in, and listens no more
    for sock in silent:
        sock.close()


@pytest.mark.long
def test_endless_output_waits_for_the_reader_and_delays_no_other(task) -> None:
    _, link = task
    flood, other = (Browser(open_terminal(link, "jterm")) for _ in range(2))
    flood.send(b"yes abcdefgh\n")
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        flood.take(0.1, shows=False)
    assert WINDOW_BYTES <= len(flood.printed) < 2 * WINDOW_BYTES
    other.ask("echo quic''k", "quick")
    flood.say(seen=len(flood.printed))
    before = len(flood.printed)
    flood.wait_for(lambda: len(flood.printed) > before + WINDOW_BYTES // 2)
    flood.send(b"\x03")
    flood.wait_for(lambda: b"^C" in flood.printed[-200:])
    flood.ask("echo sti''ll", "still")


def test_limits_and_malformed_messages_are_refused(task) -> None:
    _, link = task
    browsers = [Browser(open_terminal(link, "jterm")) for _ in range(4)]
    with pytest.raises(AgentError, match="at most 4 open terminals"):
        open_terminal(link, "jterm")
    browsers[0].leave()
    until_s = time.monotonic() + 5
    while True:
        with contextlib.suppress(AgentError):
            open_terminal(link, "jterm")
            break
        assert time.monotonic() < until_s
        time.sleep(0.1)
    for broken in ({"secret": "short"}, {"cols": 0}, {"rows": 5000}, {"idle_s": 10**6}, {"job": "other"}):
        with pytest.raises(AgentError):
            open_terminal(link, **{"job": "jterm", **broken})


def test_only_the_control_key_opens_terminals(node: LoneNode) -> None:
    for role in ("watch", "bulk"):
        with pytest.raises(AgentError, match=f"The role {role} may not use terminal"):
            open_terminal(node.open(role), "jterm")


def test_a_shell_in_a_container_is_isolated_and_ends_with_its_connection(
    podman_node: LoneNode,
) -> None:
    link = podman_node.open()
    begin(
        link,
        podman_node.spec(
            "jbox", "sleep", "600", runtime="podman", image=podman_node.image, env={"COLOUR": "teal-7"}
        ),
    )
    browser = Browser(open_terminal(link, "jbox"))
    reported = browser.ask(
        "echo $COLOUR $$; id -u; id -g; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status; echo e''nd",
        "end",
    )
    assert b"\x1e" not in browser.printed and "teal-7" in reported and "2001" in reported
    for wall in ("CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        assert wall in reported
    browser.say(cols=101, rows=33)
    browser.ask("sleep 0.5", "$")
    browser.ask("echo $LINES $COLUMNS", "33 101")
    browser.ask("export MARK=in-the-box; sh -c 'sleep 500; true' & echo ma''rked", "marked")
    marked("MARK=in-the-box")
    browser.leave()
    marked("MARK=in-the-box", there=False)
    again = Browser(open_terminal(link, "jbox"))
    again.send(b"exit 5\n")
    assert again.end() == {"ended": "exited", "exit_code": 5}
    last = Browser(open_terminal(link, "jbox"))
    last.ask("echo re''ady", "ready")
    link.request("stop", timeout_s=20, epoch=1, job="jbox", attempt=1, grace_s=0)
    assert last.end()["ended"] == "task_ended"


@given(
    st.lists(
        st.tuples(st.sampled_from([websocket.TEXT, websocket.BINARY]), st.binary(max_size=70_000)), max_size=4
    ),
    st.integers(1, 5000),
)
def test_messages_survive_any_fragmentation(messages, piece) -> None:
    wire = b""
    for kind, payload in messages:
        size, mask = len(payload), b"\x01\xfe\x80\x7f"
        head = bytes([0x80 | kind])
        if size < 126:
            head += bytes([0x80 | size])
        elif size < 65_536:
            head += b"\xfe" + size.to_bytes(2, "big")
        else:
            head += b"\xff" + size.to_bytes(8, "big")
        wire += head + mask + bytes(c ^ mask[n % 4] for n, c in enumerate(payload))
    reader, found = websocket.MessageReader(), []
    for at in range(0, len(wire), piece):
        found += reader.feed(wire[at : at + piece])
    assert found == messages


@pytest.mark.parametrize(
    "wire",
    [
        b"\x82\x01a",  # no mask
        b"\xc2\x80abcd",  # an extension
        b"\x82\xff" + (1 << 40).to_bytes(8, "big"),  # too long
        b"\x80\x80abcd",  # the rest of nothing
        b"\x09\x80abcd",  # a ping in pieces
    ],
)
def test_frames_that_no_browser_sends_are_refused(wire) -> None:
    with pytest.raises(websocket.WebSocketProtocolError):
        websocket.MessageReader().feed(wire)
