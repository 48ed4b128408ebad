"""Golden argument lists: what exactly podman and docker are told for a task."""

from __future__ import annotations

from typing import Any

import pytest

from agents.node.refusals import Refusal
from agents.node.runtimes import Order, arguments
from agents.node.runtimes.engine import found_in
from agents.node.runtimes.firewall import rules
from agents.node.spec import parse_spec

SPEC = {
    "cluster": "lab",
    "job": "jobabc2345",
    "attempt": 2,
    "task": 1,
    "digest": "5e7",
    "runtime": "podman",
    "image": "sha256:" + "ab" * 32,
    "command": ["jupyter", "lab", "--port={port}", "--ip={address}", "--config={secrets}/conf"],
    "env": {"MODE": "fast", "CUDA_VISIBLE_DEVICES": "all", "FAIRWAY_JOB": "other"},
    "secret_files": {"token": "x"},
    "uid": 2001,
    "gid": 3001,
    "user": "ada",
    "gpus": [{"uuid": "GPU-1", "milli": 1000}],
    "cpu_milli": 2500,
    "memory_mib": 2048,
    "shm_mib": 256,
    "pids": 512,
    "ports": [8888],
    "mounts": [
        {"kind": "home", "source": "ada", "target": "/home/ada"},
        {"kind": "path", "source": "/data/sets", "target": "/data", "read_only": True},
    ],
}


def order(spec: dict[str, Any] = SPEC, gpu_flags: tuple[str, ...] = ()) -> Order:
    parsed = parse_spec(spec)
    return Order(
        spec=parsed,
        folder="/s/tasks/t",
        log_path="/s/tasks/t/log",
        host_ports={8888: 20123} if parsed.ports else {},
        home_path="/homes/ada" if parsed.home else None,
        mount_sources={"/home/ada": "/homes/ada", "/data": "/data/sets"},
        gpu_flags=list(gpu_flags),
        network="fw-lab-jobabc2345",
        subnet="10.197.0.0/26",
        network_is_made=False,
        own_uid=None,
        hold_fd=None,
    )


PODMAN = arguments.Engine("podman", "127.77.0.1", False, ("--ulimit", "nofile=1024:1024"), 128)
DOCKER = arguments.Engine("docker", "127.77.0.1", False, (), 128)

GOLDEN_PODMAN = """
create --name fw-lab-jobabc2345-2-1
--label fairway.cluster=lab --label fairway.job=jobabc2345 --label fairway.attempt=2 --label fairway.task=1
--label fairway.digest=5e7
--restart no --pull=never --no-healthcheck --stop-signal SIGTERM
--hostname jobabc2345 --network fw-lab-jobabc2345
--cap-drop ALL --security-opt no-new-privileges --ipc private
--user 2001:3001 --cgroupns private
--ulimit core=0:0 --pids-limit 512
--memory 2048m --memory-swap 2048m --cpus 2.5 --shm-size 256m
--systemd=false --http-proxy=false --image-volume ignore --sdnotify ignore --umask 0027 --no-hosts
--passwd-entry ada:*:2001:3001::/home/ada:/bin/sh
--pidfile /s/tasks/t/pid --log-driver k8s-file --log-opt path=/s/tasks/t/log
--log-opt max-size=134217728
--ulimit nofile=1024:1024
--device nvidia.com/gpu=GPU-1
--unsetenv CUDA_MPS_PIPE_DIRECTORY
--env CUDA_DEVICE_ORDER=PCI_BUS_ID --env CUDA_VISIBLE_DEVICES=GPU-1
--env FAIRWAY_ADDRESS=0.0.0.0 --env FAIRWAY_ATTEMPT=2
--env FAIRWAY_CHECKPOINT_FILE=/run/fairway-checkpoint --env FAIRWAY_CLUSTER=lab --env FAIRWAY_CPU_MILLI=2500
--env FAIRWAY_GPUS=GPU-1 --env FAIRWAY_GPU_MILLI=GPU-1=1000 --env FAIRWAY_JOB=jobabc2345
--env FAIRWAY_MEMORY_MIB=2048 --env FAIRWAY_PROGRESS_FILE=/run/fairway-progress
--env FAIRWAY_SECRETS=/run/fairway --env FAIRWAY_TASK=1
--env HOME=/home/ada --env LOGNAME=ada --env MODE=fast --env NVIDIA_VISIBLE_DEVICES=void
--env PORT_8888=8888 --env USER=ada
--volume /s/tasks/t/secrets:/run/fairway:ro,nosuid,nodev,noexec
--volume /s/tasks/t/checkpoint:/run/fairway-checkpoint:rw,nosuid,nodev,noexec
--volume /s/tasks/t/progress:/run/fairway-progress:rw,nosuid,nodev,noexec
--volume /s/tasks/t/hosts:/etc/hosts:ro,nosuid,nodev,noexec
--volume /homes/ada:/home/ada:rw,nosuid,nodev
--volume /data/sets:/data:ro,nosuid,nodev
--publish 127.77.0.1:20123:8888/tcp
--workdir /home/ada
--entrypoint jupyter IMAGEID lab --port=8888 --ip=0.0.0.0 --config=/run/fairway/conf
"""


def test_podman_create() -> None:
    words = arguments.create(
        PODMAN, order(gpu_flags=("--device", "nvidia.com/gpu=GPU-1")), "IMAGEID", ["CUDA_MPS_PIPE_DIRECTORY"]
    )
    assert words == GOLDEN_PODMAN.split()


def test_rootless_podman_maps_the_person_onto_the_account() -> None:
    words = arguments.create(PODMAN._replace(rootless=True), order(), "I", [])
    assert words[words.index("--userns") + 1] == "keep-id:uid=2001,gid=3001"


