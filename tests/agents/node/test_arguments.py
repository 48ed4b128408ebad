"""Golden argument lists: what exactly podman and docker are told for a task.

The whole lists stand in ``golden/``, an option a line. ``FAIRWAY_RENEW_GOLDEN=1`` with these tests writes them anew;
the difference is then read as part of the change.
"""

from __future__ import annotations

import csv
import os
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agents.node.errors import AgentError
from agents.node.runtimes import ContainerConfig, arguments
from agents.node.runtimes.arguments import LABELS
from agents.node.runtimes.container import parse_container
from agents.node.runtimes.firewall import UserStack, build_rules, user_stack
from agents.node.settings import SettingsError, parse_settings
from agents.node.spec.egress import parse_egress_exceptions, parse_egress_policy, parse_egress_target
from agents.node.spec.task_spec import parse_spec

GOLDEN = Path(__file__).parent / "golden"

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
        {"kind": "host_path", "source": "/data/sets", "target": "/data", "read_only": True},
    ],
}


def order(spec: dict[str, Any] = SPEC, real_gpus: tuple[str, ...] = ()) -> ContainerConfig:
    parsed = parse_spec(spec)
    return ContainerConfig(
        spec=parsed,
        task_dir="/s/tasks/t",
        log_path="/s/tasks/t/log",
        host_ports={8888: 20123} if parsed.ports else {},
        home_path="/homes/ada" if parsed.home else None,
        mount_sources={
            "/home/ada": "/homes/ada",
            "/data": "/data/sets",
            "/volumes/team": "/teams/vision22",
            "/volumes/fast": "/s/scratch/t/fast",
        },
        real_gpus=list(real_gpus),
        network="host" if parsed.host_network else parsed.network or "fw-lab-jobabc2345",
        subnet=None if parsed.host_network or parsed.network else "10.197.0.0/26",
        network_exists=False,
        task_uid=None,
        lock_fd=None,
        devices=parsed.devices,
    )


PODMAN = arguments.EngineOptions(
    "podman", "127.77.0.1", False, ("--ulimit", "nofile=1024:1024"), 128, seccomp="/s/seccomp.json"
)
DOCKER = arguments.EngineOptions("docker", "127.77.0.1", False, (), 128)


def as_text(words: list[str]) -> str:
    """A line for each option with its value, quoted as a shell would have it."""
    lines: list[list[str]] = [[]]
    for before, word in pairwise(["", *words]):
        if word.startswith("--") or (before and not before.startswith("--")):
            lines.append([])
        lines[-1].append(word)
    return "".join(f"{shlex.join(line)}\n" for line in lines if line)


