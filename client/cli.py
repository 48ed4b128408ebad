"""The command ``fairway``. Exit codes are those of ``EXIT_CODES`` (``options``)."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import io
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .api import PATIENCE_S, Fairway, FairwayError, Job, Refused, TimedOut, Unreachable, write_config
from .fields import FLAGS, REFERENCES
from .mcp import McpServer
from .options import (
    EXIT_CODES,
    INTERRUPTED,
    JOB_FAILED,
    OK,
    REFUSED,
    TIMED_OUT,
    UNREACHABLE,
    USAGE,
    Parser,
    field_value,
    print_error,
    seconds,
    whole,
)
from .output import clean, print_fields, print_rows, print_text, write_bytes, write_log
from .ssh import config_block, proxy, ssh_command

BULK_ACTIONS = {
    "stop": "Stop or cancel jobs.",
    "hold": "Keep waiting jobs from starting.",
    "release": "Let held jobs start.",
    "requeue": "Return running jobs to the queue, and submit ended ones again.",
}
Handler = Callable[[argparse.Namespace], int]
Command = Callable[[Fairway, argparse.Namespace], int]
OPERATION_POLL_S = 0.5
MAX_PAGE = 200
"""Rows of a page of a list."""
DRAIN_CHOICES = ("wait", "move", "end")


def main(arguments: Sequence[str] | None = None) -> int:
    _prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    Parser.wants_json = "--json" in itertools.takewhile(lambda word: word != "--", words)
    code = OK  # if the reader of a pipe has ended
    try:
        try:
            code = _run(build_parser().parse_args(words))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:  # such as a full disk
        _discard_output()
        code = _fail(REFUSED, error)
    except KeyboardInterrupt:
        _discard_output()
        code = INTERRUPTED
    return code


def _run(given: argparse.Namespace) -> int:
    act: Handler = given.act
    try:
        return act(given)
    except BrokenPipeError:
        raise
    except Unreachable as error:
        return _fail(UNREACHABLE, error)
    except TimedOut as error:
        return _fail(TIMED_OUT, error)
    except (FairwayError, OSError) as error:
        return _fail(REFUSED, error)
    except UnicodeError:
        return _fail(USAGE, ValueError("an argument, a file or the standard input is not UTF-8"))
    except ValueError as error:
        return _fail(USAGE, error)


def _prepare_streams() -> None:
    """Let no character end the command: one that the encoding of an output lacks is written as an escape (\\xe9).

    An output that is closed from the beginning is discarded, and such an input is empty. Input is UTF-8, whatever
    encoding the terminal has.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - until the process ends
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        with contextlib.suppress(io.UnsupportedOperation):  # it is being read
            sys.stdin.reconfigure(encoding="utf-8")


