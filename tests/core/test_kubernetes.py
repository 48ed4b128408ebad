"""Jobs as resources of Kubernetes; the clients of Kubernetes and Kubeflow know every field."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agents.launchers import LAUNCHERS
from portal.domain.jobs.job_spec import JobRole, JobSpec, job_fields
from portal.domain.jobs.kubernetes import (
    EXPORT_KINDS,
    TRAINJOB,
    NotExportable,
    claim_names,
    escape,
    kubernetes_resources,
)
from tests.cached_environment import cached_environment
from tests.core.kubernetes_schemas import schema_of

IMAGE = "registry.example/torch:2.6"
PLAIN = JobSpec(
    name="Tune LR!", command=["python", "{fairway:secrets}/program"], program="print(1)", gpus_per_task=2,
    gpu_model="NVIDIA A100", volumes=[{"volume": "imagenet", "read_only": True}], env={"A": "b"}, priority=3,
    secrets=[], time_limit_s=3600, max_attempts=3,
)  # fmt: skip
TORCH = JobSpec(name="ddp", command=["python", "train.py"], launcher="torchrun", tasks=3, gpus_per_task=2)
ELASTIC = JobSpec(name="grow", command=["python", "train.py"], launcher="torchrun", tasks=4, min_tasks=2)
SERVERS = JobSpec(
    name="ps", command=["python", "train.py"], launcher="tensorflow", tasks=5,
    launcher_options={"strategy": "parameter_server", "parameter_servers": 2},
)  # fmt: skip
ROLES = JobSpec(
    name="roles", command=["python", "train.py"], launcher="tensorflow", gpus_per_task=1,
    roles=[JobRole(name="chief", gpus_per_task=0), JobRole(name="worker", tasks=2, memory_mib=4096)],
)  # fmt: skip


def exported(spec: JobSpec) -> dict[str, Any]:
    return kubernetes_resources(spec, IMAGE)[0][-1]


def test_one_task_is_a_job_with_its_program_and_volumes() -> None:
    (files, job), missing = kubernetes_resources(PLAIN, IMAGE)
    assert (files["kind"], files["data"]) == ("ConfigMap", {"program": "print(1)"})
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", "tune-lr")
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (2, 3600)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "/run/fairway/program"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100"}
    assert {"name": "volume-0", "mountPath": "/data/imagenet", "readOnly": True} in container["volumeMounts"]
    assert missing == ["priority"]


def test_equal_tasks_without_a_launcher_are_an_indexed_job() -> None:
    spec = exported(JobSpec(name="many", command=["true"], tasks=4))["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")


def test_torchrun_is_a_pytorchjob_with_a_master() -> None:
    job = exported(TORCH)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert job["kind"] == "PyTorchJob" and job["spec"]["nprocPerNode"] == "2"
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 2}
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["command"][:2] == ["torchrun", "--no-python"]


def test_an_elastic_job_has_workers_alone() -> None:
    spec = exported(ELASTIC)["spec"]
    assert (spec["elasticPolicy"]["minReplicas"], spec["elasticPolicy"]["maxReplicas"]) == (2, 4)
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]


def test_roles_of_tensorflow_are_replicas_of_a_tfjob() -> None:
    counts = {name: each["replicas"] for name, each in exported(SERVERS)["spec"]["tfReplicaSpecs"].items()}
    assert counts == {"Chief": 1, "PS": 2, "Worker": 2}
    replicas = exported(ROLES)["spec"]["tfReplicaSpecs"]
    limits = {
        name: each["template"]["spec"]["containers"][0]["resources"]["limits"]
        for name, each in replicas.items()
    }
    assert "nvidia.com/gpu" not in limits["Chief"] and limits["Worker"]["memory"] == "4096Mi"


@pytest.mark.parametrize(
    ("spec", "image", "message"),
    [
        (JobSpec(name="w", kind="workspace"), IMAGE, "not workspaces"),
        (PLAIN, None, "not an image"),
        (JobSpec(name="h", command=["x"], launcher="ray", tasks=2), IMAGE, "launchers none, torchrun"),
        (JobSpec(name="h", command=["x"], launcher="horovod", tasks=2, min_tasks=1), IMAGE, "may be elastic"),
        (
            JobSpec(name="t", launcher="tensorflow", roles=[JobRole(name="boss")]),
            IMAGE,
            "only the roles chief",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(spec: JobSpec, image: str | None, message: str) -> None:
    with pytest.raises(NotExportable, match=message):
        kubernetes_resources(spec, image)


# -- every export has the fields, names and values of the published schemas --------------------------


def wrong_with(resources: list[dict[str, Any]]) -> list[str]:
    """Return what the published schemas say against resources, and which references lead nowhere."""
    found = [
        f"{each['kind']}{error.json_path[1:]}: {error.message[:300]}"
        for each in resources
        for error in Draft202012Validator(schema_of(each["apiVersion"], each["kind"])).iter_errors(each)
    ]
    for container, pod in pods_of(resources):
        volumes, variables = (
            [each["name"] for each in group] for group in (pod["volumes"], container["env"])
        )
        found += [
            f"{each['name']} has no volume"
            for each in container["volumeMounts"]
            if each["name"] not in volumes
        ]
        found += [f"{each} occurs twice" for each in variables if variables.count(each) > 1]
    return found


def pods_of(value: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the containers of resources with their pods."""
    if isinstance(value, list):
        return [pair for each in value for pair in pods_of(each)]
    if not isinstance(value, dict):
        return []
    if "containers" in value:
        return [(each, value) for each in value["containers"]]
    return [pair for each in value.values() for pair in pods_of(each)]


