"""The agent with the runtime ``process``, for real: starts, ends, limits, and everything that is refused."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.link import AgentError
from agents.node.runtimes.loopback_rules import chain_name
from agents.node.sampler import MIN_PAUSE_S, wait_until_phase_s
from agents.node.task_log import to_log_lines
from tests.agents.node.conftest import CLUSTER, GPUS, LoneNode, log_of, log_with, wait_for
from tests.firewall_chains import drop_chains
from tests.time_budget import budget_s
from tests.unkillable_process import missing_freezer, unkillable

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give tasks an account of their own")


def start(link: Any, spec: dict[str, Any], epoch: int = 1) -> dict[str, Any]:
    return link.request("start", timeout_s=20, epoch=epoch, spec=spec)


def refused(link: Any, verb: str, **fields: Any) -> AgentError:
    with pytest.raises(AgentError) as caught:
        link.request(verb, timeout_s=20, **fields)
    return caught.value


def eventually(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def alive(text: str) -> list[int]:
    """Processes that have a text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                text in (folder / "cmdline").read_text()
                and "Z" not in (folder / "stat").read_text().split()[2]
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_hello_describes_the_node(node: LoneNode) -> None:
    hello = node.open().hello
    assert [gpu.uuid for gpu in hello.gpus] == GPUS
    assert all(gpu.simulated for gpu in hello.gpus)
    assert hello.boot_id == "boot-1"
    assert abs(hello.clock_s - time.time()) < 5
    assert hello.runtimes[0][0] == "process"
    assert hello.memory_mib and hello.cpu_count and hello.disk_free_mib


@needs_root
def test_ports_of_a_task_are_closed_to_the_tasks_of_other_accounts(node: LoneNode) -> None:
    link = node.open()
    node.clean_up.append(lambda: [drop_chains(f"{ip}tables", [chain_name(CLUSTER)]) for ip in ("ip", "ip6")])
    assert link.hello.closes_ports == {"process": True}
    listen = """
import selectors, socket
waiting = selectors.DefaultSelector()
for place, family in (("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET), ("::1", socket.AF_INET6)):
    server = socket.create_server((place, 0), family=family)
    waiting.register(server, selectors.EVENT_READ)
    print("port", server.getsockname()[1], flush=True)
print("listening", flush=True)
while True:
    for key, _ in waiting.select():
        key.fileobj.accept()[0].close()
"""
    home = {"kind": "home", "target": "/home/ada", "read_only": False}
    server = ["python3", "-c", listen]
    start(link, node.spec("jserver2345", *server, mounts=[{**home, "source": "ada"}], digest="s"))
    text = log_with(link, "jserver2345", "listening")
    first, second, third = re.findall(r"port (\d+)", text)
    places = [
        ("127.0.0.1", first),
        ("127.77.0.1", second),
        (socket.gethostbyname(socket.gethostname()), second),
    ]
    places.append(("::1", third))
    connect = """
import socket, sys
for word in sys.argv[1:]:
    try:
        socket.create_connection(tuple(word.rsplit("-", 1)), 0.5).close()
        print("open", word, flush=True)
    except OSError as error:
        print("closed", word, flush=True)
print("end", flush=True)
"""
    words = ["-".join(place) for place in places]
    client = ["python3", "-c", connect, *words]
    answers = {}
    for job, name in (("jown23456", "ada"), ("jother2345", "bob")):
        start(link, node.spec(job, *client, user=name, mounts=[{**home, "source": name}], digest=job))
        answers[job] = log_with(link, job, "end")
    assert [f"open {word}" in answers["jown23456"] for word in words] == [True] * 4
    assert [f"closed {word}" in answers["jother2345"] for word in words] == [True] * 4
    for place in places:  # the gateway and its tunnel have other accounts
        socket.create_connection(place, 2).close()
    # after the end of all tasks, and after somebody removed the rules
    drop_chains("iptables", [chain_name(CLUSTER)])
    assert node.open().hello.closes_ports == {"process": True}
    start(link, node.spec("jlater2345", *client, user="eve", mounts=[{**home, "source": "eve"}], digest="l"))
    assert "open" not in log_with(link, "jlater2345", "end")


