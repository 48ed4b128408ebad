"""Rules for every command of the client: JSON only with --json, a closed pipe, numbers, and an absent server."""

from __future__ import annotations

import argparse
import contextlib
import http.server
import io
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone

from client import Fairway, FairwayError, Refused, Unreachable, api, cli
from client.mcp import McpServer
from portal.models import Job, Task
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.jobs.logs import write_log_bytes
from tests.client.test_client import address, dataset, fields, run

__all__ = ["address", "dataset", "fields"]
COMMANDS = {
    "login": ["{url}"],
    "run": ["--name=run", "--project={project}", "--environment={environment}", "--", "true"],
    "list": [],
    "status": ["{job}"],
    "spec": ["{job}"],
    "open": ["{job}"],
    "stop": ["{job}"],
    "hold": ["{job}"],
    "release": ["{job}"],
    "requeue": ["{job}"],
    "why": ["{job}"],
    "export": ["{job}", "--kubernetes"],
    "logs": ["{job}"],
    "wait": ["{job}", "--for=0"],
    "ssh-config": [],
    "quota": [],
    "nodes": [],
    "free": [],
    "templates": [],
    "api": ["GET", "jobs/{job}/spec.yaml"],
    "node host-key": ["{node}"],
    "node confirm-key": ["{node}", "--reason=disk", "--fingerprint=x"],
    "node setup-script": ["{node}"],
    "node rename": ["{node}", "other"],
    "node move": ["{node}", "other.example.org"],
    "node drain": ["{node}", "--jobs=end", "--yes"],
    "node uncordon": ["{node}", "--force"],
}
"""Every command that has --json."""
LOG = b"50 %\r100 %\r\nna\xc3\xafve\n"
WITHOUT_JSON = {"ssh", "ssh-proxy", "mcp"}
"""They carry another protocol."""


