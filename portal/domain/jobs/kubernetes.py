"""A job as resources of Kubernetes: a Job, or one of the kinds of Kubeflow. Pure.

Field names are those of https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/, of Kubeflow's
Training Operator (kubeflow.org/v1, https://www.kubeflow.org/docs/components/trainer/legacy-v1/) and MPI Operator
(kubeflow.org/v2beta1, https://github.com/kubeflow/mpi-operator), and of Kubeflow Trainer
(trainer.kubeflow.org/v1alpha1, https://www.kubeflow.org/docs/components/trainer/).
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from portal.domain.jobs.job_spec import JobRole, JobSpec, job_fields
from portal.domain.states import JobKind

SECRETS_DIR = "/run/fairway"
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
DEFAULT, TRAINJOB = "default", "trainjob"
EXPORT_KINDS = (DEFAULT, TRAINJOB)
"""The kind for the launcher of the job, or a TrainJob of Kubeflow Trainer v2."""
_EXPORTED = {
    "name", "kind", "tasks", "min_tasks", "gpus_per_task", "gpu_model", "mig_profile", "cpu_milli", "memory_mib",
    "shm_mib", "command", "program", "env", "volumes", "time_limit_s", "termination_grace_s", "max_attempts",
    "launcher", "launcher_options", "roles",
}  # fmt: skip
_WITHOUT_EFFECT = {"parameters", "template_version", "held", "start_after"}
_TF_REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}
_APIS = {"Job": "batch/v1", "MPIJob": "kubeflow.org/v2beta1", "TrainJob": TRAINER_API}
_KUBEFLOW_API = "kubeflow.org/v1"
_LABELS = {"app.kubernetes.io/managed-by": "fairway-export"}
_EXPORTED_OPTIONS = {
    "torchrun": {"processes_per_task", "max_restarts"},
    "tensorflow": {"strategy", "parameter_servers", "evaluator"},
    "mpi": {"map_by", "bind_to"},
    "horovod": {"controller"},
}
_RENDEZVOUS_PORT = 29500
_TASK_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_MAX_NAME = 50
"""Operators append such as ``-worker-1023`` to names, which have at most 63 characters."""
_JAX_VARIABLES = (
    'export JAX_COORDINATOR_ADDRESS="$COORDINATOR_ADDRESS:$COORDINATOR_PORT" JAX_NUM_PROCESSES="$NUM_PROCESSES" '
    'JAX_PROCESS_ID="$PROCESS_ID"; exec "$@"'
)
"""The Training Operator has other names for what the launcher sets."""


class NotExportable(ValueError):
    """The job has no counterpart in Kubernetes."""


def kubernetes_resources(
    spec: JobSpec, image: str | None, kind: str = DEFAULT
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the resources of a job, and the names of its fields that they do not express.

    ``kind`` is one of EXPORT_KINDS. Raise NotExportable.
    """
    if spec.kind != JobKind.TRAINING.value:
        raise NotExportable("Only jobs are exported, not workspaces or services.")
    if image is None:
        raise NotExportable("Its environment is a virtual environment of a node, not an image.")
    name = resource_name(spec.name)
    found: list[dict[str, Any]] = []
    if spec.program:
        found.append(_resource("v1", "ConfigMap", f"{name}-files") | {"data": {"program": spec.program}})
    found += _train_job(spec, image, name) if kind == TRAINJOB else _workload(spec, image, name)
    missing = [
        each
        for each, rule in job_fields(type(spec)).items()
        if each not in _EXPORTED | _WITHOUT_EFFECT
        and (value := getattr(spec, each)) != rule.default
        and (value or rule.default)  # an empty list equals an empty tuple
    ]
    is_gloo = spec.launcher == "horovod" and spec.launcher_options.get("controller") == "gloo"
    if is_gloo or spec.launcher_options.keys() - _EXPORTED_OPTIONS.get(spec.launcher, set()):
        missing.append("launcher_options")
    for each in ("ports", "start_order", "may_fail"):
        if any(getattr(role, each) for role in spec.roles):
            missing.append(f"roles.{each}")
    if spec.gpu_model and spec.gpus_per_task and not _gpu_products(spec):
        missing.append("gpu_model")
    return found, missing


