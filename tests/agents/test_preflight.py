"""The all-reduce before a command, run as its tasks run it: a Python without torch uses sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agents.launchers import GangShape, LaunchSpec, RendezvousPoint, equal_members
from agents.launchers.preflight import with_all_reduce
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER
from tests.rig.needs import missing_for_rig

# Every connection to port 40000 that starts before anyone listens can get 40000 as its own port.
TWO_LOCAL_PORTS = "ip link set lo up; echo 40000 40001 >/proc/sys/net/ipv4/ip_local_port_range; "
RANK_1_FIRST = (
    TWO_LOCAL_PORTS + '"$0" "$1" 127.0.0.1 40000 1 2 20 & sleep 2; "$0" "$1" 127.0.0.1 40000 0 2 20; wait $!'
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run_ranks(
    folder: Path, tasks: int, ranks: range, limit_s: int, port: int = 0
) -> list[subprocess.CompletedProcess[str]]:
    port = port or free_port()
    gang = GangShape(equal_members(tasks, 0), RendezvousPoint("127.0.0.1", port))
    launches = [with_all_reduce(LaunchSpec(("echo", "the command")), gang, rank, limit_s) for rank in ranks]
    for name, file in launches[0].files.items():
        (folder / name).write_text(file.content)
    programs = []
    for launch in launches:
        words = [word.replace(SECRETS_PLACEHOLDER, str(folder)) for word in launch.command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        programs.append(
            subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={"FAIRWAY_SECRETS": str(folder), "PATH": path},
            )
        )  # fmt: skip
    outputs = [each.communicate(timeout=60) for each in programs]
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *output)
        for each, output in zip(programs, outputs, strict=True)
    ]


def test_commands_run_after_the_all_reduce(tmp_path: Path) -> None:
    first, *others = run_ranks(tmp_path, 3, range(3), 30)
    assert first.stdout.startswith("fairway: all-reduce of 3 tasks by sockets in ")
    assert all(each.stdout.endswith("the command\n") for each in (first, *others))


def test_connections_of_other_programs_are_ignored(tmp_path: Path) -> None:
    port, closed, over = free_port(), threading.Event(), threading.Event()

    def interfere() -> None:
        """Listen first and close the connection, then connect and send nothing."""
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()[0].close()
        closed.set()
        with contextlib.ExitStack() as streams:
            while not over.is_set():
                with contextlib.suppress(ConnectionError):
                    here = ("127.0.0.1", 0)  # bound before, so that it never connects to itself
                    streams.enter_context(socket.create_connection(("127.0.0.1", port), 5, here))
                    over.wait(60)
                over.wait(0.05)

    thread = threading.Thread(target=interfere)
    thread.start()
    try:
        while not closed.is_set():
            (last,) = run_ranks(tmp_path, 2, range(1, 2), 2, port)
            assert last.returncode == 1
        first, last = run_ranks(tmp_path, 2, range(2), 30, port)
    finally:
        over.set()
        thread.join()
    assert first.stdout.startswith("fairway: all-reduce of 2 tasks by sockets in ")
    assert last.stdout == "the command\n"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (range(1), "failed on rank 0: no answer within 1 s while waiting for rank 1"),
        (range(1, 2), "failed on rank 1: no answer within 1 s while connecting to rank 0 at 127.0.0.1 port"),
    ],
)
def test_a_missing_task_is_named_and_the_command_does_not_run(
    tmp_path: Path, ranks: range, message: str
) -> None:
    (done,) = run_ranks(tmp_path, 2, ranks, 1)
    assert done.returncode == 1 and message in done.stderr
    assert done.stdout == ""


def test_single_task_and_elastic_jobs_have_no_all_reduce() -> None:
    launch = LaunchSpec(("train",))
    meeting = RendezvousPoint("10.0.0.1", 32000)
    for gang in (
        GangShape(equal_members(1, 1), meeting),
        GangShape(equal_members(2, 1), meeting, min_tasks=1, max_tasks=2),
        GangShape(equal_members(2, 1)),
    ):
        assert with_all_reduce(launch, gang, 0, 30) is launch


@pytest.mark.rig
def test_a_task_that_connected_to_itself_retries(tmp_path: Path) -> None:
    reason = missing_for_rig()
    if reason:
        pytest.skip(reason)
    gang = GangShape(equal_members(2, 0), RendezvousPoint("127.0.0.1", 40000))
    program = tmp_path / "all_reduce.py"
    program.write_text(with_all_reduce(LaunchSpec(("true",)), gang, 0, 20).files[program.name].content)
    words = ["unshare", "--net", "sh", "-c", RANK_1_FIRST, sys.executable, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fairway: all-reduce of 2 tasks by sockets in ")
