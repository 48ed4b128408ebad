"""Jobs on a real GPU, through the whole engine: training, shares, checkpoints, CUDA failures and layer profiles.

They run with the machine's own ``python3``, which needs PyTorch with CUDA.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agents.bundle import build_archive
from agents.local import open_local
from portal.domain.jobs.template_parameters import fill_fields, read_template_parameters
from portal.domain.states import JobState, NodeState
from portal.models import Gpu, Job, LayerProfile, Node
from portal.services.jobs.failures import identify_failures
from portal.services.jobs.starter_templates import shipped_templates
from scheduler.pipeline_plans import store_measured_profiles
from scheduler.planner.comparison import compare_plans
from scheduler.planner.partition import BandwidthLevel, CostModel
from scheduler.planner.profile import parse_profile
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine

RUN_LIMIT_S = 120.0
SHIPPED = {each.name: each for each in shipped_templates()}


@cache
def torch_python() -> str | None:
    """Return the Python of this machine that has PyTorch with CUDA."""
    found = shutil.which("python3")
    asks = "import torch; assert torch.cuda.is_available()"
    return (
        found if found and subprocess.run([found, "-c", asks], capture_output=True).returncode == 0 else None
    )


pytestmark = [pytest.mark.gpu, pytest.mark.django_db(transaction=True), pytest.mark.timeout(400)]

FAILURES = {
    "cuda_out_of_memory": "import torch; torch.empty(10**13, dtype=torch.uint8, device='cuda')",
    "cuda_device_side_assert": """
import torch
table, labels = torch.nn.Embedding(8, 4).cuda(), torch.tensor([3, 8], device='cuda')
print(table(labels).sum().item())
""",
    "cuda_invalid_device": "import torch; torch.zeros(1, device='cuda:7')",
    "cuda_illegal_memory_access": """
import torch, triton, triton.language as tl
@triton.jit
def write(place, far):
    tl.store(place + far, 1.0)
data = torch.zeros(16, device='cuda')
write[(1,)](data, 1 << 40)
torch.cuda.synchronize()
""",
    "nccl_duplicate_gpu": """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def rank(number):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='29417', RANK=str(number), WORLD_SIZE='2')
    torch.cuda.set_device(0)
    dist.init_process_group('nccl')
    dist.all_reduce(torch.ones(1, device='cuda'))
workers = [os.fork() for number in range(1)]
rank(0 if workers[0] else 1)
""",
}
"""The rule of the shipped failure rules that names the cause, and a program that fails so on one GPU."""

MODEL = """
import torch
from torch import nn
def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
model = nn.Sequential(
    block(3, 64), nn.MaxPool2d(2), block(64, 128), nn.MaxPool2d(2), block(128, 256), nn.MaxPool2d(2),
    block(256, 512), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512 * 16, 1000),
)
"""

MULTIPLIES = """
import os, torch
def fits(part):
    try:
        torch.empty(int(int(os.environ['GPU_MIB']) * part) << 20, dtype=torch.uint8, device='cuda')
    except torch.cuda.OutOfMemoryError:
        return False
    torch.cuda.empty_cache()
    return True
found = [torch.cuda.device_count(), fits(0.45), fits(0.55)]
data = torch.rand(4096, 4096, device='cuda', dtype=torch.bfloat16)
path = os.path.join(os.environ['HOME'], os.environ['FAIRWAY_JOB'])
with open(path + '.new', 'w') as file:
    file.write(repr(found))
os.rename(path + '.new', path)
while not os.path.exists(os.environ['STOP_FILE']):
    for _ in range(50):
        data @ data
    torch.cuda.synchronize()
