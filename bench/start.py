"""Time from submission to RUNNING on an idle SSH node, beside a manual create and start over an open session.

    python -m bench start [--jobs N] [--within SECONDS] [--verbose]

A complete Fairway (``manage.py up``) with a rig node of podman that has the image; jobs are submitted one by
one over REST. After each job, the same podman arguments that created its container are run in a root shell
that stays open over SSH. The difference is the cost of Fairway. Needs what the rig needs (root, podman,
sshd).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report import percentile, print_figure

POLL_INTERVAL_S = 0.01
MEDIAN_TARGET_MS, P95_TARGET_MS = 200.0, 500.0
MANUAL_ROOT = "/var/lib/hand"


def main(arguments: list[str]) -> int:
    """Print the lines of median and p95, and the breakdown of our time."""
    parser = argparse.ArgumentParser(prog="bench start")
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--within", type=float, default=600.0, help="start no job after this many seconds")
    parser.add_argument("--verbose", action="store_true", help="print a line per job on stderr")
    wanted = parser.parse_args(arguments)
    from tests.rig.needs import missing_for_rig

    reason = missing_for_rig()
    if reason is not None:
        print_figure("submit_to_running", skipped=reason)
        return 0
    _measure(wanted.jobs, time.monotonic() + wanted.within, wanted.verbose)
    return 0


def _measure(jobs: int, until_s: float, verbose: bool) -> None:
    from tests.rig.images import rig_image
    from tests.rig.rig import Rig
    from tests.stories.portal import StoryPortal

    image = rig_image("tiny")
    with Rig(1, image_stores=[image.store]) as rig, StoryPortal("--no-local-node") as portal:
        machine = rig.nodes[0]
        token = prepare_nodes(portal, [machine], image.name)
        with root_shell(machine) as shell, client_of(portal.url, token) as client:
            _run_one(client, shell, machine, "warm")  # warm-up: imports, connections and caches
            rows: list[dict[str, float]] = []
            for number in range(jobs):
                if rows and time.monotonic() > until_s:
                    break  # on a slow machine fewer jobs are measured; their number is reported
                row = _run_one(client, shell, machine, f"{number}")
                rows.append(row)
                if verbose:
                    print(json.dumps(row), file=sys.stderr, flush=True)
    _print_rows(rows)


def _print_rows(rows: list[dict[str, float]]) -> None:
    load = round(os.getloadavg()[0], 1)
    for name, at, target_ms in (("median", 0.5, MEDIAN_TARGET_MS), ("p95", 0.95, P95_TARGET_MS)):
        ours = percentile([row["ours_ms"] for row in rows], at)
        hand = percentile([row["hand_ms"] for row in rows], at)
        more = percentile([row["ours_ms"] - row["hand_ms"] for row in rows], at)
        print_figure(
            f"submit_to_running_{name}",
            ours=round(ours, 1),
            reference=round(hand, 1),
            ratio=round(ours / hand, 2),
            unit="ms",
            target=f"at most {target_ms:.0f} ms more than a manual start",
            met=more <= target_ms,
            more_ms=round(more, 1),
            jobs=len(rows),
            load_average=load,
        )
    steps = [name for name in rows[0] if name not in {"ours_ms", "hand_ms"}]
    print_figure(
        "submit_to_running_steps",
        ours={name: round(statistics.median(row[name] for row in rows), 1) for name in steps},
        unit="ms",
        load_average=load,
    )


# -- one job ---------------------------------------------------------------------------------------


def _run_one(client: Any, shell: RootShell, machine: Any, name: str) -> dict[str, float]:
    from portal.models import Attempt, Cycle, Job, JobEvent

    request = {
        "name": f"start-{name}",
        "project": "default",
        "environment": "bench",
        "command": ["sleep", "600"],
        "gpus_per_task": 1,
        "memory_mib": 256,
        "termination_grace_s": 1,
    }
    began_at, began = time.time(), time.perf_counter()
    answer = client.post("/jobs/", json=request)
    acknowledged = time.perf_counter()
    assert answer.status_code == 201, answer.text
    job = answer.json()["id"]
    rows = Job.objects.filter(public_id=job)
    tries = Attempt.objects.filter(job__public_id=job)
    # a job is RUNNING as soon as it holds GPUs, its attempt later
    while not tries.filter(state="RUNNING").exists():
        if time.perf_counter() - began > 60:
            raise SystemExit(f"job {job} does not start:\n{_timeline(job)}")
        time.sleep(POLL_INTERVAL_S)
    running = time.perf_counter()
    attempt = tries.get()
    assert attempt.start_sent_at is not None and attempt.running_at is not None  # set, since it is RUNNING
    submitted_at = JobEvent.objects.get(job__public_id=job, kind="submitted").at.timestamp()
    cycle = Cycle.objects.filter(started_at__lte=attempt.created_at).latest("started_at")
    by_hand_s, network_s = _start_manually(shell, machine, job)
    client.post(f"/jobs/{job}/cancel/")
    deadline_s = time.monotonic() + 30
    while rows.values_list("state", flat=True).get() != "CANCELLED" and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(1.0)  # until its container and network are removed and the node is idle
    at = began_at
    return {
        "ours_ms": (running - began) * 1000,
        "hand_ms": by_hand_s * 1000,
        "to_submitted": (submitted_at - at) * 1000,
        "to_acknowledged": (acknowledged - began) * 1000,
        "submitted_to_cycle": (cycle.started_at.timestamp() - submitted_at) * 1000,
        "cycle_to_attempt": (attempt.created_at.timestamp() - cycle.started_at.timestamp()) * 1000,
        "snapshot": cycle.snapshot_ms,
        "decide": cycle.decide_ms,
        "attempt_to_sent": (attempt.start_sent_at - attempt.created_at).total_seconds() * 1000,
        "network_by_hand": network_s * 1000,
        "sent_to_running": (attempt.running_at - attempt.start_sent_at).total_seconds() * 1000,
    }


def _timeline(job: str) -> str:
    from portal.models import JobEvent

    events = JobEvent.objects.filter(job__public_id=job).order_by("pk")
    return "\n".join(f"{event.at:%T.%f} {event.before}>{event.after} {event.message}" for event in events)


def _start_manually(shell: RootShell, machine: Any, job: str) -> tuple[float, float]:
    """Return seconds of podman's create and start with this job's arguments under other names.

    The second figure is the time for a separate network, which every job has and a manual start would not.
    """
    name = machine.podman(
        "ps", "--all", "--filter", f"label=fairway.job={job}", "--format", "{{.Names}}"
    ).strip()
    if not name:
        raise SystemExit(f"job {job} has no container:\n{_timeline(job)}")
    words = json.loads(machine.podman("inspect", "--format", "{{json .Config.CreateCommand}}", name))
    folder = f"{MANUAL_ROOT}/{job}"  # without the name, which is replaced below
    pid_file = words[words.index("--pidfile") + 1]
    task_folder = str(Path(pid_file).parent)
    shell.run(f"mkdir -p {MANUAL_ROOT} && cp -a {shlex.quote(task_folder)} {folder}")
    mine = [
        word.replace(task_folder, folder)
        .replace("fairway.", "hand.", 1 if words[index - 1] == "--label" else 0)
        .replace(name, f"hand-{job}")
        for index, word in enumerate(words)
    ]
    mine[mine.index("--network") + 1] = "hand"
    mine = [
        f"path={folder}/log" if word.startswith("path=") and mine[index - 1] == "--log-opt" else word
        for index, word in enumerate(mine)
    ]
    # values of variables are in no argument list: their file was removed after the container was created
    reported = json.loads(machine.podman("inspect", "--format", "{{json .Config.Env}}", name))
    variables = "".join(f"{each}\n" for each in reported if "\n" not in each)
    shell.run(f"printf %s {shlex.quote(variables)} > {mine[mine.index('--env-file') + 1]}")
    create = shlex.join(mine)
    began = time.perf_counter()
    shell.run(f"{create} && podman start hand-{job}")
    took_s = time.perf_counter() - began
    began = time.perf_counter()
    shell.run(f"podman network create --driver bridge --disable-dns --opt isolate=true hand-{job}")
    network_s = time.perf_counter() - began
    shell.run(f"podman rm --force --time 0 hand-{job} && podman network rm hand-{job} && rm -rf {folder}")
    return took_s, network_s


# -- environment ---------------------------------------------------------------------------------------


def enter_portal(portal: Any) -> Any:
    """Set Django up on the database of a running Fairway; return its first administrator."""
    from portal.config import data_paths

    data = portal.folder / "data"
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "portal.config.settings",
        "FAIRWAY_DATA_DIR": str(data),
        "DATABASE_URL": data_paths.database_url(data),
        "REDIS_URL": data_paths.redis_url(data),
    }
    import logging

    import django

    django.setup()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from portal.models import User

    return User.objects.get(is_admin=True)


def prepare_nodes(portal: Any, machines: list[Any], image: str) -> str:
    """Add the machines as nodes of this Fairway; return an API token of its first administrator."""
    admin = enter_portal(portal)
    from portal.models import Environment, Node
    from portal.services.accounts.tokens import Scope, do_create_token
    from portal.services.nodes.enrolment import get_script
    from portal.services.nodes.nodes import do_create_node, do_create_pool

    pool = do_create_pool(admin, "bench")
    for machine in machines:
        machine.execute("sh", "-s", text_in=get_script(machine.address), timeout_s=120)
        do_create_node(
            admin,
            name=machine.name,
            pool=pool,
            host=machine.address,
            port=machine.port,
            host_key=machine.host_key(),
        )
    Environment.objects.create(name="bench", title="Bench", runtime="podman", image=image)
    deadline_s = time.monotonic() + 60
    while Node.objects.filter(state="ready", reachable=True).count() < len(machines):
        if time.monotonic() > deadline_s:
            raise SystemExit("a node does not become ready:\n" + portal.tail())
        time.sleep(0.2)
    time.sleep(3)  # wait for the first reconciliation and the first samples
    return do_create_token(admin, name="bench", scopes=list(Scope))[1]


@contextlib.contextmanager
def client_of(url: str, token: str) -> Iterator[Any]:
    import httpx

    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url + "/api/v1", headers=headers, timeout=20) as client:
        yield client


class RootShell:
    """A root shell on the node over an open SSH session."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._heard = b""

    def run(self, command: str) -> str:
        """Run a command and return its output; raise when it fails."""
        mark = f"done-{secrets.token_hex(4)}"
        self._channel.sendall(f"{{ {command}\n}} 2>&1; code=$?; echo; echo {mark} $code\n".encode())
        end = f"\n{mark} ".encode()
        while end not in self._heard or not self._heard.endswith(b"\n"):
            got = self._channel.recv(65536)
            if not got:
                raise SystemExit("the SSH session has ended")
            self._heard += got
        said, _, code = self._heard.partition(end)
        self._heard = b""
        if code.strip() != b"0":
            raise SystemExit(f"{command}\n{said.decode()}")
        return said.decode()


@contextlib.contextmanager
def root_shell(machine: Any) -> Iterator[RootShell]:
    import paramiko

    password = secrets.token_urlsafe(12)
    machine.add_admin("hand", password)
    with paramiko.SSHClient() as ssh:
        ssh.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        ssh.connect(
            machine.address,
            machine.port,
            "hand",
            password,
            look_for_keys=False,
            allow_agent=False,
        )
        channel = ssh.get_transport().open_session()
        channel.exec_command("sudo -S -p '' sh")
        channel.sendall(f"{password}\n".encode())
        shell = RootShell(channel)
        shell.run("podman network create --driver bridge --disable-dns --opt isolate=true hand")
        yield shell
