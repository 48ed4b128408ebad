"""Echo time of a key in a web terminal of a container on an SSH node, beside a plain SSH terminal.

    python -m bench terminal [--keys N]

A complete Fairway (``manage.py up``) with a rig node of podman. Both terminals run ``cat``, so that the echo
is the pseudo terminal's own; keys alternate between the two. Needs what the rig needs (root, podman, sshd).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.report import percentile, print_figure
from bench.start import client_of, prepare_nodes

TARGET_MS = 50.0
WITHIN_S = 60.0
BETWEEN_S = 0.02


def main(arguments: list[str]) -> int:
    """Print the lines of median and p95."""
    parser = argparse.ArgumentParser(prog="bench terminal")
    parser.add_argument("--keys", type=int, default=300)
    wanted = parser.parse_args(arguments)
    from tests.rig.needs import missing_for_rig

    reason = missing_for_rig()
    if reason is not None:
        print_figure("terminal_echo", skipped=reason)
        return 0
    from tests.rig.images import rig_image
    from tests.rig.rig import Rig
    from tests.stories.portal import StoryPortal

    image = rig_image("tiny")
    with Rig(1, image_stores=[image.store]) as rig, StoryPortal("--no-local-node") as portal:
        token = prepare_nodes(portal, [rig.nodes[0]], image.name)
        with (
            client_of(portal.url, token) as client,
            _web(portal, client) as ours,
            _plain(rig.nodes[0]) as plain,
        ):
            rows = [(_echo_time(*ours), _echo_time(*plain)) for _ in range(wanted.keys)]
    for name, at in (("median", 0.5), ("p95", 0.95)):
        here, there = (percentile([row[side] for row in rows], at) for side in (0, 1))
        print_figure(
            f"terminal_echo_{name}",
            ours=round(here, 2),
            reference=round(there, 2),
            ratio=round(here / there, 2),
            unit="ms",
            target=f"at most {TARGET_MS:.0f} ms",
            met=here <= TARGET_MS,
            keys=len(rows),
            load_average=round(os.getloadavg()[0], 1),
        )
    return 0


Send = Callable[[bytes], Any]
Receive = Callable[[], bytes]


def _echo_time(send: Send, receive: Receive) -> float:
    """Return milliseconds from a key to its echo."""
    time.sleep(BETWEEN_S)
    began = time.perf_counter()
    send(b"x")
    while b"x" not in receive():
        pass
    return (time.perf_counter() - began) * 1000


@contextlib.contextmanager
def _web(portal: Any, client: Any) -> Iterator[tuple[Send, Receive]]:
    """Open a terminal of a running job, as a browser does."""
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
    from websockets.sync.client import connect

    from portal.models import Job, Task, User
    from portal.services.accounts.sessions import SessionStore
    from portal.services.workspaces.terminals import do_open_terminal

    request = {"name": "echo", "project": "default", "environment": "bench", "command": ["sleep", "600"]}
    answer = client.post("/jobs/", json=request | {"gpus_per_task": 1, "memory_mib": 256})
    assert answer.status_code == 201, answer.text
    job = Job.objects.get(public_id=answer.json()["id"])
    _until(Task.objects.filter(attempt__job=job, state="RUNNING").exists, "the job does not run")
    user = User.objects.get(pk=job.owner_id)
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    row = do_open_terminal(user, job, 0, str(session.session_key), cols=80, rows=24)
    rows = type(row).objects.filter(pk=row.pk)
    _until(rows.filter(port__isnull=False).exists, "the terminal does not listen")
    place = f"{portal.url.replace('http', 'ws', 1)}/terminals/{row.public_id}/"
    cookie = {"Cookie": f"fairway_session={session.session_key}"}
    with connect(place, origin=portal.url, additional_headers=cookie, compression=None) as wire:
        seen = 0

        def receive() -> bytes:
            nonlocal seen
            piece = wire.recv(timeout=WITHIN_S)
            assert isinstance(piece, bytes), piece
            seen += len(piece)
            wire.send(f'{{"seen": {seen}}}')
            return piece

        _begin_cat(wire.send, receive)
        yield wire.send, receive
    client.post(f"/jobs/{job.public_id}/cancel/")


@contextlib.contextmanager
def _plain(machine: Any) -> Iterator[tuple[Send, Receive]]:
    """Open a terminal of an account on the node itself."""
    import paramiko

    password = secrets.token_urlsafe(12)
    machine.add_admin("hand", password)
    with paramiko.SSHClient() as ssh:
        ssh.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        ssh.connect(machine.address, machine.port, "hand", password, look_for_keys=False, allow_agent=False)
        channel = ssh.invoke_shell(term="xterm-256color")
        _begin_cat(channel.sendall, lambda: channel.recv(65_536))
        yield channel.sendall, lambda: channel.recv(65_536)


def _begin_cat(send: Send, receive: Receive) -> None:
    send(b"echo be''gun; exec cat >/dev/null\n")
    heard = b""
    while b"begun" not in heard:
        heard += receive()
    time.sleep(1.0)


def _until(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > until_s:
            raise SystemExit(what)
        time.sleep(0.05)