def _discard_output() -> None:
    """Discard what is left to write, so that Python does not report it at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code:3} {text}" for code, text in EXIT_CODES.items())
    parser = Parser(
        prog="fairway",
        description="Jobs and workspaces of a Fairway portal, named by FAIRWAY_URL and FAIRWAY_TOKEN, or by login.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fairway {__version__}")
    timed = Parser(add_help=False)
    timed.add_argument(
        "--timeout", type=seconds("time limit", least_s=0.001), default=30.0, metavar="S",
        help="limit of a request, seconds",
    )  # fmt: skip
    timed.set_defaults(json=False)
    common = Parser(add_help=False, parents=[timed])
    common.add_argument(
        "--json", action="store_true", help="print JSON instead of tables and text, also for errors"
    )
    patient = Parser(add_help=False)
    patient.add_argument(
        "--patience", type=seconds("time"), default=PATIENCE_S, metavar="S",
        help=f"go on for so many seconds without an answer of the server; default {PATIENCE_S:g}",
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_local(name: str, act: Handler, text: str, *parents: Parser) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=text, parents=list(parents or [common]), allow_abbrev=False
        )
        command.set_defaults(act=act)
        return command

    def add(name: str, act: Command, text: str, *parents: Parser) -> argparse.ArgumentParser:
        return add_local(name, lambda given: act(_server(given), given), text, *parents)

    stored = add_local("login", login, "Store address and token of a portal.")
    stored.add_argument("url", help="such as https://gpu.example.org")
    _add_run(
        add("run", run, "Submit a job: its fields as options, then -- and its command.", common, patient)
    )
    listing = add("list", list_jobs, "List jobs, newest first.")
    listing.add_argument("--state", action="append", help="repeatable, such as PENDING")
    listing.add_argument("--project")
    listing.add_argument("--owner", help="user name")
    listing.add_argument("--active", action="store_true", help="only jobs that have not ended")
    listing.add_argument("--limit", type=whole("limit", 1), default=50, help="at most this many; default 50")
    for name, act, text in (
        ("status", status, "Show a job."),
        ("spec", spec, "Print the request of a job as YAML, for run -f."),
        ("open", open_workspace, "Print the page on which a workspace opens in a browser."),
    ):
        add(name, act, text).add_argument("job", help="id of a job")
    for name, text in BULK_ACTIONS.items():
        changing = add(name, change_jobs, text, common, patient)
        changing.add_argument("jobs", nargs="+", metavar="JOB", help="ids of jobs")
        changing.set_defaults(action=name)
    asking = add(
        "why", why, "Say why a job is pending, when it is expected to start, and what starts it sooner."
    )
    asking.add_argument("job", help="id of a job")
    asking.add_argument("--quick", action="store_true", help="without changes that start it sooner")
    asking.add_argument(
        "--apply", type=whole("change", 1), metavar="N", help="make the change of this number"
    )
    exporting = add("export", export, "Print a job for another system.")
    exporting.add_argument("job", help="id of a job")
    exporting.add_argument("--kubernetes", action="store_true", required=True, help="as YAML for kubectl")
    exporting.add_argument("--trainjob", action="store_true", help="as a TrainJob of Kubeflow Trainer v2")
    logs = add("logs", show_logs, "Print the log of a job.", common, patient)
    logs.add_argument("job", help="id of a job")
    logs.add_argument("-f", "--follow", action="store_true", help="until the job ends")
    logs.add_argument("--rank", type=whole("rank", 0), default=0)
    logs.add_argument("--tail", type=whole("number of lines", 1), help="only this many last lines")
    waiting = add("wait", wait, "Wait until a job has ended.", common, patient)
    waiting.add_argument("job", help="id of a job")
    waiting.add_argument(
        "--for", dest="seconds", type=seconds("time"), metavar="S", help="at most this many seconds"
    )
    _add_ssh(add, common, timed)
    add("quota", quota, "List the quotas of your projects.")
    add("nodes", nodes, "List nodes.")
    _add_node_commands(commands, common)
    add("free", free, "Count all GPUs and the free GPUs of each model.")
    add("templates", templates, "List templates.")
    assistant = add(
        "mcp",
        serve_mcp,
        "Serve the Model Context Protocol on standard input and output, for assistants.",
        timed,
    )
    assistant.add_argument("--read-only", action="store_true", help="offer no tool that changes something")
    assistant.add_argument("--simulate", action="store_true", help="preview submissions, and cancel nothing")
    api = add("api", call_api, "Send any request of the REST API, and print the answer.")
    api.add_argument("method", choices=["GET", "POST", "PUT", "PATCH", "DELETE"])
    api.add_argument("path", help="such as /api/v1/sweeps/")
    api.add_argument("--data", help="JSON body; - reads it from standard input")
    return parser


def _add_node_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    text = "Change a node, for administrators."
    group = commands.add_parser("node", help=text, description=text, allow_abbrev=False)
    subcommands = group.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, act: Command, text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = subcommands.add_parser(
            name, help=text, description=text, parents=[common], allow_abbrev=False
        )
        command.set_defaults(act=lambda given: act(_server(given), given))
        command.add_argument("node", help="name or id")
        return command

    add("host-key", show_host_key, "Show the confirmed host key of a node, and the one that it presents now.")
    confirming = add("confirm-key", confirm_key, "Confirm the new host key of a reinstalled node.")
    confirming.add_argument(
        "--fingerprint", help="of the presented key, as compared on the machine; asked for on a terminal"
    )
    confirming.add_argument("--reason", required=True, help="why the key changed; it is stored")
    script = add("setup-script", print_setup_script, "Print the script that sets up a node again.")
    script.add_argument("--engine", default="auto", help="auto, rootless or rootful")
    renaming = add("rename", rename_node, "Rename a node; its jobs continue.")
    renaming.add_argument("name", help="the new name")
    moving = add("move", move_node, "Move a node to another address, after a test of the connection there.")
    moving.add_argument("host", help="host name or address")
    moving.add_argument("--port", type=whole("port", 1, 65_535), help="default: its present port")
    draining = add("drain", drain_node, "Take a node out of service; the jobs on it are listed first.")
    draining.add_argument(
        "--jobs",
        choices=DRAIN_CHOICES,
        help="wait until they end, move after their next checkpoint, or end now",
    )
    draining.add_argument(
        "--job",
        action="append",
        default=[],
        metavar="ID=CHOICE",
        help="another choice for one job; repeatable",
    )
    draining.add_argument("--signal", action="store_true", help="send SIGUSR1 to jobs that are moved")
    draining.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    uncordoning = add("uncordon", uncordon_node, "Return a node to service, such as to undo a drain.")
    uncordoning.add_argument("--force", action="store_true", help="at once, without a check of the node")
    for each in (renaming, moving, draining, uncordoning):
        each.add_argument("--reason", default="", help="stored with the change")


def _server(given: argparse.Namespace) -> Fairway:
    """Return the server, whose outages are reported on standard error."""
    patience_s = getattr(given, "patience", PATIENCE_S)
    return Fairway(timeout_s=given.timeout, patience_s=patience_s, on_wait=_report)


def _report(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"fairway: {clean(text)}", file=sys.stderr, flush=True)


def _add_ssh(add: Callable[..., argparse.ArgumentParser], common: Any, timed: Any) -> None:
    shell = add("ssh", open_ssh, "Open a shell in a running job with ssh, or run a command there.", timed)
    shell.add_argument("--rank", type=whole("rank", 0), default=0)
    shell.add_argument("job", help="id of a job")
    shell.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="COMMAND", help="command and its arguments"
    )
    add(
        "ssh-config",
        print_ssh_config,
        "Print the block for ~/.ssh/config; jobs are then hosts JOB.fairway.",
        common,
    )
    tunnel = add("ssh-proxy", run_ssh_proxy, "Carry an SSH connection; ssh calls it as ProxyCommand.", timed)
    tunnel.add_argument("host", help="JOB.fairway, or JOB.RANK.fairway")


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("-f", "--file", help="job in YAML; - is standard input. Excludes all other fields")
    command.add_argument("--wait", action="store_true", help="until it has ended")
    command.add_argument("--logs", action="store_true", help="print its log until it has ended")
    for name in (*REFERENCES, *FLAGS):
        flag, kind = f"--{name.replace('_', '-')}", FLAGS.get(name, str)
        if kind is bool:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        else:
            command.add_argument(flag, type=field_value(name, kind), metavar=kind.__name__.upper())
    command.add_argument("--code", metavar="DIR", help="pack and upload this folder as the code of the job")
    command.add_argument("--env", action="append", metavar="NAME=VALUE", help="variable; repeatable")
    command.add_argument("--param", action="append", metavar="NAME=VALUE", help="parameter of the template")
    command.add_argument("--after", action="append", metavar="JOB", help="start after this job; repeatable")
    command.add_argument(
        "--set", action="append", metavar="FIELD=JSON", help="any other field, such as volumes"
    )
    command.add_argument(
        "--idempotency-key", metavar="KEY", help="submit once, however often the command is run with this key"
    )
    command.add_argument("command", nargs="*", help="argument list, after --")


def job_fields(given: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a job as the options say. Raise ValueError."""
    fields = {
        name: getattr(given, name) for name in (*REFERENCES, *FLAGS) if getattr(given, name) is not None
    }
    if given.env:
        fields["env"] = dict(map(_pair, given.env))
    if given.param:
        fields["parameters"] = {name: _json_or_text(value) for name, value in map(_pair, given.param)}
    if given.after:
        fields["dependencies"] = given.after
    for name, value in map(_pair, given.set or ()):
        try:
            fields[name] = json.loads(value)
        except ValueError:
            raise ValueError(f"--set {name}: {value!r} is not JSON") from None
    return fields | ({"command": given.command} if given.command else {})


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name, value


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


