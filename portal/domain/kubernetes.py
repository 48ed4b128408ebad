"""A job as resources of Kubernetes: a Job, or a PyTorchJob or TFJob of Kubeflow's Training Operator. Pure.

Field names are those of https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ and of
kubeflow.org/v1 (https://www.kubeflow.org/docs/components/trainer/legacy-v1/).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from portal.domain.job_spec import JobRole, JobSpec, job_fields
from portal.domain.states import JobKind

SECRETS_DIR = "/run/fairway"
_EXPORTED = {
    "name", "kind", "tasks", "min_tasks", "gpus_per_task", "gpu_model", "mig_profile", "cpu_milli", "memory_mib",
    "shm_mib", "command", "program", "env", "volumes", "time_limit_s", "termination_grace_s", "max_attempts",
    "launcher", "launcher_options", "roles",
}  # fmt: skip
_WITHOUT_EFFECT = {"parameters", "template_version", "held", "start_after"}
_TF_REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}


class NotExportable(ValueError):
    """The job has no counterpart in Kubernetes."""


def kubernetes_resources(spec: JobSpec, image: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the resources of a job, and the names of its fields that they do not express.

    Raise NotExportable.
    """
    if spec.kind != JobKind.TRAINING.value:
        raise NotExportable("Only jobs are exported, not workspaces or services.")
    if image is None:
        raise NotExportable("Its environment is a virtual environment of a node, not an image.")
    labels = {"app.kubernetes.io/managed-by": "fairway-export"}
    name = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:50].strip("-") or "job"
    kind, body = _workload(spec, image, name)
    api = "batch/v1" if kind == "Job" else "kubeflow.org/v1"
    metadata = {"name": name, "labels": labels}
    found: list[dict[str, Any]] = [{"apiVersion": api, "kind": kind, "metadata": metadata, "spec": body}]
    if spec.program:
        config = {"name": f"{name}-files", "labels": labels}
        found.insert(
            0,
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": config, "data": {"program": spec.program}},
        )
    return found, [
        each
        for each, rule in job_fields(type(spec)).items()
        if each not in _EXPORTED | _WITHOUT_EFFECT
        and (value := getattr(spec, each)) != rule.default
        and (value or rule.default)  # an empty list equals an empty tuple
    ]


def _workload(spec: JobSpec, image: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return kind and ``spec`` of the resource."""
    policy: dict[str, Any] = {"backoffLimit": spec.max_attempts - 1}
    policy |= {"activeDeadlineSeconds": spec.time_limit_s} if spec.time_limit_s else {}
    options = spec.launcher_options
    if spec.launcher == "torchrun" and not spec.roles:
        command = ["torchrun", "--no-python", *spec.command]
        processes = options.get("processes_per_task") or max(1, spec.gpus_per_task)
        template = _pod(spec, image, name, "pytorch", command)
        body = {"nprocPerNode": str(processes), "runPolicy": {**policy, "cleanPodPolicy": "Running"}}
        if spec.min_tasks is not None and spec.is_elastic:
            elastic = {"minReplicas": spec.min_tasks, "maxReplicas": spec.tasks, "rdzvBackend": "c10d"}
            elastic |= {"maxRestarts": options.get("max_restarts", 0)}
            replicas = {"Worker": _replica(spec.tasks, template)}
            return "PyTorchJob", {**body, "elasticPolicy": elastic, "pytorchReplicaSpecs": replicas}
        replicas = {"Master": _replica(1, template)}
        replicas |= {"Worker": _replica(spec.tasks - 1, template)} if spec.tasks > 1 else {}
        return "PyTorchJob", {**body, "pytorchReplicaSpecs": replicas}
    if spec.launcher == "tensorflow":
        replicas = {
            _TF_REPLICAS[role.name]: _replica(
                role.tasks, _pod(spec, image, name, "tensorflow", role.command, role)
            )
            for role in spec.roles or _tensorflow_roles(spec)
            if role.name in _TF_REPLICAS
        }
        if len(replicas) < len(spec.roles):
            raise NotExportable(f"A TFJob has only the roles {', '.join(_TF_REPLICAS)}.")
        return "TFJob", {"runPolicy": {**policy, "cleanPodPolicy": "Running"}, "tfReplicaSpecs": replicas}
    if spec.launcher != "none" or spec.roles or spec.is_elastic:
        raise NotExportable(
            "Jobs are exported with the launchers none, torchrun and tensorflow. Only those of tensorflow may have "
            "roles, and only those of torchrun may be elastic."
        )
    indexed = {"completions": spec.tasks, "parallelism": spec.tasks, "completionMode": "Indexed"}
    template = _pod(spec, image, name, "main", spec.command)
    template["spec"]["restartPolicy"] = "Never"
    return "Job", {**policy, **(indexed if spec.tasks > 1 else {}), "template": template}


def _tensorflow_roles(spec: JobSpec) -> list[JobRole]:
    """Return the roles of a job whose tasks are equal, in the order of the launcher."""
    options, tasks = spec.launcher_options, spec.tasks
    if options.get("strategy") != "parameter_server":
        return [JobRole(name="worker", tasks=tasks, command=spec.command)]
    servers, evaluators = int(options.get("parameter_servers", 1)), int(bool(options.get("evaluator")))
    counts = {"chief": 1, "ps": servers, "worker": tasks - 1 - servers - evaluators, "evaluator": evaluators}
    return [
        JobRole(name=name, tasks=count, command=spec.command) for name, count in counts.items() if count > 0
    ]


def _replica(count: int, template: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "OnFailure", "template": copy.deepcopy(template)}


def _pod(
    spec: JobSpec, image: str, name: str, container: str, command: Sequence[str], role: JobRole | None = None
) -> dict[str, Any]:
    """Return the template of the pods of a role, or of all tasks."""
    names = ("gpus_per_task", "cpu_milli", "memory_mib")
    amounts = {each: getattr(spec, each) for each in names}
    amounts |= {each: own for each in names if role and (own := getattr(role, each)) is not None}
    limits: dict[str, Any] = {"cpu": f"{amounts['cpu_milli']}m", "memory": f"{amounts['memory_mib']}Mi"}
    if amounts["gpus_per_task"]:
        resource = f"nvidia.com/mig-{spec.mig_profile}" if spec.mig_profile else "nvidia.com/gpu"
        limits[resource] = amounts["gpus_per_task"]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{spec.shm_mib}Mi"}}
    ]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    for number, each in enumerate(spec.volumes):
        claim = {"claimName": each["volume"], "readOnly": bool(each.get("read_only"))}
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": claim})
        target = each.get("target") or f"/data/{each['volume']}"
        mounts.append({"name": f"volume-{number}", "mountPath": target, "readOnly": claim["readOnly"]})
    variables = dict(spec.env)
    if spec.program:
        volumes.append({"name": "files", "configMap": {"name": f"{name}-files"}})
        mounts.append({"name": "files", "mountPath": SECRETS_DIR, "readOnly": True})
        variables["FAIRWAY_SECRETS"] = SECRETS_DIR
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": spec.termination_grace_s,
        "containers": [
            {
                "name": container,
                "image": image,
                "command": [word.replace("{fairway:secrets}", SECRETS_DIR) for word in command],
                "env": [{"name": key, "value": value} for key, value in variables.items()],
                "resources": {"limits": limits, "requests": dict(limits)},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if spec.gpu_model and amounts["gpus_per_task"]:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": spec.gpu_model.replace(" ", "-")}
    return {"spec": pod}
