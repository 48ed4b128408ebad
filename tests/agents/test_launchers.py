"""What each launcher makes of a job's shape, word by word, and what holds for all of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.launchers import (
    LAUNCHERS,
    REQUIRES_RENDEZVOUS,
    GangMember,
    GangShape,
    LaunchSpec,
    RankNetwork,
    RendezvousPoint,
    SshKeys,
    equal_members,
    launch_rank,
    option_errors,
)

HERE = RendezvousPoint("10.1.2.3", 32001)
TRAIN = ("python", "train.py", "--epochs", "3")
BOTH = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
KEYS = SshKeys("private", "ssh-ed25519 USER", "host private", "ssh-ed25519 HOST")
SECRETS = "{fairway:secrets}"
SCRIPT = ("/bin/sh", f"{SECRETS}/launch.sh")


def gang(tasks: int, gpus: int, *, first: int = 3, port: int = 32010, **more) -> GangShape:
    """A gang on as many nodes as it has tasks, each at an address and a port of its own."""
    addresses = [f"10.1.2.{first + rank}" for rank in range(tasks)]
    names = ("ssh", "tensorflow")
    ports = [dict.fromkeys(names, port)] * tasks
    return GangShape(equal_members(tasks, gpus, addresses, ports), HERE, keys=KEYS, **more)


GOLDEN: dict[str, tuple[str, GangShape, RankNetwork, LaunchSpec]] = {
    "a single task is told nothing": (
        "none",
        GangShape(equal_members(1, 4)),
        RankNetwork(0),
        LaunchSpec(TRAIN),
    ),
    "the third of four": (
        "none",
        GangShape(equal_members(4, 1), HERE),
        RankNetwork(2, "ib0"),
        LaunchSpec(
            TRAIN,
            {
                "RANK": "2",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "NODE_RANK": "2",
                "MASTER_ADDR": "10.1.2.3",
                "MASTER_PORT": "32001",
            },
            BOTH,
        ),
    ),
    "without a network it knows its number": (
        "none",
        GangShape(equal_members(2, 1)),
        RankNetwork(1),
        LaunchSpec(
            TRAIN,
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"},
        ),
    ),
    "torchrun on one node": (
        "torchrun",
        GangShape(equal_members(1, 8)),
        RankNetwork(0),
        LaunchSpec(("torchrun", "--no-python", "--standalone", "--nproc-per-node=8", *TRAIN)),
    ),
    "torchrun on the second of two": (
        "torchrun",
        GangShape(equal_members(2, 8), HERE),
        RankNetwork(1, "ib0"),
        LaunchSpec(
            ("torchrun", "--no-python", "--nproc-per-node=8", "--nnodes=2", "--node-rank=1", *TRAIN),
            {
                "MASTER_ADDR": "10.1.2.3",
                "MASTER_PORT": "32001",
                "PET_MASTER_ADDR": "10.1.2.3",
                "PET_MASTER_PORT": "32001",
                "NODE_RANK": "1",
            },
            BOTH,
        ),
    ),
    "torchrun where they meet at an address of ipv6, with the adapters that the pool names": (
        "torchrun",
        GangShape(equal_members(2, 8), RendezvousPoint("fd00:9::1", 32001)),
        RankNetwork(1, "ib0", "mlx5_0,mlx5_1"),
        LaunchSpec(
            ("torchrun", "--no-python", "--nproc-per-node=8", "--nnodes=2", "--node-rank=1", *TRAIN),
            {
                "MASTER_ADDR": "fd00:9::1",
                "MASTER_PORT": "32001",
                "PET_MASTER_ADDR": "[fd00:9::1]",
                "PET_MASTER_PORT": "32001",
                "NODE_RANK": "1",
            },
            BOTH | {"NCCL_IB_HCA": "mlx5_0,mlx5_1"},
        ),
    ),
    "torchrun without a GPU": (
        "torchrun",
        GangShape(equal_members(1, 0)),
        RankNetwork(0),
        LaunchSpec(("torchrun", "--no-python", "--standalone", "--nproc-per-node=1", *TRAIN)),
    ),
    "jax": (
        "jax",
        gang(2, 4),
        RankNetwork(1, "ib0"),
        LaunchSpec(
            TRAIN,
            {
                "JAX_COORDINATOR_ADDRESS": "10.1.2.3:32001",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "1",
            },
            BOTH,
        ),
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case: str) -> None:
    name, shape, rank, launch = GOLDEN[case]
    assert launch_rank(name, shape, rank, TRAIN) == launch


LINES: dict[str, tuple[str, GangShape, int, dict[str, object], str]] = {
    "torchrun elastic": (
        "torchrun", gang(2, 4, min_tasks=2, max_tasks=8, name="job-1"), 1, {"max_restarts": 3},
        "torchrun --no-python --nproc-per-node=4 --max-restarts=3 --nnodes=2:8 --rdzv-backend=c10d "
        "--rdzv-id=job-1 --rdzv-endpoint=10.1.2.3:32001 --rdzv-conf=is_host=0 "
        "--local-addr=10.1.2.4 python train.py --epochs 3",
    ),
    "torchrun with the rendezvous c10d": (
        "torchrun", gang(2, 0, name="job-1"), 0, {"rendezvous": "c10d", "processes_per_task": 2},
        "torchrun --no-python --nproc-per-node=2 --nnodes=2 --rdzv-backend=c10d --rdzv-id=job-1 "
        "--rdzv-endpoint=10.1.2.3:32001 --rdzv-conf=is_host=1 --local-addr=10.1.2.3 python train.py --epochs 3",
    ),
    "horovod": (
        "horovod", gang(2, 4), 0, {},
        f"/bin/sh {SECRETS}/launch.sh first horovodrun --gloo --start-timeout 60 -np 8 -H 10.1.2.3:4,10.1.2.4:4 "
        f"-p 32010 -i {SECRETS}/ssh_key --network-interface ib0 python train.py --epochs 3",
    ),
    "horovod with a timeline, where two tasks share a node": (
        "horovod",
        GangShape(
            equal_members(2, 1, ["10.1.2.3"] * 2, [{"ssh": 32010}, {"ssh": 32011}]), HERE, keys=KEYS
        ),
        0,
        {"timeline_filename": "/tmp/timeline.json"},
        f"/bin/sh {SECRETS}/launch.sh first python3 {SECRETS}/with_artifact.py /tmp/timeline.json horovodrun --gloo "
        f"--start-timeout 60 -np 2 -H rank-0:1,rank-1:1 -i {SECRETS}/ssh_key --network-interface ib0 "
        "python train.py --epochs 3",
    ),
    "horovod with MPI": (
        "horovod", gang(2, 2), 0, {"controller": "mpi", "fusion_threshold_mb": 32},
        f"/bin/sh {SECRETS}/launch.sh first mpirun -np 4 --hostfile {SECRETS}/hostfile --bind-to none --map-by slot "
        "--mca pml ob1 --mca btl ^openib -x HOROVOD_CONTROLLER -x HOROVOD_CPU_OPERATIONS -x HOROVOD_FUSION_THRESHOLD "
        "python train.py --epochs 3",
    ),
    "horovod with MPI in one task": (
        "horovod", GangShape(equal_members(1, 2)), 0, {"controller": "mpi"},
        "mpirun -np 2 --bind-to none --map-by slot --mca pml ob1 --mca btl ^openib -x HOROVOD_CONTROLLER "
        "-x HOROVOD_CPU_OPERATIONS python train.py --epochs 3",
    ),
    "horovod elastic": (
        "horovod", gang(3, 2, min_tasks=2, max_tasks=4), 0, {"blacklist_cooldown_max_s": 100},
        f"/bin/sh {SECRETS}/launch.sh first horovodrun --gloo --start-timeout 60 -np 4 --min-np 4 --max-np 8 "
        f"--host-discovery-script discover_hosts.sh --blacklist-cooldown-range 10 100 -i {SECRETS}/ssh_key "
        "--network-interface ib0 python train.py --epochs 3",
    ),
    "horovod in one task": (
        "horovod", GangShape(equal_members(1, 2)), 0, {},
        "horovodrun --gloo --start-timeout 60 -np 2 -H localhost:2 python train.py --epochs 3",
    ),
    "a worker of horovod": ("horovod", gang(2, 4), 1, {}, f"/bin/sh {SECRETS}/launch.sh serve"),
    "mpi": (
        "mpi", gang(2, 2), 0, {"map_by": "node"},
        f"/bin/sh {SECRETS}/launch.sh first mpirun -np 4 --hostfile {SECRETS}/hostfile --map-by node "
        "--bind-to none python train.py --epochs 3",
    ),
    "a worker of mpi": ("mpi", gang(2, 2), 1, {}, f"/bin/sh {SECRETS}/launch.sh serve"),
    "deepspeed": (
        "deepspeed", gang(2, 2), 1, {},
        f"deepspeed --hostfile {SECRETS}/hostfile --no_ssh --node_rank 1 --master_addr 10.1.2.3 "
        "--master_port 32001 --no_python --no_local_rank python train.py --epochs 3",
    ),
    "deepspeed in one task": (
        "deepspeed", GangShape(equal_members(1, 2)), 0, {"pass_local_rank": True},
        "deepspeed --num_gpus 2 --no_python python train.py --epochs 3",
    ),
    "accelerate": (
        "accelerate", gang(2, 2), 1, {"mixed_precision": "bf16", "strategy": "fsdp"},
        "accelerate launch --num_processes 4 --num_machines 2 --mixed_precision bf16 --dynamo_backend no "
        "--machine_rank 1 --main_process_ip 10.1.2.3 --main_process_port 32001 --use_fsdp --no_python "
        "python train.py --epochs 3",
    ),
    "accelerate on CPUs": (
        "accelerate", GangShape(equal_members(1, 0)), 0, {},
        "accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu "
        "--no_python python train.py --epochs 3",
    ),
    "the head of ray": (
        "ray", gang(2, 2), 0, {},
        f"/bin/bash {SECRETS}/launch.sh 10.1.2.3 32001 ray start --node-ip-address=10.1.2.3 --head --port=32001 "
        "--include-dashboard=false --num-cpus=1 --num-gpus=2 --object-store-memory=134217728 "
        "--min-worker-port=0 --max-worker-port=0 --disable-usage-stats --block -- python train.py --epochs 3",
    ),
    "a worker of ray": (
        "ray", gang(2, 0), 1, {"cpus_per_task": 4},
        f"/bin/bash {SECRETS}/launch.sh 10.1.2.3 32001 ray start --node-ip-address=10.1.2.4 "
        "--address=10.1.2.3:32001 --num-cpus=4 --num-gpus=0 --object-store-memory=134217728 "
        "--min-worker-port=0 --max-worker-port=0 --disable-usage-stats --block",
    ),
    "the driver of spark": (
        "spark", gang(3, 1), 0, {},
        f"/bin/bash {SECRETS}/launch.sh 10.1.2.3 32001 spark-class org.apache.spark.deploy.master.Master "
        "--host 10.1.2.3 --port 32001 --webui-port 0 -- python train.py --epochs 3",
    ),
    "an executor of spark": (
        "spark", gang(3, 1), 2, {"executor_cores": 2},
        f"/bin/bash {SECRETS}/launch.sh 10.1.2.3 32001 /bin/sh {SECRETS}/worker.sh spark-class "
        "org.apache.spark.deploy.worker.Worker --host 10.1.2.5 --webui-port 0 --cores 2 --memory 1024m "
        "spark://10.1.2.3:32001",
    ),
    "custom": (
        "custom", gang(2, 1), 0, {}, f"/bin/sh {SECRETS}/launch.sh first python train.py --epochs 3",
    ),
    "custom in all tasks": (
        "custom", gang(2, 1), 1, {"run_on": "all"},
        f"/bin/sh {SECRETS}/launch.sh all python train.py --epochs 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_golden_lines(case: str) -> None:
    name, shape, rank, options, line = LINES[case]
    assert not option_errors(LAUNCHERS[name].options, options)
    assert " ".join(launch_rank(name, shape, RankNetwork(rank, "ib0"), TRAIN, options).command) == line


def test_horovod_refuses_unsupported_elastic_options() -> None:
    shape = gang(2, 1, min_tasks=1, max_tasks=2)
    for options, message in (
        ({"controller": "mpi"}, "the controller gloo"),
        ({"cycle_time_ms": 2.0}, "cannot change cycle_time_ms in an elastic job"),
    ):
        with pytest.raises(ValueError, match=message):
            launch_rank("horovod", shape, RankNetwork(0), TRAIN, options)


def test_horovod_has_the_settings_that_differ_from_its_defaults() -> None:
    tuned = {
        "fusion_threshold_mb": 32, "cycle_time_ms": 3.5, "autotune": True, "autotune_log_file": "/tmp/tune.csv",
        "timeline_filename": "/tmp/timeline.json",
    }  # fmt: skip
    expected = {
        "HOROVOD_FUSION_THRESHOLD": "33554432",
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "/tmp/tune.csv",
        "HOROVOD_TIMELINE": "/tmp/timeline.json",
    }
    for shape in (gang(2, 2), GangShape(equal_members(1, 2))):
        assert launch_rank("horovod", shape, RankNetwork(0), TRAIN, tuned).environment == expected
    assert launch_rank("horovod", gang(2, 2), RankNetwork(0), TRAIN, {"cycle_time_ms": 1.0}).environment == {}


def test_open_mpi_uses_ssh_and_interface_of_the_job_with_either_launcher() -> None:
    expected = {
        "OMPI_MCA_btl_tcp_if_include": "ib0",
        "OMPI_MCA_oob_tcp_if_include": "ib0",
        "PRTE_MCA_prte_if_include": "ib0",
    }
    arguments = f"-F {SECRETS}/ssh_config"
    for name, options in (("mpi", {}), ("horovod", {"controller": "mpi"})):
        launch = launch_rank(name, gang(2, 2), RankNetwork(0, "ib0"), TRAIN, options)
        assert launch.defaults == expected
        login = {"OMPI_MCA_plm_rsh_args": arguments, "PRTE_MCA_plm_ssh_args": arguments}
        assert login.items() <= launch.environment.items()
    assert launch_rank("horovod", gang(2, 2), RankNetwork(0, "ib0"), TRAIN, {}).defaults == {}


def tf_config(shape: GangShape, rank: int, **options) -> dict[str, object]:
    return json.loads(
        launch_rank("tensorflow", shape, RankNetwork(rank), TRAIN, options).environment["TF_CONFIG"]
    )


def test_tf_config_of_each_strategy() -> None:
    assert tf_config(gang(2, 1), 1) == {
        "cluster": {"worker": ["10.1.2.3:32010", "10.1.2.4:32010"]},
        "task": {"type": "worker", "index": 1},
    }
    servers = {"strategy": "parameter_server", "parameter_servers": 2, "evaluator": True}
    cluster = {
        "chief": ["10.1.2.3:32010"],
        "ps": ["10.1.2.4:32010", "10.1.2.5:32010"],
        "worker": ["10.1.2.6:32010", "10.1.2.7:32010"],
    }
    roles = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1)]
    for rank, (role, index) in enumerate(roles):
        expected = {"cluster": cluster, "task": {"type": role, "index": index}}
        assert tf_config(gang(6, 1), rank, **servers) == expected
    assert tf_config(gang(6, 1), 5, **servers) == {
        "cluster": {"evaluator": ["10.1.2.8:32010"]},
        "task": {"type": "evaluator", "index": 0},
    }
    single = launch_rank("tensorflow", gang(1, 4), RankNetwork(0), TRAIN, {"strategy": "mirrored"})
    assert single == LaunchSpec(TRAIN)
    with pytest.raises(ValueError, match="at least 4 tasks"):
        tf_config(gang(3, 1), 0, **servers | {"parameter_servers": 1})


def test_roles_that_a_job_declares_are_kept() -> None:
    port = {"tensorflow": 32010}
    members = (
        GangMember(0, "ps", 0, "10.1.2.3", port, 0),
        GangMember(1, "worker", 0, "10.1.2.4", port, 1),
        GangMember(2, "worker", 1, "fd00::5", port, 1),
    )
    assert tf_config(GangShape(members, HERE), 2) == {
        "cluster": {"ps": ["10.1.2.3:32010"], "worker": ["10.1.2.4:32010", "[fd00::5]:32010"]},
        "task": {"type": "worker", "index": 1},
    }


def test_files_of_a_launcher_that_uses_ssh() -> None:
    files = launch_rank("mpi", gang(2, 2), RankNetwork(1), TRAIN).files
    shown = {name: file.content for name, file in files.items() if name != "launch.sh"}
    assert shown == {
        "hostfile": "10.1.2.3 slots=2\n10.1.2.4 slots=2\n",
        "ssh_config": "Host 10.1.2.3\n  HostName 10.1.2.3\n  Port 32010\n"
        "Host 10.1.2.4\n  HostName 10.1.2.4\n  Port 32010\nHost *\n"
        f"  IdentityFile {SECRETS}/ssh_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {SECRETS}/ssh_known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n  HostKeyAlias fairway\n  StrictHostKeyChecking yes\n  BatchMode yes\n"
        "  ConnectTimeout 10\n  LogLevel ERROR\n",
        "sshd_config": f"Port 32010\nListenAddress 10.1.2.4\nHostKey {SECRETS}/ssh_host_key\n"
        f"AuthorizedKeysFile {SECRETS}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nAllowTcpForwarding no\nX11Forwarding no\nPermitUserEnvironment no\n"
        "PrintMotd no\nPidFile none\nMaxStartups 200\nLogLevel ERROR\n",
        "ssh_known_hosts": "fairway ssh-ed25519 HOST\n",
        "authorized_keys": "restrict,pty ssh-ed25519 USER\n",
        "ssh_key": "private",
        "ssh_host_key": "host private",
    }
    assert {name for name, file in files.items() if file.private} == {"ssh_key", "ssh_host_key"}


def test_variables_of_mpi_and_custom() -> None:
    mpi = launch_rank("mpi", gang(2, 2), RankNetwork(0, "ib0"), TRAIN)
    assert mpi.environment == {
        "OMPI_MCA_plm_rsh_args": f"-F {SECRETS}/ssh_config",
        "PRTE_MCA_plm_ssh_args": f"-F {SECRETS}/ssh_config",
    }
    assert mpi.defaults["OMPI_MCA_btl_tcp_if_include"] == "ib0"
    custom = launch_rank("custom", gang(2, 2), RankNetwork(1), TRAIN).environment
    assert (custom["HOSTS"], custom["RANK"], custom["WORLD_SIZE"]) == ("10.1.2.3,10.1.2.4", "1", "2")
    assert (custom["HOSTFILE"], custom["SSH_KEY"]) == (f"{SECRETS}/hostfile", f"{SECRETS}/ssh_key")


def test_hosts_of_an_elastic_job_have_stable_names() -> None:
    shape = gang(3, 2, min_tasks=2, max_tasks=4)
    left = replace(shape, members=(shape.members[0], shape.members[2]))
    hosts = [
        launch_rank("horovod", each, RankNetwork(0), TRAIN).files["hosts"].content for each in (shape, left)
    ]
    assert hosts == ["rank-0:2\nrank-1:2\nrank-2:2\n", "rank-0:2\nrank-2:2\n"]


def test_configuration_of_spark() -> None:
    worker = launch_rank("spark", gang(3, 2), RankNetwork(1), TRAIN, {"executor_cores": 4})
    assert worker.files["spark-defaults.conf"].content == (
        "spark.dynamicAllocation.enabled false\nspark.master spark://10.1.2.3:32001\n"
        "spark.driver.host 10.1.2.3\nspark.driver.bindAddress 10.1.2.3\nspark.executor.cores 4\n"
        "spark.executor.memory 1024m\nspark.cores.max 8\nspark.scheduler.minRegisteredResourcesRatio 1.0\n"
        "spark.scheduler.maxRegisteredResourcesWaitingTime 120s\nspark.executor.resource.gpu.amount 2\n"
        "spark.task.resource.gpu.amount 1\n"
    )
    assert worker.environment == {
        "SPARK_CONF_DIR": SECRETS,
        "SPARK_WORKER_OPTS": "-Dspark.worker.resource.gpu.amount=2",
    }
    assert "seq 0 $((2 - 1))" in worker.files["discover_gpus.sh"].content
    assert "discover_gpus.sh" not in launch_rank("spark", gang(3, 0), RankNetwork(1), TRAIN).files


@pytest.mark.parametrize("name", sorted(REQUIRES_RENDEZVOUS))
def test_launchers_that_need_a_rendezvous_are_refused_without_one(name: str) -> None:
    with pytest.raises(ValueError, match=r"needs (a rendezvous address|the addresses of all tasks)"):
        launch_rank(name, GangShape(equal_members(2, 1)), RankNetwork(0), TRAIN)


@given(
    name=st.sampled_from(sorted(LAUNCHERS)),
    tasks=st.integers(1, 64),
    gpus=st.integers(0, 8),
    command=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=5),
    data=st.data(),
)
def test_ranks_differ_and_the_command_stays_whole(name, tasks, gpus, command, data) -> None:
    shape = gang(tasks, gpus)
    ranks = [RankNetwork(number, data.draw(st.sampled_from([None, "eth0"]))) for number in range(tasks)]
    launches = [launch_rank(name, shape, rank, command) for rank in ranks]
    assert launches[0].command[-len(command) :] == tuple(command)
    reported = {
        (
            each.command,
            tuple(sorted(each.environment.items())),
            tuple(sorted((file, content.content) for file, content in each.files.items())),
        )
        for each in launches
    }
    assert len(reported) == tasks


@pytest.mark.parametrize("name", LAUNCHERS)
def test_defaults_of_options_are_valid(name: str) -> None:
    options = LAUNCHERS[name].options
    assert not option_errors(options, {each.name: each.default for each in options})
    assert len({each.name for each in options}) == len(options)