# -- commands ------------------------------------------------------------------------------------------


def login(given: argparse.Namespace) -> int:
    token = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline()
    server = Fairway(given.url, token.strip(), timeout_s=given.timeout, on_wait=_report)
    server.get("jobs/", limit=1)
    path = str(write_config(server.url, token.strip()))
    print(json.dumps({"url": server.url, "path": path}) if given.json else f"Stored in {path}.")
    return OK


def run(server: Fairway, given: argparse.Namespace) -> int:
    fields = job_fields(given)
    if given.code and not given.project:
        raise ValueError("--code needs --project, to which the code is uploaded")
    if given.file and fields:
        raise ValueError(f"-f excludes other fields: {', '.join(sorted(fields))}")
    key = given.idempotency_key
    if given.file:
        text = sys.stdin.read() if given.file == "-" else Path(given.file).read_text(encoding="utf-8")
        job = server.submit_yaml(text, idempotency_key=key)
    else:
        if given.code:
            fields["code_archive"] = server.upload_code(given.project, Path(given.code))
        job = server.submit_fields(fields, key)
    if given.logs:
        print(job.id, file=sys.stderr)
        write_log(given, job, follow=True)
        return _result(job.wait())
    if given.wait:
        job.wait()
    with contextlib.suppress(BrokenPipeError):  # the exit code tells how the job ended, as in wait
        print(json.dumps(job.data, indent=1) if given.json else job.id)
    return _result(job) if given.wait else OK