def test_the_agent_reports_whether_a_task_listens_on_its_ports(node: LoneNode) -> None:
    link = node.open()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    start(link, node.spec("jlisten", "python3", "-c", script))
    key = {"job": "jlisten", "attempt": 1, "task": 0}
    eventually(lambda: link.request("listening", timeout_s=5, **key, ports=[port])["listening"])
    assert not link.request("listening", timeout_s=5, **key, ports=[port, 1])["listening"]
    assert refused(link, "listening", **key, ports="all").code == "invalid_spec"
    assert refused(link, "listening", **key | {"task": 1}, ports=[1]).code == "no_such_container"


@needs_root
def test_a_task_has_its_own_account_gpus_secrets_and_home(node: LoneNode) -> None:
    link = node.open()
    script = (
        "echo uid $(id -u) groups $(id -G) name $(id -un) $(id -u root);"
        "echo gpus $CUDA_VISIBLE_DEVICES job $FAIRWAY_JOB port $PORT_8888 $1;"
        'cat "$FAIRWAY_SECRETS/token"; stat -c %a "$FAIRWAY_SECRETS/token"; echo x > ~/kept;'
        "grep NoNewPrivs /proc/self/status; ulimit -c; echo done"
    )
    spec = node.spec(
        "jown",
        "sh",
        "-c",
        script,
        "sh",
        "{port}",
        gpus=[{"uuid": GPUS[1], "milli": 500}],
        secret_files={"token": "s3cret\n"},
        ports=[8888],
        mounts=[{"kind": "home", "source": "ada", "target": "/home/ada"}],
        env={"CUDA_VISIBLE_DEVICES": "all"},
    )
    answer = start(link, spec)
    lines = log_with(link, "jown", "done").splitlines()
    port = answer["ports"]["8888"]
    uid = lines[0].split()[1]
    assert int(uid) >= 2_000_000_000 and lines[0].endswith(f"groups {uid} name {spec['user']} 0")
    assert lines[1] == f"gpus {GPUS[1]} job jown port {port} {port}"
    assert lines[2:6] == ["s3cret", "600", "NoNewPrivs:\t1", "0"]
    assert wait_for(link, "exited", job="jown")["exit_code"] == 0
    secrets = node.folder / f"state/tasks/fw-{CLUSTER}-jown-1-0/secrets"
    eventually(lambda: not secrets.exists())  # the end is told first, then cleaned up after
    # the home is handed on to the next job's account
    start(link, node.spec("jnext", "sh", "-c", "echo $(id -u) && cat ~/kept", mounts=spec["mounts"]))
    assert log_with(link, "jnext", "x\n").split()[0] != uid


def test_start_is_repeatable_and_guards_the_gpu(node: LoneNode) -> None:
    link = node.open()
    whole = [{"uuid": GPUS[0], "milli": 1000}]
    first = start(link, node.spec("ja", gpus=whole))
    again = start(link, node.spec("ja", gpus=whole))
    assert (first["already"], again["already"]) == (False, True)
    assert again["started_s"] == first["started_s"]
    assert refused(link, "start", epoch=1, spec=node.spec("jb", gpus=whole)).code == "gpu_overcommitted"
    other = node.spec("ja", gpus=whole, digest="d2")
    assert refused(link, "start", epoch=1, spec=other).code == "name_conflict"
    unknown = node.spec("jc", gpus=[{"uuid": "GPU-none", "milli": 1}])
    assert refused(link, "start", epoch=1, spec=unknown).code == "unknown_gpu"
    assert refused(link, "start", epoch=0, spec=node.spec("ja", gpus=whole)).code == "stale_epoch"
    assert refused(link, "start", epoch=1, spec=node.spec("jd", cluster="t2")).code == "invalid_spec"
    assert (
        refused(link, "start", epoch=1, spec=node.spec("jd", runtime="podman", image="x")).code
        == "invalid_spec"
    )
    assert len(link.request("list", timeout_s=10)["containers"]) == 1


def test_fractions_fill_a_gpu_and_no_more(node: LoneNode) -> None:
    link = node.open()
    for number, milli in enumerate((400, 600)):
        start(link, node.spec(f"j{number}", gpus=[{"uuid": GPUS[0], "milli": milli}]))
    one_more = node.spec("j9", gpus=[{"uuid": GPUS[0], "milli": 1}])
    assert refused(link, "start", epoch=1, spec=one_more).code == "gpu_overcommitted"
    link.request("stop", timeout_s=10, epoch=1, job="j0", attempt=1, grace_s=0)
    start(link, one_more)