"""


class GpuCluster:
    """This machine as the only node, with the GPUs of its driver, and a user who runs Python with PyTorch."""

    def __init__(self, harness: EngineHarness, name: str) -> None:
        self.harness, self.engine = harness, InProcessEngine()
        self.node = harness.create_node(name=name, gpu_provider="nvml")
        self.owner = factories.user("ada")
        self.project = factories.project("vision", member=self.owner)
        self.environment = factories.environment(runtime="process", tool=False)
        self.until(lambda: Node.objects.get().state == NodeState.READY.value)
        self.home = harness.folder / name / "homes" / "ada"
        self.gpu = Gpu.objects.order_by("index").first()

    def submit(self, *command: str, **fields: Any) -> Job:
        """Submit a job whose ``python`` is the one with PyTorch."""
        fields = {"memory_mib": 12_000, "cpu_milli": 2000, "termination_grace_s": 1, **fields}
        path = f"{Path(str(torch_python())).parent}:/usr/local/bin:/usr/bin:/bin"
        fields["env"] = {"PATH": path, **fields.get("env", {})}
        return factories.job(self.owner, self.project, self.environment, command=list(command), **fields)

    def submit_template(self, name: str, values: dict[str, Any], **changes: Any) -> Job:
        """Submit a shipped template in one task with one GPU."""
        declared = read_template_parameters(SHIPPED[name].parameters)
        one = {each.name: 1 for each in declared if each.name in ("nodes", "gpus")}
        fields = fill_fields(
            SHIPPED[name].fields, {each.name: each.default for each in declared} | one | values
        )
        return self.submit(
            *fields.pop("command"), **{**fields, "memory_mib": 12_000, "shm_mib": 64, **changes}
        )

    def until(self, done: Any, within_s: float = RUN_LIMIT_S) -> None:
        assert self.engine.run_until(done, within_s), self.engine.last

    def reach(self, job: Job, *states: JobState) -> None:
        def reached() -> bool:
            job.refresh_from_db()
            return JobState(job.state) in states

        assert self.engine.run_until(reached, RUN_LIMIT_S), (job.state, self.log(job))

    def log(self, job: Job) -> str:
        files = sorted((self.harness.folder / "logs").rglob(f"*{job.public_id}*/**/*"))
        return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())


@pytest.fixture
def cluster(harness: EngineHarness, request: pytest.FixtureRequest) -> GpuCluster:
    if torch_python() is None:
        pytest.skip("python3 of this machine has no PyTorch with CUDA")
    return GpuCluster(harness, f"g{abs(hash(request.node.name)) % 10**9}")


@pytest.mark.parametrize(
    ("template", "values"),
    [
        ("torch-ddp", {"strategy": "ddp"}),
        ("torch-ddp", {"strategy": "fsdp"}),
        ("torch-elastic", {"epochs": 3}),
        ("jax", {}),
        ("data-parallel", {}),
        ("llm-lora", {}),
        ("transfer", {}),
        ("reinforcement", {"iterations": 20}),
        ("semi-supervised", {}),
    ],
)
def test_a_template_trains_on_the_gpu(cluster: GpuCluster, template: str, values: dict[str, Any]) -> None:
    job = cluster.submit_template(template, values)
    cluster.reach(job, JobState.COMPLETED, JobState.FAILED)
    assert job.state == JobState.COMPLETED.value, cluster.log(job)
    assert "done:" in cluster.log(job) and "loss nan" not in cluster.log(job)
    assert job.attempts.get().task_rows.get().allocations.get().gpu == cluster.gpu


def test_two_halves_of_a_gpu_run_at_once_and_the_node_sees_both(cluster: GpuCluster, tmp_path: Path) -> None:
    stop = cluster.harness.folder / "stop"
    env = {"STOP_FILE": str(stop), "GPU_MIB": str(cluster.gpu.memory_mib)}
    halves = [cluster.submit("python", "-c", MULTIPLIES, milli_per_gpu=500, env=env) for _ in range(2)]
    try:
        files = [cluster.home / job.public_id for job in halves]
        cluster.until(lambda: all(file.exists() for file in files))
        found = [file.read_text() for file in files]
        sample = sample_of(cluster, tmp_path)
    finally:
        stop.touch()
    print(f"\n{cluster.gpu.model}: {found}; {sample}")
    assert found == ["[1, True, False]"] * 2
    (row,) = [each for each in sample["gpus"] if each["uuid"] == cluster.gpu.uuid]
    assert row["utilisation_percent"] > 50
    owners = {each["job"] for each in row["processes"] if not each["foreign"]}
    assert owners >= {job.public_id for job in halves}, row  # other processes may use the GPU, too
    for job in halves:
        cluster.reach(job, JobState.COMPLETED)
    daemons = cluster.harness.folder
    cluster.until(
        lambda: not list(daemons.glob("*/state/mps/*/launch.json"))
    )  # or it would outlive its agent


def sample_of(cluster: GpuCluster, folder: Path) -> dict[str, Any]:
    """One sample of the node's agent, as the collector asks for it."""
    build_archive(folder / "agent.pyz")
    (folder / "node.json").write_text(json.dumps(cluster.node.settings))
    with open_local(
        folder / "agent.pyz", "watch", folder / "node.json", cluster=cluster.node.settings["cluster"]
    ) as link:
        return link.request("stats", timeout_s=20, once=True)["sample"]