def list_jobs(server: Fairway, given: argparse.Namespace) -> int:
    filters = {"state": given.state, "project": given.project, "owner": given.owner}
    filters |= {"live": "true" if given.active else None, "limit": min(given.limit, MAX_PAGE)}
    rows = [job.data for job in itertools.islice(server.jobs(**filters), given.limit)]
    columns = ("id", "name", "kind", "state", "project.name", "owner.username", "total_milli", "submitted_at")
    return print_rows(given, rows, columns)


def status(server: Fairway, given: argparse.Namespace) -> int:
    job = server.job(given.job)
    shown = {name: job.data[name] for name in ("id", "name", "kind", "state", "message")}
    shown |= {"project": job.data["project"]["name"], "owner": job.data["owner"]["username"]}
    shown |= {name: job.data[name] for name in ("submitted_at", "started_at", "ended_at", "exit_code")}
    if signal := job.data.get("exit_signal"):
        shown["exit_code"] = f"{shown['exit_code']} ({signal})"
    return print_fields(given, job.data, shown | {"page": job.url})


def why(server: Fairway, given: argparse.Namespace) -> int:
    data = server.job(given.job).data
    verdict, interval = data["verdict"] or {}, data["interval"] or {}
    found = {"state": data["state"], "verdict": data["verdict"], "interval": data["interval"]}
    found |= {"interval_missing": data["interval_missing"]}
    shown = {"state": data["state"], "why": verdict.get("message") or data["message"]}
    if suggestion := verdict.get("suggestion"):
        shown["suggestion"] = suggestion.get("message")
    if interval:
        shown["expected"] = interval["p50_at"]
        shown["in 8 of 10 cases"] = f"{interval['p10_at']} to {interval['p90_at']}"
    elif data["state"] == "PENDING":
        shown["expected"] = data["interval_missing"] or "not calculated yet"
    if data["state"] == "PENDING" and not given.quick:
        found |= _start_alternatives(server, given, shown)
    return print_fields(given, found, shown)