def test_stop_terminates_then_forbids_later_starts(node: LoneNode) -> None:
    link = node.open()
    polite = "trap 'echo bye; exit 3' TERM; echo up; sleep 600 & wait"
    start(link, node.spec("jpolite", "sh", "-c", polite))
    log_with(link, "jpolite", "up")
    answer = link.request("stop", timeout_s=10, epoch=1, job="jpolite", attempt=1, grace_s=20)
    assert answer.get("stopping") or answer.get("gone")
    assert wait_for(link, "exited", job="jpolite")["exit_code"] == 3
    assert "bye" in log_of(link, "jpolite")
    assert link.request("stop", timeout_s=10, epoch=1, job="jpolite", attempt=1)["gone"] is True
    assert refused(link, "start", epoch=1, spec=node.spec("jpolite")).code == "tombstoned"


def test_stopping_one_task_does_not_affect_the_others(node: LoneNode) -> None:
    link = node.open()
    assert "stop.tasks" in link.hello.capabilities
    says = 'echo "$FAIRWAY_TASK/$FAIRWAY_TASKS/$FAIRWAY_TASKS_MIN/$FAIRWAY_TASKS_MAX"; sleep 600'
    bounds = {"tasks": 2, "tasks_min": 1, "tasks_max": 4}
    for number in (0, 1):
        start(link, node.spec("jgrows", "sh", "-c", says, task=number, gpus=[]) | bounds)
    log_with(link, "jgrows", "0/2/1/4")

    def stop() -> dict[str, Any]:
        return link.request("stop", timeout_s=10, epoch=1, job="jgrows", attempt=1, grace_s=1, tasks=[1])

    assert stop().get("stopping") or stop().get("gone")
    assert wait_for(link, "exited", job="jgrows")["task"] == 1
    assert [row["task"] for row in stop()["tasks"]] == [1]
    states = {row["task"]: row["state"] for row in link.request("list", timeout_s=10)["containers"]}
    assert states == {0: "running", 1: "exited"}
    late = node.spec("jgrows", "sleep", "600", task=1, gpus=[])
    assert refused(link, "start", epoch=1, spec=late).code in ("tombstoned", "name_conflict")
    never = node.spec("jgrows", "sleep", "600", task=7, gpus=[])
    link.request("stop", timeout_s=10, epoch=1, job="jgrows", attempt=1, tasks=[7])
    assert refused(link, "start", epoch=1, spec=never).code == "tombstoned"
    start(link, node.spec("jgrows", "sleep", "600", task=2, gpus=[]))
    for wrong in ([], "1", [True], [-1]):
        fields = {"epoch": 1, "job": "jgrows", "attempt": 1, "tasks": wrong}
        assert refused(link, "stop", **fields).code == "invalid_spec"


def test_a_stop_before_the_start_wins(node: LoneNode) -> None:
    link = node.open()
    assert link.request("stop", timeout_s=10, epoch=1, job="jearly", attempt=1)["gone"] is True
    assert refused(link, "start", epoch=1, spec=node.spec("jearly")).code == "tombstoned"
    start(link, node.spec("jearly", attempt=2))


@pytest.mark.skipif(missing_freezer() is not None, reason=missing_freezer() or "")
def test_a_task_that_cannot_be_killed_is_reported_and_does_not_block_the_agent(node: LoneNode) -> None:
    """Ten stops that wait would take all hands of the agent, and its link would break."""
    link = node.open()
    start(link, node.spec("jstuck", "sleep", "600", gpus=[{"uuid": GPUS[0], "milli": 1000}]))
    start(link, node.spec("jother", "sleep", "600", gpus=[{"uuid": GPUS[1], "milli": 1000}]))
    (path,) = node.folder.glob("state/tasks/*-jstuck-*/pid.json")

    def stop(job: str) -> dict[str, Any]:
        return link.request("stop", timeout_s=10, epoch=1, job=job, attempt=1, grace_s=0)

    with unkillable(json.loads(path.read_text())["pid"]):
        assert stop("jstuck")["stopping"] is True
        for _ in range(10):
            answer = stop("jstuck")
            assert answer["stopping"] is True and answer["stuck_s"] > 0.0
        assert stop("jother")["gone"] is True
        more = node.spec("jmore", "true", gpus=[{"uuid": GPUS[0], "milli": 1000}])
        assert refused(link, "start", epoch=1, spec=more).code == "gpu_overcommitted"
    wait_for(link, "exited", job="jstuck")
    assert stop("jstuck")["gone"] is True


