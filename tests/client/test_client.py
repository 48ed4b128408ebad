"""The client and the command line against the real web application."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from client import Fairway, FairwayError, Refused, TimedOut, api, cli
from portal.domain.jobs.job_spec import job_fields
from portal.models import Attempt, BulkOperation, CodeArchive, Job, Task
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.jobs.bulk import advance_bulk
from portal.services.jobs.logs import write_log_bytes
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def dataset(transactional_db: None, settings: Any, tmp_path: Path) -> dict[str, Any]:
    settings.LOG_DIR = tmp_path / "logs"
    factories.cluster_settings()
    return factories.basic_cluster() | {"lab": factories.environment("lab")}


@pytest.fixture
def address(dataset: Any, live_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    token = do_create_token(dataset["owner"], name="t", scopes=[Scope.READ, Scope.JOBS, Scope.WORKSPACES])[1]
    monkeypatch.setenv("FAIRWAY_URL", live_server.url)
    monkeypatch.setenv("FAIRWAY_TOKEN", token)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(api, "POLL_S", 0.05)
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.01)
    return str(live_server.url)


@pytest.fixture
def fields(dataset: Any) -> dict[str, Any]:
    return {"name": "run", "project": dataset["project"].name, "environment": dataset["environment"].name,
            "command": ["python", "train.py"]}  # fmt: skip


def fairway(*arguments: str) -> int:
    return cli.main(arguments)


def options(fields: dict[str, Any]) -> list[str]:
    return [f"--{name}={fields[name]}" for name in ("name", "project", "environment")]


def run(dataset: dict[str, Any], job: Job) -> None:
    """Place the job on the node, and let it run."""
    gpus = list(dataset["node"].gpus.values_list("pk", flat=True))[: job.gpus_per_task]
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        placement = [RankPlacement(dataset["node"], [(gpu, 1000) for gpu in gpus])]
        attempt = job_control.start_attempt(locked, dataset["pool"], placement, epoch=1)
    task = attempt.task_rows.get()
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="x", ports={}, at=timezone.now())


def test_python_submits_waits_reads_logs_and_stops(address, dataset, fields) -> None:
    server = Fairway()
    job = server.submit(**fields, gpus_per_task=2, env={"A": "1"})
    row = Job.objects.get(public_id=job.id)
    assert (row.gpus_per_task, row.env, job.state) == (2, {"A": "1"}, "PENDING")
    assert job.url == f"{address}/jobs/{job.id}/"
    with pytest.raises(TimedOut, match="is PENDING after 0 s"):
        job.wait(0)
    run(dataset, row)
    write_log_bytes(row.public_id, 1, 0, "raw", 0, b"one\ntwo\n")
    assert "".join(job.logs()) == "one\ntwo\n"
    assert "".join(job.logs(tail=1)) == "two\n"
    assert [each.id for each in server.jobs(state=["RUNNING"])] == [job.id]
    assert Fairway().job(job.id).stop().data["desired_state"] == "cancelled"
    keyed = [Fairway().submit(idempotency_key="nightly-1", **fields).id for _ in range(2)]
    assert keyed[0] == keyed[1] != job.id
    assert "kind: Job\n" in job.kubernetes() and "kind: TrainJob\n" in job.kubernetes(trainjob=True)
    text = job.spec()
    copy = server.submit_yaml(text.replace("name: run", "name: again"))
    assert Job.objects.get(public_id=copy.id).command == ["python", "train.py"]


def test_an_action_on_several_jobs_is_followed_until_each_is_changed_or_refused(
    address, dataset, fields, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(api, "BULK_POLL_S", 0.05)
    ids = [Fairway().submit(**fields | {"name": f"run-{number}"}).id for number in range(3)]
    assert fairway("hold", ids[0]) == cli.OK
    answered = threading.Event()

    def only_record(
        act: BulkOperation,
    ) -> BulkOperation:  # the request's time is over before it changed a job
        answered.set()
        return act

    def work() -> None:
        answered.wait(60)
        advance_bulk(BulkOperation.objects.get(finished_at=None))
        connection.close()

    worker = threading.Thread(target=work)
    worker.start()
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr("portal.api.jobs.job_lists.advance_in_request", only_record)
        assert fairway("hold", *ids) == cli.REFUSED
    worker.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[one, f"run-{at}"] for at, one in enumerate(ids)]
    assert "It is held already." in lines[1] and lines[2].endswith("done") and lines[3].endswith("done")
    assert Job.objects.filter(held=True).count() == 3
    assert fairway("release", *ids) == cli.OK and not Job.objects.filter(held=True).exists()
    assert fairway("stop", *ids) == cli.OK and {job.state for job in Job.objects.all()} == {"CANCELLED"}


def test_logs_are_followed_until_the_job_ends(address, dataset, fields) -> None:
    job = Fairway().submit(**fields)
    pieces = job.logs(follow=True)
    threading.Timer(0.3, lambda: run_in_thread(dataset, job.id)).start()
    assert next(pieces) == "first\n"
    write_log_bytes(job.id, 1, 0, "raw", 6, b"second\n")
    assert next(pieces) == "second\n"
    Task.objects.update(log_complete=True)
    Attempt.objects.update(state="COMPLETED")
    Job.objects.update(state="COMPLETED")
    assert list(pieces) == []
    assert job.has_ended


def run_in_thread(dataset: dict[str, Any], public_id: str) -> None:
    run(dataset, Job.objects.get(public_id=public_id))
    write_log_bytes(public_id, 1, 0, "raw", 0, b"first\n")
    connection.close()


def test_lists_are_read_to_their_end(address, dataset, fields) -> None:
    for number in range(7):
        factories.job(dataset["owner"], dataset["project"], dataset["environment"], name=f"j{number}")
    assert len(list(Fairway().jobs(limit=3))) == 7


def test_refusals_name_the_fields_and_the_nearest_request(address, fields, capsys) -> None:
    with pytest.raises(Refused) as wrong:
        Fairway().submit(**fields, tasks=0, tsks=1)
    assert (wrong.value.status, wrong.value.code) == (400, "invalid")
    assert {each["field"] for each in wrong.value.errors} == {"tasks", "tsks"}
    assert fairway("run", *options(fields), "--gpus-per-task=64", "--", "true") == cli.REFUSED
    shown = capsys.readouterr().err
    assert "64" in shown and "nearest possible request" in shown
    assert fairway("status", "nothing") == cli.REFUSED
    assert fairway("run", "--env=A", "--", "x") == cli.USAGE
    with pytest.raises(SystemExit) as usage:
        fairway("run", "--tasks=many")
    assert usage.value.code == cli.USAGE


class LossyProxy:
    """Forwards each connection to the server, and closes the first ``lost`` ones after the server has answered."""

    def __init__(self, target: str, lost: int) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self.target, self.lost, self.connections = (host, int(port)), lost, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            with near, socket.create_connection(self.target, timeout=20) as far:
                near.settimeout(0.3)
                try:
                    while data := near.recv(65536):
                        far.sendall(data)
                except TimeoutError:
                    pass
                answer = far.recv(65536)  # the server has done the work
                if self.connections > self.lost:
                    while answer:
                        near.sendall(answer)
                        answer = far.recv(65536)


def test_lost_answers_submit_a_job_only_once(address, fields) -> None:
    proxy = LossyProxy(address, lost=3)
    job = Fairway(proxy.url).submit(**fields)
    assert proxy.connections == 4
    assert [each.public_id for each in Job.objects.all()] == [job.id]
    proxy.listener.close()


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_a_server_that_does_not_answer_ends_the_command(address, monkeypatch, how, capsys) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    if how == "refuses":
        silent.close()
    monkeypatch.setenv("FAIRWAY_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(api, "MAX_TRIES", 2)
    assert fairway("list", "--timeout=0.2") == cli.UNREACHABLE
    assert "does not answer" in capsys.readouterr().err
    silent.close()


def test_a_redirect_does_not_forward_the_token(address, monkeypatch) -> None:
    with pytest.raises(Refused) as refused:
        Fairway().get("/account/")  # redirects to the page for signing in
    assert refused.value.status == 302


def test_login_stores_the_token_readable_only_by_its_user(address, monkeypatch, capsys, dataset) -> None:
    token = os.environ["FAIRWAY_TOKEN"]
    for name in ("FAIRWAY_URL", "FAIRWAY_TOKEN"):
        monkeypatch.delenv(name)
    assert fairway("list") == cli.REFUSED
    assert "fairway login" in capsys.readouterr().err
    for typed, code in (("wrong", cli.REFUSED), (token, cli.OK)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{typed}\n"))
        assert fairway("login", address) == code
    path = api.config_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert fairway("list") == cli.OK
    path.chmod(0o644)
    with pytest.raises(FairwayError, match="readable by others"):
        Fairway()


def test_every_listing_prints_a_table_and_json(address, dataset, fields, capsys) -> None:
    job = Fairway().submit(**fields)
    for command in ("list", "quota", "nodes", "free", "templates"):
        assert fairway(command) == cli.OK
        head = capsys.readouterr().out.splitlines()[0]
        assert head == head.upper()
        assert fairway(command, "--json") == cli.OK
        assert isinstance(json.loads(capsys.readouterr().out), list)
    fairway("free", "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["free"], row["gpus"]) == (4, 4)
    fairway("list")
    assert job.id in capsys.readouterr().out
    for command in ("status", "why", "spec"):
        assert fairway(command, job.id) == cli.OK
        assert "PENDING" in capsys.readouterr().out or command == "spec"
    assert fairway("export", job.id, "--kubernetes", "--trainjob") == cli.OK
    assert fairway("export", job.id, "--kubernetes") == cli.OK
    assert "apiVersion: batch/v1" in capsys.readouterr().out


def test_the_exit_code_of_wait_reflects_the_end(address, fields, capsys) -> None:
    job = Fairway().submit(**fields)
    assert fairway("wait", job.id, "--for=0") == cli.TIMED_OUT
    assert fairway("stop", job.id) == cli.OK
    assert fairway("wait", job.id) == cli.JOB_FAILED
    assert "CANCELLED" in capsys.readouterr().out


def test_a_file_and_standard_input_are_submitted(address, fields, tmp_path, monkeypatch, capsys) -> None:
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())
    (tmp_path / "job.yaml").write_text(text)
    assert fairway("run", "-f", str(tmp_path / "job.yaml")) == cli.OK
    assert Job.objects.get().public_id == capsys.readouterr().out.strip()
    (tmp_path / "job.yaml").write_text(text + "tsks: 2\n")
    assert fairway("run", "-f", str(tmp_path / "job.yaml")) == cli.REFUSED
    assert "tsks: Unknown field. Did you mean tasks? (line 5)" in capsys.readouterr().err
    assert fairway("run", "-f", "x", "--name=y") == cli.USAGE


def test_a_workspace_is_submitted_and_its_page_printed(address, dataset, capsys) -> None:
    given = {"name": "lab", "project": dataset["project"].name, "environment": "lab"}
    assert fairway("run", "--kind=workspace", *options(given)) == cli.OK
    public_id = capsys.readouterr().out.strip()
    assert fairway("open", public_id) == cli.OK
    assert capsys.readouterr().out.strip().endswith(f"/jobs/{public_id}/")


HARD = {
    "name": "it's a run",
    "command": "python 'a b.py' --note \"it's $HOME\"",
    "env": "NOTE=two words & 'quotes' $X\nEMPTY=",
    "kind": "training",
    "tasks": "1",
    "gpus_per_task": "1",
    "cores": "1",
    "memory_gib": "1",
    "priority": "-3",
    "milli_per_gpu": "500",
    "retry_exit_codes": "3 4",
    "start_after": "2027-03-01T08:00",
}


def reviewed(dataset: Any, typed: dict[str, str]) -> dict[str, str]:
    """What the review of the launch page shows, by notation."""
    client = Client()
    client.force_login(dataset["owner"])
    rows = {name: dataset[name].public_id for name in ("project", "environment")}
    shown = client.post(reverse("launch-check"), rows | typed).content.decode()
    found = re.findall(r'<pre id="p-(\w+)"[^>]*>(.*?)</pre>', shown, re.DOTALL)
    assert {key for key, _ in found} - {"kubernetes", "trainjob"} == {"yaml", "cli", "rest"}, shown
    return {key: html.unescape(text) for key, text in found}


def pasted(text: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the text in a shell that has the command ``fairway``."""
    script = f'fairway() {{ "{sys.executable}" -m client "$@"; }}\n{text}'
    return subprocess.run(
        ["/bin/sh", "-c", script], input=stdin, text=True, capture_output=True, cwd=ROOT, timeout=60
    )