def test_a_killed_training_continues_from_its_checkpoint_on_the_gpu(cluster: GpuCluster) -> None:
    job = cluster.submit_template(
        "torch-ddp", {"epochs": 30, "images": 8192}, max_attempts=3, retry_on=["command_failure"]
    )
    folder = cluster.home / "checkpoints" / job.public_id
    cluster.until(lambda: len(list(folder.glob("*.complete"))) >= 3)
    for path in cluster.harness.folder.glob(f"*/state/tasks/*{job.public_id}*/pid.json"):
        os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)
    cluster.reach(job, JobState.COMPLETED, JobState.FAILED)
    log = cluster.log(job)
    steps = [int(step) for step in re.findall(r"\bstep (\d+)", log)]
    assert job.state == JobState.COMPLETED.value and job.attempts.count() == 2, log
    assert len(steps) <= 33 and max(steps) == 30, steps  # few epochs twice


@pytest.mark.parametrize("rule", FAILURES)
def test_a_failure_of_cuda_is_recognized(cluster: GpuCluster, rule: str) -> None:
    program = cluster.harness.folder / f"{rule}.py"
    program.write_text(FAILURES[rule])
    job = cluster.submit("python", str(program))

    def identified() -> bool:
        identify_failures()
        return Job.objects.filter(pk=job.pk, attempts__failure_checked_at__isnull=False).exists()

    cluster.until(identified)
    attempt = job.attempts.get()
    print(f"\n--- {rule}: {attempt.failure_rule}: {attempt.failure_line}\n{cluster.log(job)}")
    assert attempt.failure_rule == rule, cluster.log(job)


def test_the_layers_of_a_model_are_measured_on_the_gpu_and_planned(cluster: GpuCluster) -> None:
    folder = cluster.harness.folder
    (folder / "models.py").write_text(MODEL)
    script = f'cd {folder} && exec python "$FAIRWAY_SECRETS/profile_layers.py" models:model '
    script += "--input 256,3,64,64 --output -"
    job = cluster.submit("sh", "-c", script, env={"LAYER_PROFILE": "convolutions"})
    cluster.reach(job, JobState.COMPLETED, JobState.FAILED)
    assert job.state == JobState.COMPLETED.value, cluster.log(job)

    def stored() -> bool:
        store_measured_profiles()
        return LayerProfile.objects.exists()

    cluster.until(stored)
    profile = LayerProfile.objects.get()
    print("\n" + json.dumps(profile.content))
    assert profile.content["device"] == cluster.gpu.model and len(profile.layers) == 10
    times = {each["id"]: each["fwd_ms"] for each in profile.content["nodes"]}
    assert all(value > 0 for value in times.values())
    read = parse_profile(json.dumps(profile.content))
    plan = compare_plans(read, [BandwidthLevel(8, 30e9), BandwidthLevel(2, 3e9)], CostModel.PAPER)
    print(json.dumps(plan)[:800])
    assert plan["stages"]