def expand(value: str, variables: dict[str, str]) -> str:
    """Return what Kubernetes makes of a command or value: $$ is $, $(NAME) a variable if there is one."""
    read, rest = "", value
    while rest:
        if rest.startswith("$$"):
            read, rest = f"{read}$", rest[2:]
        elif rest.startswith("$(") and ")" in rest:
            name, rest = rest[2:].split(")", 1)
            read += variables.get(name, f"$({name})")
        else:
            read, rest = read + rest[0], rest[1:]
    return read


NAMES = st.from_regex(job_fields()["name"].pattern, fullmatch=True)
WORDS = st.text(st.sampled_from("aZ0$({}) /'-.:|\n"), max_size=12)
VOLUMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
MODELS = st.text(st.sampled_from("AH1080 |/_-.()é"), max_size=90)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    launcher = draw(st.sampled_from(["none", "torchrun", "tensorflow", "jax", "mpi", "horovod"]))
    tasks = draw(st.integers(1, 5))
    return JobSpec(
        name=draw(NAMES),
        command=draw(st.lists(WORDS, min_size=1, max_size=4)),
        program=draw(st.sampled_from(["", "print(1)"])),
        launcher=launcher,
        tasks=tasks,
        min_tasks=draw(st.none() | st.integers(1, tasks)),
        gpus_per_task=draw(st.integers(0, 8)),
        gpu_model=draw(MODELS),
        mig_profile=draw(st.sampled_from(["", "1g.10gb", "1g.5gb+me"])),
        env=draw(st.dictionaries(st.sampled_from(["A", "RANK", "MASTER_ADDR", "HOME"]), WORDS)),
        volumes=[{"volume": each} for each in draw(st.lists(VOLUMES, max_size=3, unique=True))],
        max_attempts=draw(st.integers(1, 20)),
        time_limit_s=draw(st.none() | st.integers(1, 10**6)),
        shm_mib=draw(st.integers(1, 2**20)),
        cpu_milli=draw(st.integers(100, 10**6)),
    )


@given(specs(), st.sampled_from(EXPORT_KINDS))
@settings(max_examples=200, deadline=None)
def test_every_export_is_valid_and_runs_the_same_command(spec: JobSpec, kind: str) -> None:
    try:
        resources, _ = kubernetes_resources(spec, IMAGE, kind)
    except NotExportable:
        return
    assert wrong_with(resources) == []
    command = list(spec.command)
    for container, _ in pods_of(resources):
        variables = {each["name"]: each.get("value", "0") for each in container["env"]}
        if "command" in container:
            read = [expand(word, variables) for word in container["command"]]
            assert read[-len(command) :] == command
        for name, value in spec.env.items():
            if name not in ("RANK", "MASTER_ADDR"):
                assert expand(variables[name], variables) == value


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", EXPORT_KINDS)
def test_a_launcher_is_exported_or_refused_with_a_sentence(launcher: str, kind: str) -> None:
    spec = JobSpec(name="7 up!", command=["python", "t.py"], launcher=launcher, tasks=2, gpus_per_task=4)
    try:
        resources, missing = kubernetes_resources(spec, IMAGE, kind)
    except NotExportable as error:
        assert str(error).endswith(".")
        return
    assert wrong_with(resources) == [] and missing == []
    assert all(each["metadata"]["name"].startswith("job-7-up") for each in resources)