def test_lines_of_the_review_work_when_pasted(address, dataset) -> None:
    typed = {name: value for name, value in HARD.items() if name != "name"} | {"name": "my run"}
    shown = reviewed(dataset, typed)
    assert "kind: Job\n" in shown["kubernetes"] and "kind: TrainJob\n" in shown["trainjob"]
    jobs = []
    for key, text, stdin in (
        ("cli", shown["cli"], ""), ("rest", shown["rest"], ""), ("yaml", "fairway run -f -", shown["yaml"])
    ):  # fmt: skip
        done = pasted(text, stdin)
        assert done.returncode == 0, (key, text, done.stdout, done.stderr)
        jobs.append(Job.objects.latest("id"))
    assert len({job.pk for job in jobs}) == 3
    for name in job_fields():
        values = [getattr(job, name) for job in jobs]
        assert values[0] == values[1] == values[2], name
    assert jobs[0].command == ["/bin/sh", "-c", HARD["command"]]
    assert jobs[0].env == {"NOTE": "two words & 'quotes' $X", "EMPTY": ""}
    assert (jobs[0].priority, jobs[0].milli_per_gpu, jobs[0].retry_exit_codes) == (-3, 500, [3, 4])
    schedule = reviewed(
        dataset, typed | {"start_after": "", "cron": "0 6 * * *", "overlap": "skip", "time_zone": "UTC"}
    )
    for key in ("cli", "rest"):
        done = pasted(schedule[key])
        assert done.returncode == 0 and '"cron"' in done.stdout, (schedule[key], done)