def assert_golden(name: str, words: list[str], *files: str) -> None:
    """Compares words, and the files they name, with what is written down."""
    path, text = GOLDEN / f"{name}.txt", "\n".join([as_text(words), *files])
    if os.environ.get("FAIRWAY_RENEW_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


VOLUMES = [
    {
        "kind": "project",
        "source": "/teams",
        "folder": "vision22",
        "gid": 2_100_000_007,
        "target": "/volumes/team",
    },
    {"kind": "scratch", "source": "fast", "target": "/volumes/fast", "quota_mib": 1024},
]
ENGINES = {
    "podman": PODMAN,
    "podman-rootless": PODMAN._replace(rootless=True),
    "docker": DOCKER,
    "docker-by-hook": DOCKER._replace(gpu_mode=arguments.HOOK),
}
TASKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "workspace": (SPEC, ("GPU-1",)),
    "two-gpus": (SPEC | {"gpus": [{"uuid": f"GPU-{n}", "milli": 1000} for n in (1, 2)]}, ("GPU-1", "GPU-2")),
    "pretend-gpu": (SPEC, ()),
    "rank-on-the-nodes-network": (
        {key: SPEC[key] for key in SPEC if key not in ("env", "mounts", "ports")}
        | {"host_network": True, "devices": ["/dev/infiniband/uverbs0"], "rendezvous_port": 32001},
        ("GPU-1",),
    ),
    "rank-on-a-network-of-the-pool": (
        {key: SPEC[key] for key in SPEC if key not in ("env", "mounts", "ports")}
        | {"network": "fabric0", "address": "10.9.0.62", "devices": ["/dev/infiniband/uverbs0"]},
        ("GPU-1",),
    ),
    "rank-beside-others": (
        {key: SPEC[key] for key in SPEC if key not in ("gpus", "mounts", "ports")}
        | {"env": {"MASTER_ADDR": "{rank0_address}", "RANK": "1"}, "local_rendezvous": True},
        (),
    ),
    "volumes": (SPEC | {"gpus": [], "mounts": [*SPEC["mounts"], *VOLUMES]}, ()),
    "smallest": (
        {
            key: SPEC[key]
            for key in SPEC
            if key not in ("env", "gpus", "mounts", "ports", "memory_mib", "cpu_milli")
        },
        (),
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("task", TASKS)
def test_create(engine: str, task: str) -> None:
    spec, gpus = TASKS[task]
    asked = order(spec | {"runtime": ENGINES[engine].kind}, gpus)
    words = arguments.create(ENGINES[engine], asked, "IMAGEID", ["CUDA_MPS_PIPE_DIRECTORY"])
    assert_golden(f"{engine}-{task}", words, arguments.environment_file(ENGINES[engine], asked))


@pytest.mark.parametrize(
    ("kind", "version", "asked", "daemon_has_cdi", "by"),
    [
        ("podman", (4, 3, 1), None, False, "cdi"),
        ("docker", (20, 10, 24), None, False, "hook"),
        ("docker", (24, 0, 9), None, True, "hook"),
        ("docker", (25, 0), None, True, "cdi"),
        ("docker", (28, 2, 2), None, False, "hook"),
        ("docker", (28, 2, 2), "hook", True, "hook"),
        ("docker", (20, 10, 24), "cdi", False, "cdi"),
        ("docker", (), None, False, "hook"),
    ],
)
def test_gpu_arguments_of_each_engine(kind, version, asked, daemon_has_cdi, by):
    assert arguments.choose_gpu_mode(kind, version, asked, daemon_has_cdi=daemon_has_cdi) == by


def test_docker_reads_a_value_with_commas_as_one_field() -> None:
    hook = DOCKER._replace(gpu_mode=arguments.HOOK)
    words = arguments.gpus(hook, ["GPU-1", "MIG-2"])
    assert words[0] == "--gpus"
    assert next(csv.reader([words[1]])) == ["device=GPU-1,MIG-2"]
    assert arguments.gpus(hook, []) == arguments.gpus(DOCKER, []) == []


@pytest.mark.parametrize("runtime", [{"kind": "docker", "gpus": "all"}, {"kind": "podman", "gpus": "hook"}])
def test_an_unknown_gpu_method_is_a_settings_error(runtime: dict[str, Any]) -> None:
    settings = {
        "cluster": "lab",
        "state_dir": "/s",
        "home_root": "/h",
        "runtimes": [{"kind": "docker", "gpus": "hook"}],
    }
    assert parse_settings(settings).runtimes[0].gpus == "hook"
    with pytest.raises(SettingsError, match="cdi or hook"):
        parse_settings(settings | {"runtimes": [runtime]})


def test_simulated_gpus_are_only_in_the_environment() -> None:
    words = arguments.create(PODMAN, order(), "I", [])
    assert "--device" not in words
    assert arguments.environment(PODMAN, order())["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize(
    "name", ["NVIDIA_MOFED", "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS"]
)
def test_variables_of_an_image_or_a_user_add_no_devices(name):
    asked = order(SPEC | {"env": {name: "all"}})
    words = arguments.create(PODMAN, asked, "I", [name])
    assert words[words.index("--unsetenv") + 1] == name
    assert name not in arguments.environment(PODMAN, asked)
    kept = arguments.create(PODMAN, order(SPEC), "I", ["NVIDIA_BUILD_ID"])
    assert "NVIDIA_BUILD_ID" not in kept


def test_without_gpus_none_is_visible() -> None:
    asked = order(SPEC | {"gpus": []})
    words = arguments.create(PODMAN, asked, "I", ["NVIDIA_REQUIRE_CUDA"])
    variables = arguments.environment(PODMAN, asked)
    assert (variables["NVIDIA_VISIBLE_DEVICES"], variables["CUDA_VISIBLE_DEVICES"]) == ("void", "")
    assert words[words.index("--unsetenv") + 1] == "NVIDIA_REQUIRE_CUDA"


@pytest.mark.parametrize("engine", [PODMAN, DOCKER], ids=["podman", "docker"])
def test_variables_are_passed_in_a_file_unless_a_value_has_a_newline(
    engine: arguments.EngineOptions,
) -> None:
    plain = {"A": "", "B": " #'\"\\$x ", "C": "a=b\t", "D": "\u2713"}
    other = {"E": "two\nlines", "F": "end\r", "G": "x" * 70_000}
    asked = order(SPEC | {"env": {**plain, **other}})
    words = arguments.create(engine, asked, "I", [])
    lines = arguments.environment_file(engine, asked).split("\n")
    assert words[words.index("--env-file") + 1] == "/s/tasks/t/environment"
    assert [word for word in words if word.split("=")[0] in plain | other] == [
        f"{n}={v}" for n, v in other.items()
    ]
    assert [line for line in lines if line.split("=")[0] in plain | other] == [
        f"{n}={v}" for n, v in plain.items()
    ]


def test_command_arguments_are_not_changed() -> None:
    spec = SPEC | {"ports": [], "command": ["python", "-c", "print(f'{port}')"]}
    assert arguments.create(PODMAN, order(spec), "I", [])[-2:] == ["-c", "print(f'{port}')"]


GOLDEN_NETWORK = """
network create --driver bridge --subnet 10.197.0.0/26
--label fairway.cluster=lab --label fairway.job=jobabc --disable-dns --opt isolate=true fw-lab-jobabc
"""


def test_networks_are_isolated_and_labelled() -> None:
    words = arguments.create_network(PODMAN, "fw-lab-jobabc", "lab", "jobabc", "10.197.0.0/26")
    assert words == GOLDEN_NETWORK.split()


def test_a_prepared_network_is_isolated_and_names_no_job() -> None:
    words = arguments.create_network(PODMAN, "fw-lab-spare-1", "lab", None, "10.197.0.0/26")
    named = GOLDEN_NETWORK.replace("fairway.job=jobabc", "fairway.spare=1")
    assert words == named.replace("fw-lab-jobabc", "fw-lab-spare-1").split()


def test_firewall_rules() -> None:
    text = build_rules("lab", "10.197.0.0/16", ["192.0.2.10/32", "2001:db8::/32"])
    assert text.startswith("*mangle\n:FAIRWAY-FORWARD-")
    assert text.endswith("COMMIT\n")
    forward = [
        line.partition(" ")[2].partition(" ")[2] for line in text.splitlines() if "-A FAIRWAY-F" in line
    ]
    assert forward[:2] == [
        "-m conntrack --ctstate ESTABLISHED,RELATED --ctdir REPLY -j RETURN",
        "! -s 10.197.0.0/16 -j RETURN",
    ]
    for place in ("169.254.0.0/16", "100.100.100.200/32", "192.0.2.10/32"):
        assert f"-d {place} -j DROP" in forward
    assert "2001:db8" not in text
    assert not any("-s " in line.replace("! -s", "") for line in forward)  # open: nothing else is closed


def test_a_network_policy_closes_the_network_of_its_job() -> None:
    listed = parse_egress_policy(
        {"mode": "listed", "allow": ["10.1.0.0/16 443", "10.9.9.9", "dns", "10.2.0.1 5-7/udp"]}
    )
    closed = parse_egress_policy({"mode": "none", "allow": []})
    jobs = [("10.197.0.0/26", listed), ("10.197.0.64/26", closed)]
    text = build_rules("lab", "10.197.0.0/16", ["192.0.2.10/32"], jobs, ["10.0.0.53"])
    lines = [line.partition(" ")[2].partition(" ")[2] for line in text.splitlines() if "-A FAIRWAY-F" in line]
    assert lines[lines.index("-d 192.0.2.10/32 -j DROP") + 2 :] == [
        "-s 10.197.0.0/26 -d 10.197.0.0/26 -j RETURN",
        "-s 10.197.0.0/26 -d 10.1.0.0/16 -p tcp --dport 443:443 -j RETURN",
        "-s 10.197.0.0/26 -d 10.9.9.9/32 -j RETURN",
        "-s 10.197.0.0/26 -d 10.0.0.53 -p udp --dport 53:53 -j RETURN",
        "-s 10.197.0.0/26 -d 10.0.0.53 -p tcp --dport 53:53 -j RETURN",
        "-s 10.197.0.0/26 -d 10.2.0.1/32 -p udp --dport 5:7 -j RETURN",
        "-s 10.197.0.0/26 -j DROP",
        "-s 10.197.0.64/26 -d 10.197.0.64/26 -j RETURN",
        "-s 10.197.0.64/26 -j DROP",
    ]


def test_an_exception_of_a_job_is_one_port_of_one_address_ahead_of_all_that_is_denied() -> None:
    api = ("10.197.0.0/26", parse_egress_target("192.0.2.10 8000"))
    text = build_rules("lab", "10.197.0.0/16", ["192.0.2.10/32"], exceptions=[api])
    allowed = "-s 10.197.0.0/26 -d 192.0.2.10/32 -p tcp --dport 8000:8000 -j RETURN"
    forward = [line.split(" ", 2)[2] for line in text.splitlines() if "-A FAIRWAY-F" in line]
    to_node = [line.split(" ", 2)[2] for line in text.splitlines() if "-A FAIRWAY-I" in line]
    assert forward.index(allowed) < forward.index("-d 192.0.2.10/32 -j DROP")
    assert to_node.index(allowed) < to_node.index("-s 10.197.0.0/16 -j DROP")


@pytest.mark.parametrize(
    "entry",
    ["10.0.0.0/8 443", "10.1.2.3", "10.1.2.3 1-9", "10.1.2.3 53/udp", "127.0.0.1 80", "169.254.169.254 80"],
)
def test_an_exception_names_one_tcp_port_of_one_routable_address(entry: str) -> None:
    with pytest.raises(AgentError, match="one address with one TCP port"):
        parse_egress_exceptions([entry])


def test_the_user_mode_forwarder_answers_only_dns_and_only_if_the_policy_allows_it() -> None:
    with_dns = parse_egress_policy({"mode": "listed", "allow": ["dns"]})
    closed = parse_egress_policy({"mode": "none", "allow": []})
    jobs = [("10.197.0.0/26", with_dns), ("10.197.0.64/26", closed)]
    text = build_rules("lab", "10.197.0.0/16", ["10.0.2.2"], jobs, forwarders=["169.254.1.1"])
    lines = [line.partition(" ")[2].partition(" ")[2] for line in text.splitlines() if "-A FAIRWAY-F" in line]
    first = lines.index("-s 10.197.0.64/26 -d 169.254.1.1 -j DROP")
    assert lines[first + 1 : lines.index("-d 10.0.2.2 -j DROP")] == [
        "-d 169.254.1.1 -p udp --dport 53 -j RETURN",
        "-d 169.254.1.1 -p tcp --dport 53 -j RETURN",
        "-d 169.254.1.1 -j DROP",
        "-d 169.254.0.0/16 -j DROP",
        "-d 100.100.100.200/32 -j DROP",
        "-d 192.0.0.192/32 -j DROP",
    ]
    assert not any("-s 10.197.0.0/26 -d 169.254.1.1" in line for line in lines)


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
{device}\t00000000\t{gateway}\t0003\t0\t0\t0\t00000000\t0\t0\t0
cni-podman1\t0000C50A\t00000000\t0001\t0\t0\t0\tC0FFFFFF\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("gateway", "asked", "of_node", "stack"),
    [
        ("0202000A", ["10.0.2.3", "10.0.0.53"], ["10.0.0.53"], UserStack(["10.0.2.2"], ["10.0.2.3"])),
        ("0202000A", ["10.0.2.3", "8.8.8.8", "fd00::3"], [], UserStack(["10.0.2.2"], ["10.0.2.3"])),
        ("0100000A", ["169.254.1.1"], ["10.0.0.53"], UserStack(["10.0.0.1"], ["169.254.1.1"])),
        ("0100000A", ["10.0.0.1"], ["10.0.0.1"], UserStack(["10.0.0.1"], ["10.0.0.1"])),
    ],
    ids=["slirp4netns", "slirp4netns, node without a resolver of others", "pasta", "resolver at the gateway"],
)
def test_the_forwarder_addresses_are_read_from_its_namespace(
    gateway: str, asked: list[str], of_node: list[str], stack: UserStack
) -> None:
    lines = "".join(f"nameserver {each}\n" for each in asked)
    assert (
        user_stack(ROUTES.format(device="tap0", gateway=gateway) + "search lab\n" + lines, of_node) == stack
    )


@pytest.mark.parametrize(
    "entry",
    ["", "x", "10.0.0.0/33", "::/0", "10.1.1.1:443", "10.1.1.1 0", "10.1.1.1 9-8", "10.1.1.1 70000", "1 -j"],
)
def test_an_invalid_destination_is_not_a_policy(entry: str) -> None:
    with pytest.raises(ValueError):
        parse_egress_target(entry)
    for raw in ({"mode": "listed", "allow": [entry]}, {"mode": "off", "allow": []}, {"mode": "none"}, "none"):
        with pytest.raises(AgentError):
            parse_egress_policy(raw)


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_a_job_network_has_no_ipv6_and_a_closed_one_no_name_server_of_docker(kind: str) -> None:
    engine = (PODMAN if kind == "podman" else DOCKER)._replace(has_ipv6=True)
    policy = {"egress": {"mode": "none", "allow": []}, "runtime": kind}
    words = arguments.create(engine, order(SPEC | policy), "I", ())
    assert "net.ipv6.conf.all.disable_ipv6=1" in words
    assert ("--dns" in words) == (kind == "docker")
    assert "--dns" not in arguments.create(engine, order(SPEC | {"runtime": kind}), "I", ())
    outside = arguments.create(engine, order(SPEC | {"runtime": kind, "network": "fabric0"}), "I", ())
    assert "--sysctl" not in outside


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"privileged": True}, "unknown key: 'privileged'"),
        ({"env": {"LD_PRELOAD": "/x.so"}}, "may not set LD_PRELOAD"),
        ({"env": {"LD_AUDIT": "/x.so"}}, "may not set LD_AUDIT"),
        ({"uid": 0}, "uid is not an integer"),
        ({"uid": True}, "uid is not an integer"),
        ({"command": []}, "command is not a list"),
        ({"command": ["--privileged"]}, "not a program"),
        ({"image": "--privileged"}, "image is not the name"),
        ({"gpus": [{"uuid": "G", "milli": 1001}]}, "milli is not"),
        ({"gpus": [{"uuid": "G", "milli": 1}, {"uuid": "G", "milli": 1}]}, "same GPU twice"),
        (
            {"mounts": [{"kind": "host_path", "source": "/a:b", "target": "/x"}]},
            "source has an invalid format",
        ),
        ({"mounts": [{"kind": "home", "source": "../root", "target": "/x"}]}, "source has an invalid format"),
        ({"mounts": [{"kind": "home", "source": "a", "target": "/proc/x"}]}, "Mounting at"),
        ({"mounts": [{"kind": "home", "source": "a", "target": "/x/../etc"}]}, "plain absolute path"),
        ({"mounts": [{"kind": "socket", "source": "a", "target": "/x"}]}, "must be one of home, host_path"),
        ({"mounts": [{"kind": "project", "source": "/a", "target": "/x"}]}, "a folder and a gid"),
        ({"secret_files": {"../x": "y"}}, "invalid file name"),
        ({"user": "ada:0"}, "user has an invalid format"),
        ({"ports": [0]}, "ports is not"),
        ({"image": None}, "no image"),
        ({"job": None}, "no job"),
    ],
)
def test_specs_are_closed(change: dict[str, Any], says: str) -> None:
    with pytest.raises(AgentError, match=says) as caught:
        parse_spec(SPEC | change)
    assert caught.value.code == "invalid_spec"