MPI = JobSpec(
    name="pi", command=["python", "t.py"], launcher="mpi", tasks=2, gpus_per_task=4, env={"A": "1"},
    launcher_options={"map_by": "node"},
)  # fmt: skip
HOROVOD = JobSpec(name="hvd", command=["python", "t.py"], launcher="horovod", tasks=2, gpus_per_task=1)
JAX = JobSpec(name="jax", command=["python", "t.py"], launcher="jax", tasks=3, gpus_per_task=1)


def test_mpi_and_horovod_are_mpijobs_whose_launcher_has_no_gpus() -> None:
    job = exported(MPI)
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher, _), (worker, _) = pods_of(replicas)
    assert (job["apiVersion"], job["kind"], job["spec"]["slotsPerWorker"]) == (
        "kubeflow.org/v2beta1",
        "MPIJob",
        4,
    )
    assert (replicas["Launcher"]["replicas"], replicas["Worker"]["replicas"]) == (1, 2)
    line = " ".join(launcher["command"])
    assert "-np 8" in line and "--map-by node --bind-to none -x A python t.py" in line
    assert "nvidia.com/gpu" not in launcher["resources"]["limits"] and "command" not in worker
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 4
    horovod = pods_of(exported(HOROVOD))[0][0]
    assert {"name": "HOROVOD_CONTROLLER", "value": "mpi"} in horovod["env"]
    assert "-x HOROVOD_CONTROLLER" in " ".join(horovod["command"])


def test_jax_is_a_jaxjob_with_the_variables_of_the_launcher() -> None:
    job = exported(JAX)
    assert (job["kind"], job["spec"]["jaxReplicaSpecs"]["Worker"]["replicas"]) == ("JAXJob", 3)
    command = pods_of(job)[0][0]["command"]
    operator = {
        "COORDINATOR_ADDRESS": "jax-worker-0",
        "COORDINATOR_PORT": "6666",
        "NUM_PROCESSES": "3",
        "PROCESS_ID": "1",
    }
    shown = [*command[:3], "jax", "env"]
    output = subprocess.run(
        shown, env=operator | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    ).stdout
    assert "JAX_COORDINATOR_ADDRESS=jax-worker-0:6666" in output
    assert "JAX_NUM_PROCESSES=3" in output and "JAX_PROCESS_ID=1" in output
    assert command[4:] == ["python", "t.py"]


def test_a_trainjob_has_a_runtime_of_its_own() -> None:
    runtime, job = kubernetes_resources(TORCH, IMAGE, TRAINJOB)[0]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"],
    }  # fmt: skip
    assert job["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 2}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3, "torch": {}}
    assert pods_of(runtime)[0][0]["command"] == ["torchrun", "--no-python", "python", "train.py"]
    assert kubernetes_resources(JAX, IMAGE, TRAINJOB)[0][0]["spec"]["mlPolicy"] == {"numNodes": 3, "jax": {}}


def test_tasks_without_a_launcher_have_rank_variables_and_host_names() -> None:
    service, job = kubernetes_resources(JobSpec(name="many", command=["true"], tasks=4), IMAGE)[0]
    container, pod = pods_of(job)[0]
    variables = {each["name"]: each for each in container["env"]}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables["RANK"]["valueFrom"] == {"fieldRef": {"fieldPath": index}}
    assert (variables["WORLD_SIZE"]["value"], variables["MASTER_ADDR"]["value"]) == ("4", "many-0.many")
    assert pod["subdomain"] == service["metadata"]["name"] == "many"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "many"}


def test_alternatives_of_a_gpu_are_an_affinity() -> None:
    spec = JobSpec(name="a", command=["x"], gpu_model="NVIDIA A100-SXM4-80GB|NVIDIA H100 80GB HBM3")
    pod = pods_of(exported(spec))[0][1]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [
        {"key": "nvidia.com/gpu.product", "operator": "In",
         "values": ["NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3"]}
    ]  # fmt: skip
    assert "nodeSelector" not in pod


