"""The agent with real podman: what a container is given, what it cannot reach, and what survives."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import time
import urllib.request
import zipfile
from typing import Any

import pytest

from agents.link import AgentError, Link
from tests.agents.node.conftest import CLUSTER, GPUS, LoneNode, log_with, wait_for
from tests.rig.images import RigImage
from tests.time_budget import budget_s

pytestmark = pytest.mark.rig

INSIDE = """
import json, os, re, socket
DECLARED = re.compile("/home|/run/f")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def reach(host, port):
    try:
        socket.create_connection((host, port), 1).close()
        return "open"
    except OSError as error:
        return type(error).__name__
print(json.dumps({
    "uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(), "host": socket.gethostname(),
    "caps": [status["CapEff"].strip(), status["CapBnd"].strip()], "nnp": status["NoNewPrivs"].strip(),
    "seccomp": status["Seccomp"].strip(), "env": dict(os.environ),
    "home": os.access(os.environ["HOME"], os.W_OK),
    "secret": open("/run/fairway/token").read(), "mode": oct(os.stat("/run/fairway/token").st_mode & 0o777),
    "mounts": [line.split()[4:6] for line in open("/proc/self/mountinfo") if DECLARED.match(line.split()[4])],
    "metadata": reach("169.254.169.254", 80), "gateway": reach(GATEWAY, 22), "other": reach(OTHER, 8888),
    "loopback": reach("127.77.0.1", PORT), "gateway_port": reach(GATEWAY, PORT),
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
}), flush=True)
"""


def start(link: Link, node: LoneNode, job: str, *command: str, **more: Any) -> dict[str, Any]:
    spec = node.spec(job, *command, runtime="podman", image=node.image, **more)  # type: ignore[attr-defined]
    return link.request("start", timeout_s=30, epoch=1, spec=spec)


def test_a_container_has_its_settings_and_is_isolated(podman_node: LoneNode) -> None:
    node = podman_node
    link = node.open()
    serve = (
        "import http.server as s; s.HTTPServer(('0.0.0.0', 8888), s.SimpleHTTPRequestHandler).serve_forever()"
    )
    first = start(link, node, "jserve", "python3", "-c", serve, ports=[8888])
    port = first["ports"]["8888"]
    address = node.podman(  # type: ignore[attr-defined]
        "inspect",
        "-f",
        "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.Gateway}}{{end}}",
        first["container"],
    ).stdout.split()
    gateway = address[1]
    script = (
        INSIDE.replace("PORT", str(port)).replace("GATEWAY", repr(gateway)).replace("OTHER", repr(address[0]))
    )
    started_s = time.time()
    answer = start(
        link,
        node,
        "jlook",
        "python3",
        "-c",
        script,
        gpus=[{"uuid": GPUS[2], "milli": 1000}],
        secret_files={"token": "s3cret"},
        mounts=[{"kind": "home", "source": "ada", "target": "/home/ada"}],
        shm_mib=16,
        cpu_milli=500,
    )
    assert answer["state"] == "running" and abs(answer["started_s"] - started_s) < 5
    seen = json.loads(log_with(link, "jlook", "}\n"))
    assert (seen["uid"], seen["gid"], seen["groups"], seen["host"]) == (2001, 2001, [2001], "jlook")
    assert {int(caps, 16) for caps in seen["caps"]} == {0}
    assert (seen["nnp"], seen["seccomp"]) == ("1", "2")
    assert (seen["secret"], seen["mode"], seen["home"]) == ("s3cret", "0o600", True)
    assert seen["env"]["CUDA_VISIBLE_DEVICES"] == seen["env"]["NVIDIA_VISIBLE_DEVICES"] == GPUS[2]
    assert seen["shm"] == 16 << 20
    mounts = dict(seen["mounts"])
    assert {
        "/home/ada",
        "/run/fairway",
        "/run/fairway-checkpoint",
        "/run/fairway-metric",
        "/run/fairway-code",
        "/run/fairway-progress",
    } == set(mounts)
    assert all("nosuid" in options and "nodev" in options for options in mounts.values())
    places = ("metadata", "gateway", "other", "loopback", "gateway_port")
    assert {seen[place] for place in places} <= {"ConnectionRefusedError", "TimeoutError"}
    assert urllib.request.urlopen(f"http://127.77.0.1:{port}/", timeout=5).status == 200
    assert wait_for(link, "exited", job="jlook")["exit_code"] == 0
    (row,) = [row for row in link.request("list", timeout_s=20)["containers"] if row["job"] == "jserve"]
    assert row["state"] == "running" and row["ports"] == {"8888": port}


def test_code_is_unpacked_into_a_container_as_its_account(podman_node: LoneNode) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("src/train.py", "import os; print(os.getcwd(), os.stat('src/train.py').st_uid)")
    content = packed.getvalue()
    sha256, link = hashlib.sha256(content).hexdigest(), podman_node.open()
    code = {
        "code_archive": {"sha256": sha256, "target": "/code", "limit_mib": 10},
        "mounts": [{"kind": "scratch", "source": "fairway.code", "target": "/code"}],
        "workdir": "/code",
    }
    with pytest.raises(AgentError, match="not on this node"):
        start(link, podman_node, "jcode", "python3", "src/train.py", **code)
    link.request("load", timeout_s=20, upload=sha256, offset=0, data_b64=base64.b64encode(content).decode())
    start(link, podman_node, "jcode", "python3", "src/train.py", **code)
    assert "/code 2001" in log_with(link, "jcode", "2001")
    code["code_archive"] |= {"target": "/home"}  # type: ignore[operator]
    with pytest.raises(AgentError, match="not a scratch folder"):
        start(link, podman_node, "jother", "true", **code)


def test_repeats_kills_and_limits(podman_node: LoneNode) -> None:
    node = podman_node
    link = node.open()
    start(link, node, "jlong", "sh", "-c", "sleep 600; true")
    os.kill(link.process_id, signal.SIGKILL)
    link = node.open()
    assert start(link, node, "jlong", "sh", "-c", "sleep 600; true")["already"] is True
    assert len(node.podman("ps", "--quiet").stdout.split()) == 1  # type: ignore[attr-defined]
    asked_s = time.time()
    assert link.request("stop", timeout_s=20, epoch=1, job="jlong", attempt=1, grace_s=0)["gone"] is True
    assert time.time() - asked_s < budget_s(5)
    start(link, node, "joom", "python3", "-c", "x = bytearray(300 << 20)")
    event = wait_for(link, "exited", job="joom")
    assert (event["oom"], event["exit_code"]) == (True, 137)
    start(link, node, "jquick", "sh", "-c", "exit 7")
    event = wait_for(link, "exited", job="jquick")
    assert (event["exit_code"], event["oom"]) == (7, False)
    link.request(
        "remove", timeout_s=30, epoch=1, job="jquick", attempt=1
    )  # waits for what is being cleaned up
    link.request("remove", timeout_s=30, epoch=1, job="joom", attempt=1)
    assert node.podman("ps", "--all", "--quiet").stdout == ""  # type: ignore[attr-defined]
    spare = node.wait_for_spare()
    assert node.networks() == {spare} == set(node.ledger()["network_pool"])


def test_values_of_variables_are_in_no_argument_list(podman_node: LoneNode) -> None:
    node = podman_node
    seen = node.folder / "seen"
    spy = node.folder / "spy"  # what everybody on the node may read of a program while it runs
    spy.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {seen}\nexec podman "$@"\n')
    spy.chmod(0o755)
    settings = json.loads(node.settings_path.read_text())
    settings["runtimes"][0]["program"] = [str(spy)]
    node.configure(**settings)
    link = node.open()
    env = {
        "PLAIN": " #'\"\\$x ",
        "KEY": "of-nobodys-business",
        "LINES": "one\ntwo",
        "EMPTY": "",
        "LONG": "x" * 70_000,
    }
    show = """import json, os