def test_the_client_installs_separately(tmp_path) -> None:
    source = tmp_path / "client"
    source.mkdir()
    for path in [*(ROOT / "client").glob("*.py"), ROOT / "client/pyproject.toml"]:
        (source / path.name).write_text(path.read_text())
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation",
               "--target", str(tmp_path / "site"), str(source)]  # fmt: skip
    subprocess.run(install, check=True, timeout=120, capture_output=True)
    command = tmp_path / "site/bin/fairway"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [command, "--help"], env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=60
    )
    assert "exit codes:" in done.stdout, done.stderr


def test_a_folder_is_packed_without_what_git_ignores_and_stored_once(
    address, dataset, fields, tmp_path, capsys
) -> None:
    folder = tmp_path / "vit"
    (folder / "src").mkdir(parents=True)
    for name, content in (("src/train.py", "print(1)"), ("data.bin", "x" * 1000), (".gitignore", "*.bin\n")):
        (folder / name).write_text(content)
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o755)
    (folder / "outside").symlink_to("/etc/passwd")
    options = [f"--{name}={fields[name]}" for name in ("project", "environment")]
    assert fairway("run", "--name=packed", f"--code={folder}", *options, "--", "python", "src/train.py") == 0
    printed = capsys.readouterr()
    assert "outside is left out" in printed.err
    job = Job.objects.get(public_id=printed.out.strip())
    assert _names(job.code_archive) == [".gitignore", "data.bin", "run.sh", "src/train.py"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    assert fairway("run", "--name=ignored", f"--code={folder}", *options, "--", "true") == 0
    of_git = Job.objects.get(public_id=capsys.readouterr().out.strip())
    assert _names(of_git.code_archive) == [".gitignore", "run.sh", "src/train.py"]
    os.utime(folder / "run.sh", (1, 1))
    assert fairway("run", "--name=same", f"--code={folder}", *options, "--", "true") == 0
    assert CodeArchive.objects.count() == 2
    assert fairway("run", "--name=none", f"--code={tmp_path / 'gone'}", *options, "--", "true") == cli.USAGE
    assert fairway("run", "--name=none", f"--code={folder}", "--", "true") == cli.USAGE


def _names(sha256: str) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(CodeArchive.objects.get(sha256=sha256).content)) as archive:
        assert archive.getmember("run.sh").mode == 0o755
        return archive.getnames()