def test_containers_without_our_labels_are_not_ours() -> None:
    row = {
        "Name": "fw-lab-jobabc-1-0",
        "Config": {"Labels": {"fairway.cluster": "lab"}},
        "State": {"Status": "running"},
    }
    assert parse_container(row) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network", "host"),
        ("network", "none"),
        ("network", "fw-lab-jother"),
        ("network", "container:other"),
        ("address", "10.9.0"),
        ("devices", ["/dev/../etc/shadow"]),
        ("devices", ["/dev/infiniband/.."]),
        ("devices", ["/sys/infiniband"]),
    ],
)
def test_foreign_networks_and_paths_other_than_devices_are_refused(key: str, value: object) -> None:
    with pytest.raises(AgentError):
        parse_spec(SPEC | {key: value})


def test_rank_zero_on_an_ipv6_network_uses_the_ipv6_option() -> None:
    words = arguments.create(DOCKER, order(SPEC | {"network": "fabric0", "address": "fd00:9::3e"}), "I", ())
    assert words[words.index("--ip6") + 1] == "fd00:9::3e" and "--ip" not in words


def test_networks_of_others_are_listed_with_their_subnets() -> None:
    podman = {
        "name": "fabric0",
        "driver": "macvlan",
        "subnets": [
            {
                "subnet": "10.9.0.0/24",
                "gateway": "10.9.0.1",
                "lease_range": {"start_ip": "10.9.0.33", "end_ip": "10.9.0.62"},
            }
        ],
    }
    docker = {
        "Name": "fabric0",
        "Driver": "macvlan",
        "IPAM": {"Config": [{"Subnet": "10.9.0.0/24", "IPRange": "10.9.0.32/27", "Gateway": "10.9.0.1"}]},
        "Labels": {},
    }
    reported = [arguments.parse_external_network(row) for row in (podman, docker)]
    assert [each and each["subnets"][0]["range"] for each in reported] == [
        ["10.9.0.33", "10.9.0.62"],
        ["10.9.0.32", "10.9.0.63"],
    ]
    assert arguments.parse_external_network(docker | {"Labels": {"fairway.cluster": "lab"}}) is None
    assert arguments.parse_external_network({"Name": "host", "Driver": "host"}) is None