def test_a_grace_period_ends_even_under_another_agent(node: LoneNode) -> None:
    first = node.open()
    start(first, node.spec("jdeaf", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"))
    log_with(first, "jdeaf", "up")
    first.request("stop", timeout_s=10, epoch=1, job="jdeaf", attempt=1, grace_s=1)
    os.kill(first.process_id, signal.SIGKILL)
    event = wait_for(node.open(), "exited", job="jdeaf")
    assert event["exit_code"] == 137
    assert not event["oom"]


def test_tasks_survive_agent_and_connection(node: LoneNode) -> None:
    first = node.open()
    start(first, node.spec("jlong", "sleep", "612.5"))
    os.kill(first.process_id, signal.SIGKILL)
    time.sleep(0.3)
    assert len(alive("612.5")) == 1
    second = node.open()
    (row,) = second.request("list", timeout_s=10)["containers"]
    assert (row["state"], row["exit_code"]) == ("running", None)
    os.kill(alive("612.5")[0], signal.SIGTERM)
    asked_s = time.time()
    event = wait_for(second, "exited", job="jlong")
    assert event["exit_code"] == 128 + signal.SIGTERM
    assert time.time() - asked_s < budget_s(2)


def test_an_exit_is_reported_within_a_fifth_of_a_second(node: LoneNode) -> None:
    link = node.open()
    delays = []
    for number in range(5):
        start(link, node.spec(f"jq{number}", "sh", "-c", "sleep 0.3; exit 7"))
        event = wait_for(link, "exited", job=f"jq{number}")
        assert event["exit_code"] == 7
        delays.append(time.time() - event["ended_s"])
    assert min(delays) < 0.2  # this machine may be busy with other tests


def test_processes_left_by_a_task_end_with_it(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jfork", "sh", "-c", "setsid sleep 613.25 & sleep 0.2; exit 0"))
    wait_for(link, "exited", job="jfork")
    eventually(lambda: alive("613.25") == [])


def test_a_missing_command_is_named_in_the_log(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jtypo", "pyhton", "train.py"))
    assert wait_for(link, "exited", job="jtypo")["exit_code"] == 127
    assert log_of(link, "jtypo") == "fairway: pyhton: not found\n"


def test_tasks_survive_the_shim_server_which_is_replaced(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jkept", "sh", "-c", "sleep 615.25; true"))
    eventually(lambda: len(alive("615.25")) == 2)
    server = parent_of(parent_of(min(alive("615.25"))))
    assert server in alive(str(node.pyz))
    os.kill(server, signal.SIGKILL)
    eventually(lambda: server not in alive(str(node.pyz)))
    start(link, node.spec("jnext", "sh", "-c", "exit 3"))
    assert wait_for(link, "exited", job="jnext")["exit_code"] == 3
    assert len(alive("615.25")) == 2


def test_shims_survive_the_agent_and_their_server_does_not(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jagent", "sh", "-c", "sleep 616.25; true"))
    eventually(lambda: len(alive("616.25")) == 2)
    shim = parent_of(min(alive("616.25")))
    server = parent_of(shim)
    assert link.process_id is not None
    os.kill(link.process_id, signal.SIGKILL)
    eventually(lambda: server not in alive(str(node.pyz)))
    assert shim in alive(str(node.pyz)) and len(alive("616.25")) == 2
    states = {each["job"]: each["state"] for each in node.open().request("list", timeout_s=10)["containers"]}
    assert states["jagent"] == "running"


def test_a_task_ends_with_its_shim(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jshim", "sh", "-c", "sleep 614.25; true"))
    eventually(lambda: len(alive("614.25")) == 2)
    os.kill(parent_of(min(alive("614.25"))), signal.SIGKILL)
    event = wait_for(link, "exited", job="jshim")
    assert event["exit_code"] is None
    eventually(lambda: alive("614.25") == [])


@needs_root
def test_out_of_memory_is_recognised(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("joom", "sh", "-c", "head -c 400000000 /dev/zero | tail; exit 9"))
    event = wait_for(link, "exited", job="joom")
    assert event["oom"] is True
    assert event["peak_memory_mib"] >= 60


def test_logs_are_read_by_offset(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jlog", "sh", "-c", "printf 0123456789; sleep 0.5; printf abc"))
    log_with(link, "jlog", "0123456789")
    where = {"job": "jlog", "attempt": 1, "task": 0}
    begun = base64.b64decode(link.request("logs", timeout_s=10, offset=0, **where)["data_b64"])
    assert begun.endswith(b" stdout P 0123456789\n")
    part = link.request("logs", timeout_s=10, offset=4, limit=3, **where)
    assert (base64.b64decode(part["data_b64"]), part["next_offset"], part["eof"]) == (begun[4:7], 7, False)
    wait_for(link, "exited", job="jlog")
    part = link.request("logs", timeout_s=10, offset=len(begun), **where)
    assert base64.b64decode(part["data_b64"]).endswith(b" stdout P abc\n")
    assert (part["next_offset"], part["eof"]) == (part["size"], True)
    link.request("remove", timeout_s=10, epoch=1, job="jlog", attempt=1)
    assert refused(link, "logs", offset=0, **where).code == "no_such_container"
    assert refused(link, "start", epoch=1, spec=node.spec("jlog")).code == "tombstoned"


def test_a_log_is_cut_at_its_size_and_the_task_continues(node: LoneNode) -> None:
    node.configure(max_log_mib=1)
    link = node.open()
    noise = "import sys; [sys.stdout.write('x' * 1023 + chr(10)) for _ in range(3000)]; open('done', 'w')"
    start(link, node.spec("jloud", "python3", "-c", noise))
    assert wait_for(link, "exited", job="jloud")["exit_code"] == 0
    where = {"job": "jloud", "attempt": 1, "task": 0}
    size = link.request("logs", timeout_s=10, offset=0, **where)["size"]
    assert (1 << 20) - 128 * 1024 < size < (1 << 20) + 512
    last = link.request("logs", timeout_s=10, offset=size - 200_000, **where)
    *kept, cut, dropped = base64.b64decode(last["data_b64"]).decode().splitlines()
    assert cut.endswith(" stdout F fairway: log truncated at 1 MiB; further output is discarded.")
    reported = re.fullmatch(r"\S+ stdout F fairway: (\d+) bytes were dropped here\.", dropped)
    assert reported, dropped
    head = kept[-1].index("x")
    assert (size - len(cut) - len(dropped) - 2) // (head + 1024) == 3000 - int(reported[1]) // 1024


def test_output_and_errors_are_kept_apart(node: LoneNode) -> None:
    link = node.open()
    script = "echo one; echo two >&2; sleep 0.2; printf 'th'; sleep 0.2; printf 'ree' >&2; echo ' four'; echo end >&2"
    start(link, node.spec("jtwo", "sh", "-c", script))
    wait_for(link, "exited", job="jtwo")
    answer = link.request("logs", timeout_s=10, job="jtwo", attempt=1, task=0, offset=0)
    rows = [line.split(" ", 3)[1:] for line in base64.b64decode(answer["data_b64"]).decode().splitlines()]
    said = {stream: [row for row in rows if row[0] == stream] for stream in ("stdout", "stderr")}
    assert said["stdout"] == [["stdout", "F", "one"], ["stdout", "P", "th"], ["stdout", "F", " four"]]
    assert ["stderr", "F", "two"] in said["stderr"]
    assert "".join(row[2] for row in said["stderr"]) == "tworeeend"


@given(
    st.lists(
        st.tuples(st.sampled_from([b"stdout", b"stderr"]), st.binary(min_size=1, max_size=60)), max_size=12
    )
)
def test_each_stream_is_read_back_unchanged(said) -> None:
    log = b"".join(to_log_lines(stream, data, 1_700_000_000_123_456_789) for stream, data in said)
    again: dict[bytes, bytes] = {}
    for line in log.split(b"\n")[:-1]:
        at, stream, mark, words = line.split(b" ", 3)
        assert at == b"2023-11-14T22:13:20.123456789+00:00"
        again[stream] = again.get(stream, b"") + words + (b"\n" if mark == b"F" else b"")
    reported: dict[bytes, bytes] = {}
    for stream, data in said:
        reported[stream] = reported.get(stream, b"") + data
    assert again == reported


def test_no_task_runs_after_a_reboot(node: LoneNode) -> None:
    first = node.open()
    start(first, node.spec("jboot", "sleep", "615.25", gpus=[{"uuid": GPUS[0], "milli": 1000}]))
    first.close()
    node.boot_id_path.write_text("boot-2\n")
    second = node.open()
    assert alive("615.25") == []
    (row,) = second.request("list", timeout_s=10)["containers"]
    assert (row["state"], row["rebooted"]) == ("exited", True)
    start(second, node.spec("jnew", gpus=[{"uuid": GPUS[0], "milli": 1000}]))


def test_a_gpu_fault_is_reported_live(node: LoneNode) -> None:
    link = node.open()
    rows = [{"uuid": GPUS[0], "health": "lost"}, {"uuid": GPUS[1]}, {"uuid": GPUS[2]}]
    time.sleep(1.2)  # the watch has seen them well
    node.write_gpus(rows)
    events = {wait_for(link, "gpu_health", timeout_s=4)["uuid"] for _ in range(2)}
    assert events == {GPUS[0], GPUS[3]}
    for uuid in (GPUS[0], GPUS[3]):
        spec = node.spec("jill", gpus=[{"uuid": uuid, "milli": 1000}])
        assert refused(link, "start", epoch=1, spec=spec).code == "unknown_gpu"


def test_samples_arrive_every_second(node: LoneNode) -> None:
    control = node.open()
    start(
        control,
        node.spec("jbusy", "sh", "-c", "while :; do :; done", gpus=[{"uuid": GPUS[0], "milli": 1000}]),
    )
    watch = node.open("watch")
    watch.request("stats", timeout_s=10)
    wait_for(watch, "sample")
    sample = wait_for(watch, "sample")
    (task,) = sample["tasks"]
    assert task["job"] == "jbusy" and task["cpu_percent"] > 1 and task["memory_mib"] is not None
    assert sample["gpus"][0]["utilisation_percent"] > 50
    assert sample["gpus"][1]["utilisation_percent"] == 0
    assert sample["cpu_percent"] is not None


def test_samples_are_taken_only_on_request(node: LoneNode) -> None:
    watch = node.open("watch")
    for nonsense in (1, -0.1, "0.5", True):
        assert refused(watch, "stats", phase_s=nonsense).code == "invalid_spec"
    phase_s = (time.time() + 0.5) % 1.0
    watch.request("stats", timeout_s=10, phase_s=phase_s)
    wait_for(watch, "sample")  # the first comes at once
    assert (wait_for(watch, "sample")["at_s"] - phase_s) % 1.0 < 0.5


@given(phase_s=st.floats(0, 1, exclude_max=True), now_s=st.floats(1e9, 2e9))
def test_the_wait_ends_at_the_moment_wanted(phase_s: float, now_s: float) -> None:
    wait_s = wait_until_phase_s(phase_s, now_s)
    assert MIN_PAUSE_S <= wait_s <= 1 + MIN_PAUSE_S
    missed_s = (now_s + wait_s - phase_s) % 1.0
    assert min(missed_s, 1 - missed_s) < 1e-5


def test_a_disk_below_its_minimum_takes_no_work(node: LoneNode) -> None:
    node.write_settings(min_free_disk_mib=10**9)
    refusal = refused(node.open(), "start", epoch=1, spec=node.spec("jfull"))
    assert refusal.code == "disk_full"
    assert "MiB left" in refusal.message


def test_mounts_only_from_lent_folders(node: LoneNode) -> None:
    mount = {"kind": "host_path", "source": "/etc", "target": "/mnt"}
    assert (
        "allows for jobs"
        in refused(node.open(), "start", epoch=1, spec=node.spec("jm", mounts=[mount])).message
    )


def test_roles_are_bounded_by_the_key(node: LoneNode) -> None:
    watch = node.open("watch")
    assert refused(watch, "start", epoch=1, spec=node.spec("ja")).code == "forbidden"
    assert refused(watch, "stop", epoch=1, job="ja", attempt=1).code == "forbidden"
    assert refused(node.open("bulk"), "start", epoch=1, spec=node.spec("ja")).code == "forbidden"
    assert refused(node.open(), "dance").code == "unknown_verb"


def test_another_cluster_is_refused(node: LoneNode) -> None:
    with pytest.raises(AgentError) as caught:
        node.open(cluster="t2")
    assert caught.value.code == "forbidden"


def test_the_agent_stays_small(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jsmall", "sleep", "1"))
    link.request("stats", timeout_s=10)
    wait_for(link, "sample")
    status = Path(f"/proc/{link.process_id}/status").read_text()
    resident_kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    assert resident_kib < 40 * 1024


def test_a_hundred_concurrent_repeats_start_one_task(node: LoneNode) -> None:
    links = [node.open() for _ in range(3)]
    spec = node.spec("jrace", "sh", "-c", "echo started; sleep 600", gpus=[{"uuid": GPUS[0], "milli": 1000}])
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: start(links[number % 3], spec), range(30)))
    assert sum(not answer["already"] for answer in answers) == 1
    assert log_with(links[0], "jrace", "started").count("started") == 1
