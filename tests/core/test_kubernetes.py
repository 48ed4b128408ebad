"""Jobs as resources of Kubernetes; the clients of Kubernetes and Kubeflow know every field."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from portal.domain.job_spec import JobRole, JobSpec
from portal.domain.kubernetes import NotExportable, kubernetes_resources
from tests.cached_environment import cached_environment

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
        (JobSpec(name="h", command=["x"], launcher="horovod", tasks=2), IMAGE, "launchers none, torchrun"),
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
        for spec in (PLAIN, TORCH, ELASTIC, SERVERS, ROLES)
        for each in kubernetes_resources(spec, IMAGE)[0]
    ]
    read = subprocess.run(
        [str(cache / "bin/python"), "-c", READ], input=json.dumps(found), capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr
    assert read.stdout.split() == ["ConfigMap", "Job", "PyTorchJob", "PyTorchJob", "TFJob", "TFJob"]