print(json.dumps({name: value.replace("x" * 70_000, "all of it") for name, value in os.environ.items()}))"""
    name = start(link, node, "jenv", "python3", "-c", show, env=env)
    reported = json.loads(log_with(link, "jenv", "}\n"))
    assert {key: reported[key] for key in env} == env | {"LONG": "all of it"}
    words = seen.read_text()
    assert "create" in words and "of-nobodys-business" not in words
    assert not list((node.folder / "state/tasks" / name["container"]).glob("environment*"))


def network_of(node: LoneNode, started: dict[str, Any]) -> str:
    words = ("inspect", "-f", "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}")
    return str(node.podman(*words, started["container"]).stdout.strip())  # type: ignore[attr-defined]


def end(link: Link, job: str) -> None:
    link.request("stop", timeout_s=30, epoch=1, job=job, attempt=1, grace_s=0)
    link.request("remove", timeout_s=30, epoch=1, job=job, attempt=1)


def test_a_job_gets_a_prepared_network_of_its_own(podman_node: LoneNode) -> None:
    node = podman_node
    link = node.open()
    spare = node.wait_for_spare()
    first, second = start(link, node, "jone"), start(link, node, "jtwo")
    assert network_of(node, first) == spare
    other = network_of(node, second)  # its own; where the start was slow, the next spare stood ready already
    assert other == f"fw-{CLUSTER}-jtwo" or other.startswith(f"fw-{CLUSTER}-spare-")
    assert len({spare, other, node.wait_for_spare()}) == 3
    end(link, "jone")
    end(link, "jtwo")
    assert node.networks() == {node.wait_for_spare()}


@pytest.mark.parametrize("jobs", [3, pytest.param(200, marks=pytest.mark.long)])
def test_short_jobs_start_beside_long_ones(podman_node: LoneNode, jobs: int) -> None:
    node = podman_node
    link = node.open()
    for job in ("jlonga", "jlongb"):
        start(link, node, job, "sleep", "3600")
    for number in range(jobs):
        node.wait_for_spare()
        job = "jshort" + "".join(chr(97 + int(digit)) for digit in f"{number:03}")
        assert start(link, node, job, "true")["state"] == "running"
        end(link, job)


def test_a_network_that_was_pruned_is_made_again(podman_node: LoneNode) -> None:
    node = podman_node
    link = node.open()
    spare = node.wait_for_spare()
    assert node.podman("network", "rm", spare).returncode == 0  # type: ignore[attr-defined]
    assert network_of(node, start(link, node, "jpruned")) == spare
    end(link, "jpruned")
    assert node.networks() <= set(node.ledger()["network_pool"])


def test_unknown_job_networks_are_removed_and_others_stay(podman_node: LoneNode) -> None:
    node = podman_node
    for name, label in (("lost", CLUSTER), ("other", "t2")):
        words = ("network", "create", "--label", f"fairway.cluster={label}", name)
        assert node.podman(*words).returncode == 0  # type: ignore[attr-defined]
    link = node.open()
    assert link.request("gc", timeout_s=20)["networks"] == 1
    everything = node.podman("network", "ls", "--format", "{{.Name}}").stdout.split()  # type: ignore[attr-defined]
    assert "lost" not in everything and "other" in everything


def test_a_name_that_means_another_image_is_noticed(podman_node: LoneNode) -> None:
    node = podman_node
    link = node.open()
    node.wait_for_spare()  # from here on it knows how to see that the store is unchanged
    name = "localhost/fairway/moving:latest"
    seen = []
    for number, source in enumerate((node.image, "other")):  # type: ignore[attr-defined]
        if source == "other":
            made = node.podman("commit", f"fw-{CLUSTER}-j0a-1-0", "localhost/fairway/other:latest")  # type: ignore[attr-defined]
            assert made.returncode == 0, made.stderr
            source = "localhost/fairway/other:latest"
        assert node.podman("tag", source, name).returncode == 0  # type: ignore[attr-defined]
        for turn in "ab":  # the second is answered from memory
            spec = node.spec(f"j{number}{turn}", runtime="podman", image=name)
            started = link.request("start", timeout_s=30, epoch=1, spec=spec)
            image = node.podman("inspect", "-f", "{{.Image}}", started["container"]).stdout.strip()  # type: ignore[attr-defined]
            seen.append(image)
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert node.podman("untag", name).returncode == 0  # type: ignore[attr-defined]
    with pytest.raises(AgentError) as caught:
        link.request("start", timeout_s=30, epoch=1, spec=node.spec("jgone", runtime="podman", image=name))
    assert caught.value.code == "image_missing"


def test_a_log_uses_at_most_twice_its_size(podman_node: LoneNode) -> None:
    node = podman_node
    node.configure(max_log_mib=1)
    link = node.open()
    # a pause after the first 1.4 MiB: who writes twice the limit between two looks loses its beginning
    noise = f"""import time