def test_docker_create_shares_the_guards() -> None:
    words = arguments.create(
        DOCKER, order(SPEC | {"runtime": "docker"}), "IMAGEID", ["CUDA_MPS_PIPE_DIRECTORY"]
    )
    text = " ".join(words)
    for part in (
        "--restart no",
        "--cap-drop ALL --security-opt no-new-privileges",
        "--memory 2048m --memory-swap 2048m",
        "--log-driver json-file",
        "--env CUDA_MPS_PIPE_DIRECTORY=",
        "--env NVIDIA_VISIBLE_DEVICES=GPU-1",
        "--volume /data/sets:/data:ro ",
        "--publish 127.77.0.1:20123:8888/tcp",
        "--entrypoint jupyter IMAGEID lab",
    ):
        assert part in text
    for podmans_own in ("--unsetenv", "--passwd-entry", "--pidfile", "nosuid"):
        assert podmans_own not in text


def test_pretend_gpus_are_only_in_the_environment() -> None:
    words = arguments.create(PODMAN, order(), "I", [])
    assert "--device" not in words
    assert "NVIDIA_VISIBLE_DEVICES=GPU-1" in words


@pytest.mark.parametrize(
    "name", ["NVIDIA_MOFED", "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS"]
)
def test_no_variable_of_an_image_or_a_person_brings_devices(name):
    words = arguments.create(PODMAN, order(SPEC | {"env": {name: "all"}}), "I", [name])
    assert words[words.index("--unsetenv") + 1] == name
    assert f"{name}=all" not in words
    kept = arguments.create(PODMAN, order(SPEC), "I", ["NVIDIA_BUILD_ID"])
    assert "NVIDIA_BUILD_ID" not in kept


def test_without_gpus_none_is_visible() -> None:
    words = arguments.create(PODMAN, order(SPEC | {"gpus": []}), "I", ["NVIDIA_REQUIRE_CUDA"])
    assert "NVIDIA_VISIBLE_DEVICES=void" in words
    assert "CUDA_VISIBLE_DEVICES=" in words
    assert words[words.index("--unsetenv") + 1] == "NVIDIA_REQUIRE_CUDA"


def test_words_of_a_person_are_left_alone() -> None:
    spec = SPEC | {"ports": [], "command": ["python", "-c", "print(f'{port}')"]}
    assert arguments.create(PODMAN, order(spec), "I", [])[-2:] == ["-c", "print(f'{port}')"]


GOLDEN_NETWORK = """
network create --driver bridge --subnet 10.197.0.0/26
--label fairway.cluster=lab --label fairway.job=jobabc --disable-dns --opt isolate=true fw-lab-jobabc
"""


def test_networks_are_isolated_and_labelled() -> None:
    words = arguments.create_network(PODMAN, "fw-lab-jobabc", "lab", "jobabc", "10.197.0.0/26")
    assert words == GOLDEN_NETWORK.split()


def test_a_spare_network_has_the_same_walls_and_names_no_job() -> None:
    words = arguments.create_network(PODMAN, "fw-lab-spare-1", "lab", None, "10.197.0.0/26")
    named = GOLDEN_NETWORK.replace("fairway.job=jobabc", "fairway.spare=1")
    assert words == named.replace("fw-lab-jobabc", "fw-lab-spare-1").split()


def test_firewall_rules() -> None:
    text = rules("lab", "10.197.0.0/16", ["192.0.2.10/32", "2001:db8::/32"])
    assert text.startswith("*mangle\n:FAIRWAY-FORWARD-")
    assert text.endswith("COMMIT\n")
    assert "-s 10.197.0.0/16 -d 169.254.0.0/16 -j DROP" in text
    assert "-d 192.0.2.10/32 -j DROP" in text
    assert "2001:db8" not in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"privileged": True}, "unknown key: 'privileged'"),
        ({"env": {"LD_PRELOAD": "/x.so"}}, "may not set LD_PRELOAD"),
        ({"env": {"LD_AUDIT": "/x.so"}}, "may not set LD_AUDIT"),
        ({"uid": 0}, "uid is not a whole number"),
        ({"uid": True}, "uid is not a whole number"),
        ({"command": []}, "command is not a list"),
        ({"command": ["--privileged"]}, "not a program"),
        ({"image": "--privileged"}, "image is not of the form"),
        ({"gpus": [{"uuid": "G", "milli": 1001}]}, "milli is not"),
        ({"gpus": [{"uuid": "G", "milli": 1}, {"uuid": "G", "milli": 1}]}, "same GPU twice"),
        ({"mounts": [{"kind": "path", "source": "/a:b", "target": "/x"}]}, "source is not of the form"),
        ({"mounts": [{"kind": "home", "source": "../root", "target": "/x"}]}, "source is not of the form"),
        ({"mounts": [{"kind": "home", "source": "a", "target": "/proc/x"}]}, "Nothing can be mounted"),
        ({"mounts": [{"kind": "home", "source": "a", "target": "/x/../etc"}]}, "plain absolute path"),
        ({"mounts": [{"kind": "socket", "source": "a", "target": "/x"}]}, "home or path"),
        ({"secret_files": {"../x": "y"}}, "not a file name"),
        ({"user": "ada:0"}, "user is not of the form"),
        ({"ports": [0]}, "ports is not"),
        ({"image": None}, "no image"),
        ({"job": None}, "no job"),
    ],
)
def test_specs_are_closed(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        parse_spec(SPEC | change)
    assert caught.value.code == "bad_spec"


def test_containers_without_our_labels_are_not_ours() -> None:
    row = {
        "Name": "fw-lab-jobabc-1-0",
        "Config": {"Labels": {"fairway.cluster": "lab"}},
        "State": {"Status": "running"},
    }
    assert found_in(row) is None