def test_a_task_never_ends_before_its_start() -> None:
    labels = {f"fairway.{label}": "1" for label in LABELS}
    times = {"StartedAt": "2026-11-23T16:00:00.8669808Z", "FinishedAt": "2026-11-23T16:00:00.8655808Z"}
    row = {"Name": "fw", "Config": {"Labels": labels}, "State": {"Status": "exited", "ExitCode": 7, **times}}
    found = parse_container(row)
    assert found is not None and found.started_s == found.ended_s == pytest.approx(1795449600.8669808)


def test_a_saved_image_gets_the_settings_of_its_own_image() -> None:
    task = {"Env": ["MODE=secret", "TOKEN=secret", "SAME=1", "LINES=secret", "HOME=/home/ada"]}
    base = {"Env": [r'MODE=a "b" $c \d', "SAME=1", "LINES=a\nb"], "Cmd": ["serve"], "User": "1000"}
    words = arguments.commit("fw-lab-j-1-0", "localhost/x:latest", task, base)
    changes = {word.removeprefix("--change=") for word in words if word.startswith("--change=")}
    expected = {r'ENV MODE=a "b" $c \d', "ENV TOKEN=", "ENV LINES=", "USER 1000", 'CMD ["serve"]'}
    assert expected <= changes
    assert not [each for each in changes if "secret" in each or "SAME" in each or "HOME" in each]
    assert words[-2:] == ["fw-lab-j-1-0", "localhost/x:latest"] and "--pause=false" in words
    words = arguments.import_image("localhost/x:latest", base)
    assert {r'--change=ENV MODE="a \"b\" \$c \\d"', '--change=ENV SAME="1"', '--change=ENV LINES=""'} <= set(
        words
    )
    assert words[0] == "import" and words[-2:] == ["-", "localhost/x:latest"]