for n in range(40000):
    print(f"{{n:0127}}", flush=True)
    time.sleep({budget_s(2)} * (n == 8192))
time.sleep(600)"""
    name = start(link, node, "jloud", "python3", "-c", noise)["container"]
    folder = node.folder / "state" / "tasks" / name
    where = {"job": "jloud", "attempt": 1, "task": 0}

    def size() -> int:
        return sum(file.stat().st_size for file in folder.glob("log*"))

    def piece(offset: int) -> bytes:
        return base64.b64decode(link.request("logs", timeout_s=10, offset=offset, **where)["data_b64"])

    deadline_s = time.monotonic() + budget_s(20)
    while (last := piece(max(0, (1 << 20) - 1000)))[-20:].find(b"is discarded.") < 0:
        assert time.monotonic() < deadline_s
        assert size() <= 2 << 20
        time.sleep(0.05)
    lines = last.decode().splitlines()
    assert lines[-1].endswith(" stdout F fairway: log truncated at 1 MiB; further output is discarded.")
    number = int(lines[-2].split()[-1])  # the line before is that of the first mebibyte, and it stays so
    assert number < 8192
    assert piece(0).split()[3] == b"0" * 127
    assert size() <= 2 << 20
    assert link.request("stop", timeout_s=20, epoch=1, job="jloud", attempt=1, grace_s=0)["gone"] is True
    assert piece(max(0, (1 << 20) - 1000)) == last


def test_strangers_are_never_touched(podman_node: LoneNode) -> None:
    node = podman_node
    plain = [
        "--network",
        "none",
        "--cgroups",
        "enabled",
        "--ulimit",
        "nofile=1024:1024",
        "--ulimit",
        "nproc=1024:1024",
    ]
    image = node.image  # type: ignore[attr-defined]
    for name, label in ((f"fw-{CLUSTER}-jname-1-0", []), ("other", ["--label", "fairway.cluster=t2"])):
        made = node.podman("run", "--detach", "--name", name, *plain, *label, image, "sleep", "600")  # type: ignore[attr-defined]
        assert made.returncode == 0, made.stderr
    node.open().close()
    node.boot_id_path.write_text("boot-2\n")
    link = node.open()
    with pytest.raises(AgentError) as caught:
        start(link, node, "jname")
    assert caught.value.code == "name_conflict"
    link.request("stop", timeout_s=20, epoch=1, job="jname", attempt=1, grace_s=0)
    link.request("gc", timeout_s=20)
    assert link.request("list", timeout_s=20)["containers"] == []
    assert len(node.podman("ps", "--quiet").stdout.split()) == 2  # type: ignore[attr-defined]
    assert node.ledger()["tasks"] == {}


def test_after_a_reboot_containers_restarted_by_the_engine_are_removed(podman_node: LoneNode) -> None:
    node = podman_node
    link = node.open()
    start(link, node, "jold", gpus=[{"uuid": GPUS[0], "milli": 1000}])
    link.close()
    node.boot_id_path.write_text("boot-2\n")
    link = node.open()
    assert node.podman("ps", "--all", "--quiet").stdout == ""  # type: ignore[attr-defined]
    (row,) = link.request("list", timeout_s=20)["containers"]
    assert (row["state"], row["rebooted"]) == ("exited", True)


def test_images_are_loaded_in_parts_and_checked(podman_node: LoneNode, tiny_image: RigImage) -> None:
    node = podman_node
    link = node.open("bulk")
    assert any(tiny_image.name in image.refs for image in link.hello.images)
    evil = node.folder / "evil"
    evil.mkdir()
    subprocess.run(["tar", "-C", str(evil), "-cf", str(node.folder / "evil.tar"), "."], check=True)
    made = node.podman("import", "--change", "ENV LD_PRELOAD=/x.so", str(node.folder / "evil.tar"), "evil:1")  # type: ignore[attr-defined]
    assert made.returncode == 0, made.stderr
    archive = node.folder / "archive.tar"
    node.podman("save", "--output", str(archive), "localhost/evil:1")  # type: ignore[attr-defined]
    node.podman("rmi", "localhost/evil:1")  # type: ignore[attr-defined]
    content = archive.read_bytes()
    half = len(content) // 2
    for offset, piece in ((0, content[:half]), (0, content[:half]), (half, content[half:])):
        sent = link.request(
            "load", timeout_s=20, upload="up1", offset=offset, data_b64=base64.b64encode(piece).decode()
        )
    assert sent["size"] == len(content)
    image = link.request("load", timeout_s=60, upload="up1", last=True)["image"]
    assert image["image_id"].startswith("sha256:") and "localhost/evil:1" in image["refs"]
    control = node.open()
    identity, (digest, *_) = image["image_id"], image["digests"]
    others = [f"other@{digest.partition('@')[2]}", identity[7:13], "saved/evil:1"]
    assert node.podman("tag", "localhost/evil:1", "localhost/team/saved/evil:1").returncode == 0  # type: ignore[attr-defined]
    for wanted, code in (
        *(("localhost/evil:1", "invalid_spec"), (identity, "invalid_spec"), (digest, "invalid_spec")),
        *((name, "image_missing") for name in ("localhost/none:1", *others)),
    ):
        spec = node.spec("jimage", runtime="podman", image=wanted)
        with pytest.raises(AgentError) as caught:
            control.request("start", timeout_s=20, epoch=1, spec=spec)
        assert caught.value.code == code, wanted
    assert node.podman("network", "ls", "--quiet").stdout.count("fw-") == 0  # type: ignore[attr-defined]
    with pytest.raises(AgentError) as caught:
        link.request("pull", timeout_s=60, image="127.0.0.1:9/none/none:1")
    assert caught.value.code == "image_missing"


def test_a_running_task_is_saved_without_mounts_variables_and_command(podman_node: LoneNode) -> None:
    node = podman_node
    volume = node.folder / "data"
    volume.mkdir(mode=0o777)
    volume.chmod(0o777)
    node.configure(allowed_mount_roots=[str(node.folder)])
    link = node.open()
    program = (
        "import os, time; open('/tmp/installed', 'w').write('kept');"
        "open('/home/ada/private', 'w').write('in-the-home'); open('/data/rows', 'w').write('in-a-volume');"
        "print('written', flush=True); time.sleep(600)  # in-the-command"
    )
    start(
        link,
        node,
        "jsave",
        "python3",
        "-c",
        program,
        env={"TOKEN": "in-a-variable", "PATH": "/usr/local/bin:/usr/bin:/bin:/extra"},
        secret_files={"token": "in-a-secret"},
        mounts=[
            {"kind": "home", "source": "ada", "target": "/home/ada"},
            {"kind": "host_path", "source": str(volume), "target": "/data"},
        ],
    )
    log_with(link, "jsave", "written")
    asked = {"job": "jsave", "attempt": 1, "task": 0, "image": "localhost/fairway-saved/x:latest"}
    with pytest.raises(AgentError) as caught:
        link.request("save_image", timeout_s=60, **asked, max_mib=0)
    assert caught.value.code == "too_large" and "at most 0 MiB" in caught.value.message
    saved = link.request("save_image", timeout_s=60, **asked, max_mib=100)
    assert saved["changed_mib"] == 1 and "localhost/fairway-saved/x:latest" in saved["image"]["refs"]
    facts = node.podman("image", "inspect", asked["image"]).stdout  # type: ignore[attr-defined]
    base = json.loads(node.podman("image", "inspect", node.image).stdout)[0]["Config"]  # type: ignore[attr-defined]
    config = json.loads(facts)[0]["Config"]
    variables = dict(each.split("=", 1) for each in config["Env"])
    assert (
        variables["TOKEN"] == "" and variables["PATH"] == dict(e.split("=", 1) for e in base["Env"])["PATH"]
    )
    assert not [word for word in ("in-the-", "in-a-") if word in facts]
    assert config["Labels"]["fairway.cluster"] == "" and config.get("Cmd") == base.get("Cmd")
    archive = node.folder / "saved.tar"
    node.podman("save", "--output", str(archive), asked["image"])  # type: ignore[attr-defined]
    content = archive.read_bytes()
    for text in (b"in-a-secret", b"in-the-home", b"in-a-volume", b"in-a-variable"):
        assert text not in content, text
    assert b"kept" in content
    spec = node.spec("jnew", "cat", "/tmp/installed", runtime="podman", image=saved["image"]["image_id"])
    link.request("start", timeout_s=30, epoch=1, spec=spec)
    log_with(link, "jnew", "kept")
    link.request("stop", timeout_s=20, epoch=1, job="jsave", attempt=1, grace_s=0)
    with pytest.raises(AgentError) as caught:
        link.request("save_image", timeout_s=60, **asked, max_mib=100)
    assert caught.value.code == "no_such_container"
