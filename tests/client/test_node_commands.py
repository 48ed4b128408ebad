"""The commands of administrators on nodes, against the real web application and an sshd."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from agents.keys import PURPOSES, fingerprint, make_keys, read_public_key
from client import api, cli
from portal.models import Node, NodeOperation
from portal.services.accounts.tokens import Scope, do_create_token
from scheduler.nodes.node_checks import run_check, run_move
from tests import factories
from tests.rig.fake_agent import echo_agent
from tests.rig.loopback import LoopbackSshd, loopback_sshd, make_host_key
from tests.rig.needs import missing_for_loopback

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def sshd(tmp_path: Path, settings: Any) -> Iterator[LoopbackSshd]:
    reason = missing_for_loopback()
    if reason is not None:
        pytest.skip(reason)
    keys = make_keys(tmp_path / "keys", "test")
    settings.KEY_FILES = {name: str(keys[name]) for name in PURPOSES}
    public = {purpose: read_public_key(keys[purpose]) for purpose in PURPOSES}
    with loopback_sshd(tmp_path, echo_agent(), public) as running:
        yield running


@pytest.fixture
def node(transactional_db: None, sshd: LoopbackSshd, tmp_path: Path) -> Node:
    """A node that presents another key than the confirmed one."""
    factories.cluster_settings()
    place = {"host": sshd.host, "port": sshd.port, "ssh_user": sshd.account}
    return factories.node(factories.pool(), name="gpu1", host_key=make_host_key(tmp_path / "old"), **place)


@pytest.fixture
def worker(node: Node) -> Iterator[None]:
    """Runs connection tests as worker-nodes does."""
    end = threading.Event()

    def work() -> None:
        while not end.wait(0.1):
            for operation in NodeOperation.objects.filter(finished_at__isnull=True, steps=[]):
                (run_move if operation.kind == "move" else run_check)(operation.public_id)
        connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    end.set()
    thread.join(30)


@pytest.fixture
def sign_in(live_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("FAIRWAY_URL", live_server.url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(cli, "OPERATION_POLL_S", 0.05)

    def use(*, admin: bool) -> None:
        owner = factories.user(admin=admin)
        scopes = [Scope.ADMIN, Scope.READ] if admin else [Scope.READ]
        monkeypatch.setenv("FAIRWAY_TOKEN", do_create_token(owner, name="t", scopes=scopes)[1])

    return use


def fairway(*arguments: str) -> int:
    return cli.main(["node", *arguments])


def test_a_new_key_is_confirmed_by_its_fingerprint(node, sshd, worker, sign_in, capsys, monkeypatch) -> None:
    sign_in(admin=True)
    old, new = fingerprint(node.host_key), fingerprint(sshd.host_key)
    assert fairway("host-key", "gpu1") == cli.OK
    shown = capsys.readouterr().out
    assert f"known      {old} (ssh-ed25519)" in shown and f"presented  {new} (ssh-ed25519)" in shown
    assert fairway("host-key", "gpu1", "--json") == cli.OK
    assert json.loads(capsys.readouterr().out)["changed"] is True

    monkeypatch.setattr("sys.stdin", io.StringIO(new))  # no terminal
    assert fairway("confirm-key", "gpu1", "--reason=disk") == cli.USAGE
    assert new in capsys.readouterr().err
    assert fairway("confirm-key", "gpu1", f"--fingerprint={old}", "--reason=disk") == cli.REFUSED
    assert "presents the host key" in capsys.readouterr().err
    assert Node.objects.get().host_key == node.host_key

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    fairway("confirm-key", "gpu1", "--reason=disk")
    printed = capsys.readouterr().out
    assert "ok      Host key: It presents the confirmed key" in printed
    assert "ok      Control key: " in printed
    assert "FAILED  Agent: " in printed and "skipped Runtime: " in printed  # the echo agent has none
    assert Node.objects.get().host_key == sshd.host_key
    assert fairway("confirm-key", "gpu1", "--reason=disk") == cli.REFUSED
    assert "nothing to confirm" in capsys.readouterr().err


def test_a_node_is_renamed_and_a_failed_move_is_told(node, sshd, worker, sign_in, capsys) -> None:
    sign_in(admin=True)
    assert fairway("rename", "gpu1", "gpu2", "--reason=names") == cli.OK
    assert "gpu2" in capsys.readouterr().out
    began_s = time.monotonic()
    assert fairway("move", "gpu2", "127.0.0.1", "--port=1") == cli.REFUSED
    printed = capsys.readouterr().out
    assert "FAILED  TCP connection: " in printed and time.monotonic() - began_s < 20
    assert "skipped Clock: " in printed and printed.count("FAILED") == 1
    assert (Node.objects.get().name, Node.objects.get().port) == ("gpu2", sshd.port)


def test_a_node_is_drained_after_a_list_of_its_jobs_and_returned(node, sign_in, monkeypatch, capsys) -> None:
    Node.objects.update(state="ready", agent_info={"interfaces": []})
    sign_in(admin=True)
    assert fairway("drain", "gpu1") != cli.OK, "without a terminal the choice is required"
    assert fairway("drain", "gpu1", "--jobs=end", "--job=x=later") != cli.OK
    assert Node.objects.get().state == "ready"
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answers, state in ((["wait", "n"], "ready"), (["wait", "y"], "drained")):
        given = iter(answers)
        monkeypatch.setattr("builtins.input", lambda prompt, given=given: next(given))
        fairway("drain", "gpu1", "--reason=fan")
        assert Node.objects.get().state == state
    assert "drained" in capsys.readouterr().out and Node.objects.get().state_reason == "fan"
    assert fairway("uncordon", "gpu1", "--force") == cli.OK
    assert Node.objects.get().state == "ready"


def test_a_member_is_refused(node, sshd, sign_in, capsys) -> None:
    sign_in(admin=False)
    for arguments in (
        ("host-key", "gpu1"),
        ("confirm-key", "gpu1", f"--fingerprint={fingerprint(sshd.host_key)}", "--reason=mine"),
        ("rename", "gpu1", "mine"),
        ("move", "gpu1", "mine.example"),
        ("setup-script", "gpu1"),
        ("drain", "gpu1", "--jobs=end"),
        ("uncordon", "gpu1", "--force"),
    ):
        assert fairway(*arguments) == cli.REFUSED
    unchanged = Node.objects.get()
    assert (unchanged.name, unchanged.host, unchanged.host_key) == ("gpu1", sshd.host, node.host_key)