def resource_name(name: str) -> str:
    """Return a name of at most 50 characters that is valid for all resources (DNS labels of RFC 1035)."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "job"
    if not words[0].isalpha():
        words = f"job-{words}"
    return words[:_MAX_NAME].rstrip("-")


def claim_names(volumes: Sequence[str]) -> dict[str, str]:
    """Return the names of the claims of volumes (DNS labels): in lower case, other characters as hyphens.

    A name that is longer than 63 characters, or another volume has, ends with part of the hash of the volume's name.
    """
    found: dict[str, str] = {}
    for volume in sorted(volumes, key=lambda each: (each != each.lower(), each)):
        name = re.sub(r"[^a-z0-9-]+", "-", volume.lower()).strip("-")
        if not name or len(name) > 63 or name in found.values():
            digest = hashlib.sha256(volume.encode()).hexdigest()[:6]
            name = f"{name[:50].strip('-')}-{digest}".strip("-")
        found[volume] = name
    return found


def escape(text: str) -> str:
    """Return a text of a command or variable that Kubernetes does not expand: ``$(NAME)`` is ``$$(NAME)``.

    Kubernetes also takes each ``$$`` for one dollar sign.
    """
    return re.sub(r"\$\$+|\$(?=\()", lambda match: match[0] * 2, text)


def _resource(api: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": dict(_LABELS)}}


def _workload(spec: JobSpec, image: str, name: str) -> list[dict[str, Any]]:
    """Return the resource for the launcher of the job, with what it needs."""
    policy: dict[str, Any] = {"backoffLimit": spec.max_attempts - 1}
    policy |= {"activeDeadlineSeconds": spec.time_limit_s} if spec.time_limit_s else {}
    running = {**policy, "cleanPodPolicy": "Running"}
    before: list[dict[str, Any]] = []
    if spec.launcher == "tensorflow":
        kind, body = (
            "TFJob",
            {"runPolicy": running, "tfReplicaSpecs": _tensorflow_replicas(spec, image, name)},
        )
    elif spec.roles or (spec.is_elastic and spec.launcher != "torchrun"):
        raise NotExportable(
            "Only jobs with the launcher tensorflow may have roles, and only those with torchrun may be elastic."
        )
    elif spec.launcher == "torchrun":
        kind, body = "PyTorchJob", {**_torchrun_body(spec, image, name), "runPolicy": running}
    elif spec.launcher == "jax":
        words = ["/bin/sh", "-c", _JAX_VARIABLES, "jax", *spec.command] if spec.tasks > 1 else spec.command
        replicas = {"Worker": _replica(spec.tasks, _pod(spec, image, name, "jax", words))}
        kind, body = "JAXJob", {"runPolicy": running, "jaxReplicaSpecs": replicas}
    elif spec.launcher in ("mpi", "horovod"):
        kind, body = "MPIJob", {**_mpi_body(spec, image, name), "runPolicy": running}
    elif spec.launcher == "none":
        kind, body = "Job", {**policy, **_indexed(spec, image, name)}
        before = [_rendezvous_service(name)] if spec.tasks > 1 else []
    else:
        raise NotExportable(
            "Jobs are exported with the launchers none, torchrun, tensorflow, jax, mpi and horovod."
        )
    api = _APIS.get(kind, _KUBEFLOW_API)
    return [*before, _resource(api, kind, name) | {"spec": body}]


def _torchrun_body(spec: JobSpec, image: str, name: str) -> dict[str, Any]:
    options = spec.launcher_options
    template = _pod(spec, image, name, "pytorch", _torchrun_command(spec))
    body = {"nprocPerNode": str(_processes(spec))}
    if spec.min_tasks is not None and spec.is_elastic:
        elastic = {"minReplicas": spec.min_tasks, "maxReplicas": spec.tasks, "rdzvBackend": "c10d"}
        elastic |= {"maxRestarts": options.get("max_restarts", 0)}
        return {
            **body,
            "elasticPolicy": elastic,
            "pytorchReplicaSpecs": {"Worker": _replica(spec.tasks, template)},
        }
    replicas = {"Master": _replica(1, template)}
    replicas |= {"Worker": _replica(spec.tasks - 1, template)} if spec.tasks > 1 else {}
    return {**body, "pytorchReplicaSpecs": replicas}


def _torchrun_command(spec: JobSpec) -> list[str]:
    """Return the command of a task; only an elastic PyTorchJob has a field for the restarts of its processes."""
    restarts = 0 if spec.is_elastic else int(spec.launcher_options.get("max_restarts") or 0)
    options = [f"--max-restarts={restarts}"] if restarts else []
    return ["torchrun", *options, "--no-python", *spec.command]


def _processes(spec: JobSpec) -> int:
    return int(spec.launcher_options.get("processes_per_task") or max(1, spec.gpus_per_task))


def _tensorflow_replicas(spec: JobSpec, image: str, name: str) -> dict[str, Any]:
    replicas = {
        _TF_REPLICAS[role.name]: _replica(
            role.tasks, _pod(spec, image, name, "tensorflow", role.command, role)
        )
        for role in spec.roles or _tensorflow_roles(spec)
        if role.name in _TF_REPLICAS
    }
    if len(replicas) < len(spec.roles):
        raise NotExportable(f"A TFJob has only the roles {', '.join(_TF_REPLICAS)}.")
    return replicas


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


def _mpi_body(spec: JobSpec, image: str, name: str) -> dict[str, Any]:
    """Return an MPIJob: mpirun in a launcher without GPUs, and sshd, which the operator starts, in the workers."""
    slots, options = max(1, spec.gpus_per_task), spec.launcher_options
    variables = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    variables = dict(spec.env) | (variables if spec.launcher == "horovod" else {})
    if spec.program:
        variables["FAIRWAY_SECRETS"] = SECRETS_DIR
    words = [
        "mpirun",
        "--allow-run-as-root",
        "-np",
        str(spec.tasks * slots),
        "--hostfile",
        "/etc/mpi/hostfile",
    ]
    words += [
        "--map-by",
        str(options.get("map_by", "slot")),
        "--bind-to",
        str(options.get("bind_to", "none")),
    ]
    words += [word for each in variables for word in ("-x", each)]
    launcher = JobRole(name="launcher", gpus_per_task=0)
    pods = {
        "Launcher": _pod(spec, image, name, "launcher", [*words, *spec.command], launcher, variables),
        "Worker": _pod(spec, image, name, "worker", (), None, variables),
    }
    counts = {"Launcher": 1, "Worker": spec.tasks}
    return {
        "slotsPerWorker": slots,
        "mpiImplementation": "OpenMPI",
        "mpiReplicaSpecs": {each: _replica(counts[each], pod) for each, pod in pods.items()},
    }


def _indexed(spec: JobSpec, image: str, name: str) -> dict[str, Any]:
    """Return the body of a Job whose tasks have the rank variables of the launcher ``none``."""
    template = _pod(spec, image, name, "main", spec.command)
    template["spec"]["restartPolicy"] = "Never"
    if spec.tasks == 1:
        return {"template": template}
    template["spec"]["subdomain"] = name
    _set_ranks(template, spec.tasks, f"{name}-0.{name}")
    counts = {"completions": spec.tasks, "parallelism": spec.tasks, "completionMode": "Indexed"}
    return {**counts, "template": template}


def _set_ranks(template: dict[str, Any], tasks: int, first_task: str) -> None:
    """Add the rank variables of an indexed job; they take the place of variables of the job, as in Fairway."""
    index = {"valueFrom": {"fieldRef": {"fieldPath": _TASK_INDEX}}}
    variables: dict[str, dict[str, Any]] = {
        "RANK": index,
        "NODE_RANK": copy.deepcopy(index),
        "WORLD_SIZE": {"value": str(tasks)},
        "LOCAL_RANK": {"value": "0"},
        "LOCAL_WORLD_SIZE": {"value": "1"},
        "MASTER_ADDR": {"value": first_task},
        "MASTER_PORT": {"value": str(_RENDEZVOUS_PORT)},
    }
    (container,) = template["spec"]["containers"]
    own = [each for each in container["env"] if each["name"] not in variables]
    container["env"] = [*own, *({"name": key, **value} for key, value in variables.items())]


def _rendezvous_service(name: str) -> dict[str, Any]:
    """Return the headless service that gives the pods of an indexed job their host names."""
    return _resource("v1", "Service", name) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": _RENDEZVOUS_PORT}],
        }
    }


def _train_job(spec: JobSpec, image: str, name: str) -> list[dict[str, Any]]:
    """Return a TrainJob with a TrainingRuntime of its own, which has the volumes and the choice of nodes."""
    if spec.roles or spec.is_elastic or spec.launcher not in ("none", "torchrun", "jax"):
        raise NotExportable(
            "A TrainJob has one of the launchers none, torchrun and jax, without roles, and is not elastic."
        )
    command = _torchrun_command(spec) if spec.launcher == "torchrun" else spec.command
    pod = _pod(spec, image, name, "node", command)
    pod["spec"]["restartPolicy"] = "Never"
    if spec.launcher == "none" and spec.tasks > 1:
        _set_ranks(pod, spec.tasks, f"{name}-node-0-0.{name}")
    policy: dict[str, Any] = {"numNodes": spec.tasks}
    policy |= {"torchrun": {"torch": {}}, "jax": {"jax": {}}}.get(spec.launcher, {})
    job: dict[str, Any] = {"backoffLimit": 0, "template": pod}
    job |= {"activeDeadlineSeconds": spec.time_limit_s} if spec.time_limit_s else {}
    step = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": job}
    set_spec: dict[str, Any] = {"replicatedJobs": [{"name": "node", "template": step}]}
    if spec.max_attempts > 1:  # all tasks start again together
        set_spec["failurePolicy"] = {"maxRestarts": spec.max_attempts - 1}
    runtime = {"mlPolicy": policy, "template": {"spec": set_spec}}
    trainer: dict[str, Any] = {"numNodes": spec.tasks}
    trainer |= {"numProcPerNode": _processes(spec)} if spec.launcher == "torchrun" else {}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    return [
        _resource(TRAINER_API, "TrainingRuntime", name) | {"spec": runtime},
        _resource(TRAINER_API, "TrainJob", name) | {"spec": {"runtimeRef": reference, "trainer": trainer}},
    ]


def _replica(count: int, template: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "OnFailure", "template": copy.deepcopy(template)}


def _pod(
    spec: JobSpec,
    image: str,
    name: str,
    container: str,
    command: Sequence[str],
    role: JobRole | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the template of the pods of a role, or of all tasks; an empty command is that of the operator."""
    names = ("gpus_per_task", "cpu_milli", "memory_mib")
    amounts = {each: getattr(spec, each) for each in names}
    amounts |= {each: own for each in names if role and (own := getattr(role, each)) is not None}
    limits: dict[str, Any] = {"cpu": f"{amounts['cpu_milli']}m", "memory": f"{amounts['memory_mib']}Mi"}
    if amounts["gpus_per_task"]:
        resource = f"nvidia.com/mig-{spec.mig_profile}" if spec.mig_profile else "nvidia.com/gpu"
        limits[resource.replace("+", ".")] = amounts["gpus_per_task"]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{spec.shm_mib}Mi"}}
    ]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    claims = claim_names([each["volume"] for each in spec.volumes])
    for number, each in enumerate(spec.volumes):
        claim = {"claimName": claims[each["volume"]], "readOnly": bool(each.get("read_only"))}
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": claim})
        target = each.get("target") or f"/data/{each['volume']}"
        mounts.append({"name": f"volume-{number}", "mountPath": target, "readOnly": claim["readOnly"]})
    env = dict(spec.env if variables is None else variables)
    if spec.program:
        volumes.append({"name": "files", "configMap": {"name": f"{name}-files"}})
        mounts.append({"name": "files", "mountPath": SECRETS_DIR, "readOnly": True})
        env["FAIRWAY_SECRETS"] = SECRETS_DIR
    main: dict[str, Any] = {
        "name": container,
        "image": image,
        "env": [{"name": key, "value": escape(value)} for key, value in env.items()],
        "resources": {"limits": limits, "requests": dict(limits)},
        "volumeMounts": mounts,
    }
    if command:
        words = [word.replace("{fairway:secrets}", SECRETS_DIR) for word in command]
        main["command"] = [escape(word) for word in words]
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": spec.termination_grace_s,
        "containers": [main],
        "volumes": volumes,
    }
    if amounts["gpus_per_task"]:
        pod |= _gpu_nodes(_gpu_products(spec))
    return {"spec": pod}


def _gpu_products(spec: JobSpec) -> list[str]:
    """Return the values of the label nvidia.com/gpu.product that the job accepts."""
    values = (
        re.sub(r"[^A-Za-z0-9._-]+", "-", model)[:63].strip("._-") for model in spec.gpu_model.split("|")
    )
    return list(dict.fromkeys(filter(None, values)))


def _gpu_nodes(products: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a pod that choose nodes with one of these GPUs."""
    if len(products) < 2:
        return {"nodeSelector": {"nvidia.com/gpu.product": products[0]}} if products else {}
    expression = {"key": "nvidia.com/gpu.product", "operator": "In", "values": list(products)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}