NAME = "Größe 😀 \u2028 数据"
LOG = b"50 %\r100 %\r\nna\xc3\xafve \xff\x00\x0b\xe2\x80\xa8 \xf0\x9f\x98\x80\nno end \xe2\x9c"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_no_command_ends_because_of_an_encoding(
    address, dataset, fields, monkeypatch, encoding, tmp_path
) -> None:
    job = Fairway().submit(**fields | {"command": ["echo", NAME]})
    run(dataset, Job.objects.get(public_id=job.id))
    Job.objects.update(name=NAME, message=NAME)
    write_log_bytes(job.id, 1, 0, "raw", 0, LOG)
    Task.objects.update(log_complete=True)
    (tmp_path / "job.yaml").write_text(f"{job.spec()}".replace(job.id, ""), encoding="utf-8")
    commands = [
        *([name] for name in ("list", "quota", "nodes", "free", "templates")),
        *([name, job.id] for name in ("status", "why", "spec", "logs", "open", "stop")),
        ["list", f"--owner={NAME}"], ["status", NAME], ["run", "--name", NAME],
        ["run", "-f", str(tmp_path / "job.yaml")],
        ["run", "-f", "-"], ["api", "GET", f"jobs/{job.id}/"], ["api", "GET", f"jobs/{job.id}/spec.yaml"],
        ["api", "GET", f"jobs/{job.id}/logs/download/"],
        ["export", job.id, "--kubernetes"], ["list", "--json"], ["status", job.id, "--json"], ["ssh-config"],
        ["wait", job.id, "--for=0"],
    ]  # fmt: skip
    for command in commands:
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n") for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        document = io.BytesIO((tmp_path / "job.yaml").read_bytes())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(document, encoding=encoding))
        code = fairway(*command)
        err.flush()
        assert code in cli.EXIT_CODES and "codec" not in err.buffer.getvalue().decode(encoding), command
        if command[0] == "logs" or "download" in command[-1]:
            assert out.buffer.getvalue() == LOG, "the bytes of the program"
        if command == ["list"]:
            listed = out.buffer.getvalue().decode(encoding)
            assert "Gr" in listed and "\\U0001f600" in listed