def parsers(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser."""
    groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        for each, below in group.choices.items():
            yield from parsers(below, f"{name} {each}".strip())


def has_json(parser: argparse.ArgumentParser) -> bool:
    return "--json" in parser._option_string_actions


def test_the_table_has_every_command() -> None:
    found = dict(parsers(cli.build_parser()))
    assert {name for name, parser in found.items() if has_json(parser)} == set(COMMANDS)
    assert {name for name, parser in found.items() if not has_json(parser)} == WITHOUT_JSON


@pytest.fixture
def values(address: str, dataset: Any, fields: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A running job with a log, and an administrator's token."""
    dataset["owner"].is_admin = True
    dataset["owner"].save()
    monkeypatch.setenv("FAIRWAY_TOKEN", do_create_token(dataset["owner"], name="a", scopes=[Scope.ADMIN])[1])
    monkeypatch.setattr(cli, "OPERATION_POLL_S", 0.01)
    job = Fairway().submit(**fields)
    run(dataset, Job.objects.get(public_id=job.id))
    write_log_bytes(job.id, 1, 0, "raw", 0, LOG)
    Task.objects.update(log_complete=True)
    return {"url": address, "job": job.id, "project": fields["project"], "environment": fields["environment"],
            "node": dataset["node"].name}  # fmt: skip


def words_of(name: str, values: dict[str, str], *more: str) -> list[str]:
    return [*name.split(), *more, *(each.format(**values) for each in COMMANDS[name])]


def as_json(text: str) -> list[Any]:
    """The one document, or one a line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def call(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_every_command_prints_json_only_with_json(values, monkeypatch, capsys) -> None:
    for name in COMMANDS:
        monkeypatch.setattr(sys, "stdin", io.StringIO(os.environ["FAIRWAY_TOKEN"]))
        capsys.readouterr()
        code = call(*words_of(name, values, "--json"))
        printed = capsys.readouterr()
        found = as_json(printed.out)
        assert len(found) == 1, (name, printed.out)
        is_error = isinstance(found[0], dict) and "error" in found[0] and "exit_code" in found[0]["error"]
        assert is_error == bool(printed.err), (name, printed)
        if is_error:
            assert found[0]["error"]["exit_code"] == code != 0, name
            assert found[0]["error"]["message"] in printed.err.replace("\n  ", "\n  "), name


def test_logs_as_json_have_the_text(values, capsys) -> None:
    capsys.readouterr()
    Job.objects.update(state="COMPLETED", ended_at=timezone.now())
    for words in (["logs", values["job"]], ["logs", "-f", values["job"]]):
        assert call(*words, "--json") == cli.OK
        found = as_json(capsys.readouterr().out)
        assert "".join(each["text"] for each in found) == LOG.decode()


@pytest.mark.parametrize("how", ["refused", "absent", "usage", "encoding"])
def test_every_command_prints_errors_as_json(values, monkeypatch, capsys, how) -> None:
    wanted = {"refused": cli.REFUSED, "absent": cli.UNREACHABLE, "usage": cli.USAGE}
    monkeypatch.setattr(api, "MAX_TRIES", 2)
    monkeypatch.setattr(api, "PATIENCE_S", 0.0)
    more = {"usage": ["--nonsense"], "encoding": []}.get(how, [])
    url = "http://127.0.0.1:1" if how == "absent" else values["url"]
    monkeypatch.setenv("FAIRWAY_URL", url)
    if how == "refused":
        monkeypatch.setenv("FAIRWAY_TOKEN", "fw_wrong")
    for name in COMMANDS:
        if how == "encoding" and "{job}" not in COMMANDS[name]:
            continue
        if name == "ssh-config" and how != "usage":
            continue  # it sends no request
        monkeypatch.setattr(sys, "stdin", io.StringIO("fw_wrong"))
        given = values | {"url": url} | ({"job": "\udcff"} if how == "encoding" else {})
        capsys.readouterr()
        patience = (
            ["--patience=0"] if how == "absent" and name in ("logs", "wait", "run", *cli.BULK_ACTIONS) else []
        )
        code = call(*words_of(name, given, "--json", *patience, *more))
        printed = capsys.readouterr()
        (found,) = as_json(printed.out)
        assert found["error"]["exit_code"] == code == wanted.get(how, code) != 0, (name, printed)
        assert printed.err and "Traceback" not in printed.err and "codec" not in printed.err, (
            name,
            printed.err,
        )


def test_every_command_survives_a_closed_stdout(values, monkeypatch, capfd) -> None:
    for name in [*COMMANDS, "--help"]:
        for more in ([], ["--json"]):
            reading, writing = os.pipe()
            os.close(reading)
            stdout = os.fdopen(writing, "w")
            monkeypatch.setattr(sys, "stdout", stdout)
            monkeypatch.setattr(sys, "stdin", io.StringIO(os.environ["FAIRWAY_TOKEN"]))
            code = call(name) if name == "--help" else call(*words_of(name, values, *more))
            stdout.close()  # what Python does at its end
            said = capfd.readouterr().err
            assert code in cli.EXIT_CODES, name
            assert "Broken pipe" not in said and "Traceback" not in said, (name, said)


def test_every_number_is_checked_in_a_sentence(capsys) -> None:
    for name, parser in parsers(cli.build_parser()):
        for action in parser._actions:
            if action.type is None or not action.option_strings:
                continue
            option = action.option_strings[-1]
            texts = ["many", "nan", "1e999", "2h", ""]
            is_field = name == "run" and option not in ("--patience", "--timeout")
            if is_field and action.metavar == "STR":
                continue
            for text in [*texts, *([] if is_field else ["-1"])]:
                capsys.readouterr()
                assert call(*name.split(), f"{option}={text}") == cli.USAGE, (name, option, text)
                said = capsys.readouterr().err.splitlines()[-1]
                assert f"{text!r} is not a " in said and "invalid" not in said, (name, option, said)


class Gateway:
    """Forwards connections to the server; while it is ``away`` it refuses them, or answers 503."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.is_busy, self.refused = False, 0
        self._serve()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=[self.listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with near, contextlib.suppress(OSError):
                near.settimeout(0.2)
                data = b""
                with contextlib.suppress(TimeoutError):
                    while piece := near.recv(65536):
                        data += piece
                if self.is_busy:
                    self.refused += 1
                    near.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    continue
                with socket.create_connection(self.target, timeout=20) as far:
                    far.sendall(data)
                    while answer := far.recv(65536):
                        near.sendall(answer)

    def stop(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def start(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self._serve()


@pytest.mark.parametrize("how", ["refuses", "is busy"])
def test_a_followed_log_outlasts_a_restart_of_the_gateway(values, dataset, monkeypatch, capsys, how) -> None:
    monkeypatch.setattr(api, "MAX_TRIES", 2)
    Task.objects.update(log_complete=False)
    gateway = Gateway(values["url"])
    monkeypatch.setenv("FAIRWAY_URL", f"http://127.0.0.1:{gateway.port}")
    codes: list[int] = []
    following = threading.Thread(target=lambda: codes.append(cli.main(["logs", "-f", values["job"]])))
    following.start()
    time.sleep(1.0)
    if how == "refuses":
        gateway.stop()
    gateway.is_busy = how == "is busy"
    time.sleep(2.0)
    assert following.is_alive()
    write_log_bytes(values["job"], 1, 0, "raw", len(LOG), b"the end\n")
    Task.objects.update(log_complete=True)
    Job.objects.update(state="COMPLETED", ended_at=timezone.now())
    if how == "refuses":
        gateway.start()
    gateway.is_busy = False
    following.join(30)
    gateway.stop()
    printed = capsys.readouterr()
    assert codes == [cli.OK], printed
    assert "the end" in printed.out
    assert "Waiting for it." in printed.err


def test_a_server_that_stays_away_ends_the_command_with_3(values, monkeypatch, capsys) -> None:
    gateway = Gateway(values["url"])
    gateway.is_busy = True
    monkeypatch.setenv("FAIRWAY_URL", f"http://127.0.0.1:{gateway.port}")
    for words in (["logs", "-f"], ["wait"]):
        begun_s = time.monotonic()
        assert cli.main([*words, "--patience=0.5", values["job"]]) == cli.UNREACHABLE
        assert time.monotonic() - begun_s > 0.5
        assert "Waiting for it." in capsys.readouterr().err
    with pytest.raises(Refused) as refused:
        Fairway().get("jobs/")
    assert isinstance(refused.value, Unreachable)
    gateway.stop()


def test_an_overloaded_submit_says_that_it_may_be_sent_again_with_the_same_key(
    values, fields, monkeypatch, capsys
) -> None:
    gateway = Gateway(values["url"])
    gateway.is_busy = True
    monkeypatch.setenv("FAIRWAY_URL", f"http://127.0.0.1:{gateway.port}")
    command = words_of("run", values)
    before = Job.objects.count()
    for key in ("", "my-key"):
        assert (
            cli.main([*command[:1], *([f"--idempotency-key={key}"] if key else []), *command[1:]])
            == cli.UNREACHABLE
        )
        said = capsys.readouterr().err
        assert "may have been carried out" in said
        assert f"with the Idempotency-Key {key}" in said
    monkeypatch.setenv("FAIRWAY_URL", values["url"])
    made = [cli.main([*command[:1], "--idempotency-key=my-key", *command[1:]]) for _ in range(2)]
    assert made == [cli.OK, cli.OK]
    assert Job.objects.count() == before + 1
    gateway.stop()


def test_a_refused_connection_is_said_at_once(monkeypatch, address, capsys) -> None:
    monkeypatch.setenv("FAIRWAY_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 60.0)
    said: list[str] = []
    server = Fairway(on_wait=said.append)
    monkeypatch.setattr(api.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        server.get("jobs/")
    assert said == ["http://127.0.0.1:1 does not answer: [Errno 111] Connection refused. Waiting for it."]


def test_addresses_tokens_and_keys_that_are_none_are_refused_in_a_sentence(
    monkeypatch, capsys, tmp_path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for url, token in (("http://[::1", "x"), ("http://h:port", "x"), ("http://h", "a\nb"), ("http://h", "é")):
        with pytest.raises(FairwayError):
            Fairway(url, token)
    with pytest.raises(FairwayError, match="printable"):
        Fairway("http://127.0.0.1:1", "x").submit_fields({}, "a b")


@pytest.fixture
def other_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A server that is no portal; each request is answered with the first of these bodies."""
    bodies: list[bytes] = [b""]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(bodies[0])))
            self.end_headers()
            self.wfile.write(bodies[0])

        do_POST = do_PATCH = do_GET  # noqa: N815 - names of the standard library

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("FAIRWAY_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("FAIRWAY_TOKEN", "token")
    yield bodies
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"null", b"5", b'{"items": [{}]}', b'{"items": null}', b"[" * 100_000]
)
def test_the_answer_of_another_server_ends_a_command_with_a_sentence(
    other_server: list[bytes], body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    other_server[0] = body
    for words in (
        ["status", "j"],
        ["why", "j"],
        ["logs", "j"],
        ["spec", "j"],
        ["list"],
        ["nodes"],
        ["quota"],
        ["stop", "j"],
    ):
        code = cli.main(words)
        shown = capsys.readouterr()
        assert code == 1 and shown.err.startswith("fairway: The answer of "), (words, shown)
    call = {"name": "why_waiting", "arguments": {"job": "j"}}
    answer = McpServer(Fairway()).answer({"id": 1, "method": "tools/call", "params": call})
    assert answer is not None and answer["result"]["isError"]