def _start_alternatives(server: Fairway, given: argparse.Namespace, shown: dict[str, Any]) -> dict[str, Any]:
    """Add the changes with which the job would start sooner, or why there are none; make the one of ``--apply``."""
    try:
        answer: dict[str, Any] = server.get(f"jobs/{given.job}/alternatives/")
    except Refused as error:  # such as for a reader who may not change it
        shown["start sooner"] = str(error)
        return {}
    changes = answer["alternatives"]
    for number, each in enumerate(changes, start=1):
        start = "now" if each["starts_now"] else f"at {each['interval']['p50_at']}"
        shown[f"change {number}"] = f"{each['change']}: starts {start}"
    if not changes and answer["reason"]:
        shown["start sooner"] = answer["reason"]
    if given.apply is not None:
        if not 1 <= given.apply <= len(changes):
            raise FairwayError(f"There is no change {given.apply}; the job has {len(changes)}.")
        server.call("PATCH", f"jobs/{given.job}/", json.dumps(changes[given.apply - 1]["values"]))
        shown["applied"] = changes[given.apply - 1]["change"]
    return answer


def spec(server: Fairway, given: argparse.Namespace) -> int:
    return print_text(given, "yaml", server.job(given.job).spec())


def export(server: Fairway, given: argparse.Namespace) -> int:
    return print_text(given, "yaml", server.job(given.job).kubernetes(trainjob=given.trainjob))


def change_jobs(server: Fairway, given: argparse.Namespace) -> int:
    """Change one job or several, and wait until each is changed or refused."""
    if given.action == "stop" and len(given.jobs) == 1:  # repeatable, and right for a job that has ended
        job = server.job(given.jobs[0]).stop()
        return print_fields(
            given, job.data, {"id": job.id, "state": job.state, "message": job.data["message"]}
        )
    found = server.change_jobs(given.action, given.jobs)
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        rows = [
            each["job"] | {"result": "done" if each["changed"] else each["refusal"]}
            for each in found["results"]
        ]
        print_rows(given, rows, ("id", "name", "result"))
    return OK if found["changed"] == found["total"] else REFUSED


def show_logs(server: Fairway, given: argparse.Namespace) -> int:
    job = server.job(given.job)
    return write_log(given, job, follow=given.follow, rank=given.rank, tail=given.tail)


def wait(server: Fairway, given: argparse.Namespace) -> int:
    job = server.job(given.job).wait(given.seconds)
    with contextlib.suppress(BrokenPipeError):
        print_fields(given, job.data, {"id": job.id, "state": job.state, "message": job.data["message"]})
    return _result(job)


def open_workspace(server: Fairway, given: argparse.Namespace) -> int:
    found = server.call("POST", f"workspaces/{server.job(given.job).id}/open/", "{}")
    print(json.dumps(found) if given.json else found["page"])
    return OK


def open_ssh(server: Fairway, given: argparse.Namespace) -> int:
    words = ssh_command(server, given.job, given.rank, given.arguments)
    sys.stdout.flush()
    os.execvp(words[0], words)  # noqa: S606 - the user's own ssh


def print_ssh_config(server: Fairway, given: argparse.Namespace) -> int:
    return print_text(given, "config", config_block(server))


def run_ssh_proxy(server: Fairway, given: argparse.Namespace) -> int:
    proxy(server, given.host, sys.stdin.buffer, sys.stdout.buffer)
    return OK


def quota(server: Fairway, given: argparse.Namespace) -> int:
    columns = ("project.name", "pool.name", "guaranteed_milli", "limit_milli", "user_limit_milli", "weight")
    return print_rows(given, list(server.list("quotas/", limit=200)), columns)


def nodes(server: Fairway, given: argparse.Namespace) -> int:
    rows = list(server.list("nodes/", limit=200))
    for row in rows:
        counts = row["gpu_counts"]
        row["free_gpus"], row["held_gpus"], row["gpu_count"] = (
            counts["free"], counts["held"], counts["total"],
        )  # fmt: skip
    columns = ("name", "pool.name", "state", "reachable", "free_gpus", "held_gpus", "gpu_count")
    return print_rows(given, rows, columns)