@pytest.mark.parametrize(("command", "code"), [("logs {}", 0), ("--help", 0), ("wait {}", 4)])
def test_a_closed_pipe_ends_the_command_silently(address, dataset, fields, command, code) -> None:
    job = Fairway().submit(**fields)
    run(dataset, Job.objects.get(public_id=job.id))
    write_log_bytes(job.id, 1, 0, "raw", 0, b"line\n" * 50_000)
    Task.objects.update(log_complete=True)
    reading, writing = os.pipe()
    os.close(reading)
    Job.objects.update(state="FAILED")
    words = [sys.executable, "-m", "client", *command.format(job.id).split()]
    done = subprocess.run(
        words, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False, text=True
    )
    assert (done.returncode, done.stderr) == (code, "")
    os.close(writing)


def test_a_closed_input_is_empty(address, monkeypatch) -> None:
    for command in ("run -f -", "api POST jobs/ --data -", f"login {address}", "mcp"):
        monkeypatch.setattr(sys, "stdin", None)
        assert fairway(*command.split()) in cli.EXIT_CODES, command


def test_errors_that_cannot_be_written_keep_the_exit_code(address, monkeypatch) -> None:
    monkeypatch.setenv("FAIRWAY_URL", "http://127.0.0.1:1")
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as sink:  # closing writes what is left
        monkeypatch.setattr(sys, "stderr", sink)
        assert fairway("list") == cli.UNREACHABLE


def test_errors_of_the_server_cannot_control_the_terminal(address, capsys) -> None:
    assert fairway("status", "no\x1b[2J\x9b1m\rjob") == cli.REFUSED
    error = cli.Refused(422, {"detail": "a\x1b]0;b\x07", "errors": [{"field": "c\x9b", "message": "d\re"}]})
    assert cli._fail(cli.REFUSED, error) == cli.REFUSED
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", capsys.readouterr().err)