def test_claims_have_valid_names_of_their_own() -> None:
    assert claim_names(["ImageNet", "runs"]) == {"ImageNet": "imagenet", "runs": "runs"}
    both = claim_names(["Data", "data", "DATA", "da_ta", "_"])
    assert both["data"] == "data" and both["da_ta"] == "da-ta" and len(set(both.values())) == 5


@pytest.mark.parametrize(
    ("given_text", "escaped"),
    [
        ("$(HOME)", "$$(HOME)"),
        ("$HOME", "$HOME"),
        ("echo $$", "echo $$$$"),
        ("$$(A)", "$$$$(A)"),
        ("a$", "a$"),
    ],
)
def test_text_that_kubernetes_would_expand_is_escaped(given_text: str, escaped: str) -> None:
    assert escape(given_text) == escaped
    assert expand(escaped, {"HOME": "x", "A": "y"}) == given_text


READ = """
import json, sys
from kubeflow.training import models as kubeflow
from kubernetes.client import ApiClient, models as kubernetes

def check(value, name, path):
    if name.startswith("list["):
        return [check(each, name[5:-1], path) for each in value]
    if name.startswith("dict("):
        return [check(each, name[5:-1].partition(", ")[2], f"{path}.{key}") for key, each in value.items()]
    model = getattr(kubeflow, name, None) or getattr(kubernetes, name, None)
    if not hasattr(model, "attribute_map"):
        return None
    types = {key: model.openapi_types[attribute] for attribute, key in model.attribute_map.items()}
    for key, each in value.items():
        assert key in types, f"{path}.{key}"
        check(each, types[key], f"{path}.{key}")

for each in json.load(sys.stdin):
    group = "KubeflowOrgV1" if each["apiVersion"] == "kubeflow.org/v1" else "V1"
    check(each, group + each["kind"], each["kind"])
    print(each["kind"])
"""


@pytest.mark.long
def test_the_clients_of_kubernetes_and_kubeflow_know_every_field() -> None:
    cache = cached_environment("kubeflow-training==1.9.3")
    found = [
        each
        for spec in (PLAIN, TORCH, ELASTIC, SERVERS, ROLES, JAX)
        for each in kubernetes_resources(spec, IMAGE)[0]
    ]
    read = subprocess.run(
        [str(cache / "bin/python"), "-c", READ], input=json.dumps(found), capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr
    assert read.stdout.split() == ["ConfigMap", "Job", "PyTorchJob", "PyTorchJob", "TFJob", "TFJob", "JAXJob"]


def test_every_pod_of_a_role_has_the_command_of_the_role_or_of_the_job() -> None:
    own = JobRole(name="worker", command=["python", "worker.py"], may_fail=True)
    roles = JobSpec(
        name="roles",
        command=["python", "train.py"],
        launcher="tensorflow",
        roles=[JobRole(name="chief"), own],
    )
    (job,), missing = kubernetes_resources(roles, IMAGE)
    commands = {
        name: replica["template"]["spec"]["containers"][0].get("command")
        for name, replica in job["spec"]["tfReplicaSpecs"].items()
    }
    assert commands == {"Chief": ["python", "train.py"], "Worker": ["python", "worker.py"]}
    assert missing == ["roles.may_fail"]


@pytest.mark.parametrize("kind", EXPORT_KINDS)
def test_restarts_of_processes_are_arguments_of_torchrun(kind: str) -> None:
    spec = replace(TORCH, launcher_options={"max_restarts": 3})
    resources, missing = kubernetes_resources(spec, IMAGE, kind)
    assert json.dumps(["torchrun", "--max-restarts=3", "--no-python", "python"])[:-1] in json.dumps(resources)
    assert missing == []


def test_the_controller_of_horovod_is_listed_where_the_export_uses_another() -> None:
    spec = JobSpec(name="h", command=["t"], launcher="horovod", launcher_options={"controller": "gloo"})
    assert kubernetes_resources(spec, IMAGE)[1] == ["launcher_options"]
    assert kubernetes_resources(replace(spec, launcher_options={"controller": "mpi"}), IMAGE)[1] == []