def show_host_key(server: Fairway, given: argparse.Namespace) -> int:
    found = server.get(f"nodes/{given.node}/host-keys/")
    return print_fields(given, found, _host_key_fields(found))


def _host_key_fields(found: dict[str, Any]) -> dict[str, Any]:
    keys = {name: found[name] for name in ("known", "presented") if found[name]}
    shown = {"address": f"{found['host']}:{found['port']}"}
    shown |= {name: f"{key['fingerprint']} ({key['key_type']})" for name, key in keys.items()}
    changed = "yes" if found["changed"] else "no"
    return shown | {"changed": changed if found["presented"] else None, "problem": found["problem"]}


def confirm_key(server: Fairway, given: argparse.Namespace) -> int:
    found = server.get(f"nodes/{given.node}/host-keys/")
    fingerprint = given.fingerprint
    if not given.json:
        for name, value in _host_key_fields(found).items():
            if value:
                print(f"{name:9}  {clean(value)}", file=sys.stderr)
    if fingerprint is None and found["changed"]:
        fingerprint = _ask_for_fingerprint()
    body = {"fingerprint": fingerprint or (found["presented"] or found["known"])["fingerprint"]}
    return _follow_operation(server, given, "confirm-key", body | {"reason": given.reason})


def _ask_for_fingerprint() -> str:
    if not sys.stdin.isatty():
        raise ValueError("--fingerprint must name the presented key, as compared on the machine")
    command = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
    print(f"Compare the presented key on the machine: {command}", file=sys.stderr)
    print("Fingerprint as the machine shows it: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def print_setup_script(server: Fairway, given: argparse.Namespace) -> int:
    found = server.get(f"nodes/{given.node}/setup-script/", engine=given.engine)
    if given.json:
        print(json.dumps(found))
        return OK
    return write_bytes([found["script"].encode()])


def drain_node(server: Fairway, given: argparse.Namespace) -> int:
    own = dict(each.partition("=")[::2] for each in given.job)
    if wrong := next((job for job, choice in own.items() if choice not in DRAIN_CHOICES), None):
        raise ValueError(f"--job {wrong} needs one of {', '.join(DRAIN_CHOICES)} after =")
    found = server.get(f"nodes/{given.node}/drain-jobs/")
    on_terminal = sys.stdin.isatty() and not given.json
    if not given.json:
        for row in found["jobs"]:
            lost = f"{row['lost_gpu_seconds'] / 3600:.2g} GPU-h"
            words = (
                row["job"],
                row["name"],
                row["owner"],
                f"{row['gpu_milli'] / 1000:g} GPUs",
                f"loses {lost}",
            )
            print("  ".join(map(clean, words)), file=sys.stderr)
    jobs = given.jobs
    if jobs is None and on_terminal:
        jobs = input(f"What happens to {len(found['jobs'])} jobs ({', '.join(DRAIN_CHOICES)})? ").strip()
    if jobs not in DRAIN_CHOICES:
        raise ValueError(f"--jobs must be one of {', '.join(DRAIN_CHOICES)}")
    if on_terminal and not given.yes and input(f"Drain {given.node} ({jobs})? [y/N] ").strip().lower() != "y":
        print("Nothing was changed.", file=sys.stderr)
        return REFUSED
    body = {"jobs": jobs, "exceptions": own, "signal": given.signal, "reason": given.reason}
    node = server.call("POST", f"nodes/{given.node}/drain/", json.dumps(body), once=True)
    return print_fields(given, node, {name: node[name] for name in ("id", "name", "state")})


def uncordon_node(server: Fairway, given: argparse.Namespace) -> int:
    body = {"force": given.force, "reason": given.reason}
    node = server.call("POST", f"nodes/{given.node}/uncordon/", json.dumps(body), once=True)
    return print_fields(given, node, {name: node[name] for name in ("id", "name", "state", "operation")})


def rename_node(server: Fairway, given: argparse.Namespace) -> int:
    body = {"name": given.name, "reason": given.reason}
    found = server.call("POST", f"nodes/{given.node}/rename/", json.dumps(body), once=True)
    return print_fields(given, found, {name: found[name] for name in ("id", "name")})


def move_node(server: Fairway, given: argparse.Namespace) -> int:
    body = {"host": given.host, "reason": given.reason} | ({"port": given.port} if given.port else {})
    return _follow_operation(server, given, "move", body, once=True)


def _follow_operation(
    server: Fairway, given: argparse.Namespace, action: str, body: dict[str, Any], *, once: bool = False
) -> int:
    """Start an operation on a node, and print its steps until it has ended."""
    started = server.call("POST", f"nodes/{given.node}/{action}/", json.dumps(body), once=once)
    shown = 0
    while True:
        found = server.await_answer(f"nodes/{given.node}/operations/{started['id']}/")
        if not given.json:
            for step in found["steps"][shown:]:
                result = "ok" if step["ok"] else "skipped" if step.get("skipped") else "FAILED"
                print(f"{result:<7} {step['name']}: {clean(step['message'])}", flush=True)
            shown = len(found["steps"])
        if found["finished_at"]:
            break
        time.sleep(OPERATION_POLL_S)
    if given.json:
        print(json.dumps(found, indent=1))
    return OK if found["ok"] else REFUSED


def free(server: Fairway, given: argparse.Namespace) -> int:
    """Print how many GPUs of each model there are, and how many are in the state free; MIG slices by profile."""
    counts: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    for node in server.list("nodes/", limit=200):
        present = [gpu for gpu in node["gpus"] if gpu["present"]]
        kinds = [(gpu["model"], gpu.get("mig_profile") or "") for gpu in present]
        for kind in set(kinds):
            states = [gpu["state"] for gpu, other in zip(present, kinds) if other == kind]
            counts[kind].append([states.count("free"), len(states)])
    rows = [
        {
            "model": f"{model} MIG {profile}" if profile else model,
            "free": sum(each[0] for each in found),
            "gpus": sum(each[1] for each in found),
            "most_on_one_node": max(each[0] for each in found),
        }
        for (model, profile), found in sorted(counts.items())
    ]
    return print_rows(given, rows, ("model", "free", "gpus", "most_on_one_node"))


def templates(server: Fairway, given: argparse.Namespace) -> int:
    rows = list(server.list("templates/", limit=200))
    return print_rows(given, rows, ("name", "title", "kind", "version", "scope"))


def call_api(server: Fairway, given: argparse.Namespace) -> int:
    body = sys.stdin.read() if given.data == "-" else given.data
    found = server.call(given.method, given.path, body)
    if isinstance(found, str):
        content = found.encode("utf-8", "surrogateescape")
        if given.json:
            return print_text(given, "text", content.decode("utf-8", "replace"))
        return write_bytes([content])
    print(json.dumps(found, indent=1))
    return OK


def serve_mcp(server: Fairway, given: argparse.Namespace) -> int:
    if isinstance(sys.stdin, io.TextIOWrapper):
        with contextlib.suppress(io.UnsupportedOperation):  # it is being read
            sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 is answered, too
    McpServer(server, read_only=given.read_only, simulate=given.simulate).serve(sys.stdin, sys.stdout)
    return OK


# -- output --------------------------------------------------------------------------------------------


def _result(job: Job) -> int:
    return OK if job.state == "COMPLETED" else JOB_FAILED


def _fail(code: int, error: Exception) -> int:
    lines = [clean(line).rstrip() for line in f"fairway: {error}".split("\n")]
    if isinstance(error, Refused) and (nearest := error.details.get("nearest")):
        lines.append(f"  nearest possible request: {json.dumps(nearest)}")
    with contextlib.suppress(OSError):  # the exit code remains
        print("\n".join(lines), file=sys.stderr)
    if Parser.wants_json:
        print_error(code, error)
    return code
