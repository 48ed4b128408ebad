"""JSON schemas of the resources that jobs are exported as: the fields used, their types and rules.

Sources: the OpenAPI document of Kubernetes (batch/v1, core/v1), and the custom resource definitions of Kubeflow's
Training Operator 1.9 (kubeflow.org/v1), MPI Operator 0.6 (kubeflow.org/v2beta1), Trainer 2 (v1alpha1), and JobSet
(v1alpha2). Each object refuses fields that it does not have there.
"""

from __future__ import annotations

from typing import Any

DNS_1123_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
DNS_1035_LABEL = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
DNS_1123_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?$"
QUALIFIED_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
QUANTITY = r"^([0-9]+(\.[0-9]*)?)(([KMGTPE]i)|[numkMGTPE])?$"
ENV_NAME = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"

Schema = dict[str, Any]


def obj(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": least} | ({"maxItems": most} if most else {})


def text(pattern: str, most: int = 253) -> Schema:
    return {"type": "string", "pattern": pattern, "maxLength": most}


def whole(least: int = 0) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": 2**31 - 1}


FLAG = {"type": "boolean"}
TEXT = {"type": "string", "minLength": 1}
LABELS = {
    "type": "object",
    "propertyNames": text(QUALIFIED_NAME, 317),
    "additionalProperties": text(LABEL_VALUE, 63),
}
METADATA = obj({"name": text(DNS_1035_LABEL, 52), "labels": LABELS}, ("name",))
RESOURCES = {
    "type": "object",
    "propertyNames": text(QUALIFIED_NAME),
    "additionalProperties": {"anyOf": [whole(1), text(QUANTITY)]},
}
FIELD = {"enum": ["metadata.annotations['batch.kubernetes.io/job-completion-index']"]}
VARIABLE = {
    "oneOf": [
        obj({"name": text(ENV_NAME), "value": {"type": "string"}}, ("name", "value")),
        obj(
            {
                "name": text(ENV_NAME),
                "valueFrom": obj({"fieldRef": obj({"fieldPath": FIELD}, ("fieldPath",))}, ("fieldRef",)),
            },
            ("name", "valueFrom"),
        ),
    ]
}
CONTAINER = obj(
    {
        "name": text(DNS_1123_LABEL, 63),
        "image": TEXT,
        "command": array({"type": "string"}, 1),
        "env": array(VARIABLE),
        "resources": obj({"limits": RESOURCES, "requests": RESOURCES}),
        "volumeMounts": array(
            obj(
                {"name": text(DNS_1123_LABEL, 63), "mountPath": text(r"^/[^:]*$", 4096), "readOnly": FLAG},
                ("name", "mountPath"),
            )
        ),
    },
    ("name", "image"),
)
VOLUME = obj(
    {
        "name": text(DNS_1123_LABEL, 63),
        "emptyDir": obj({"medium": {"enum": ["", "Memory"]}, "sizeLimit": text(QUANTITY)}),
        "configMap": obj({"name": text(DNS_1123_SUBDOMAIN)}, ("name",)),
        "persistentVolumeClaim": obj(
            {"claimName": text(DNS_1123_SUBDOMAIN), "readOnly": FLAG}, ("claimName",)
        ),
    },
    ("name",),
) | {"minProperties": 2, "maxProperties": 2}
EXPRESSION = obj(
    {
        "key": text(QUALIFIED_NAME),
        "operator": {"enum": ["In"]},
        "values": array(text(LABEL_VALUE, 63) | {"minLength": 1}, 1),
    },
    ("key", "operator", "values"),
)
TERMS = obj(
    {"nodeSelectorTerms": array(obj({"matchExpressions": array(EXPRESSION, 1)}), 1)}, ("nodeSelectorTerms",)
)
POD = obj(
    {
        "terminationGracePeriodSeconds": whole(),
        "restartPolicy": {"enum": ["Never", "OnFailure"]},
        "subdomain": text(DNS_1123_LABEL, 63),
        "nodeSelector": LABELS,
        "affinity": obj(
            {"nodeAffinity": obj({"requiredDuringSchedulingIgnoredDuringExecution": TERMS})},
            ("nodeAffinity",),
        ),
        "containers": array(CONTAINER, 1, 1),
        "volumes": array(VOLUME),
    },
    ("containers",),
)
POD_TEMPLATE = obj({"metadata": obj({"labels": LABELS}), "spec": POD}, ("spec",))
BATCH_POD = POD_TEMPLATE | {
    "properties": POD_TEMPLATE["properties"] | {"spec": POD | {"required": ["containers", "restartPolicy"]}}
}
JOB = obj(
    {
        "completions": whole(1),
        "parallelism": whole(1),
        "completionMode": {"enum": ["Indexed", "NonIndexed"]},
        "backoffLimit": whole(),
        "activeDeadlineSeconds": whole(1),
        "template": BATCH_POD,
    },
    ("template",),
)
RUN_POLICY = obj(
    {
        "backoffLimit": whole(),
        "activeDeadlineSeconds": whole(1),
        "cleanPodPolicy": {"enum": ["Running", "All", "None"]},
    }
)


def replicas(names: tuple[str, ...], container: tuple[str, ...], required: tuple[str, ...] = ()) -> Schema:
    """Return the schema of the replica types of a job; the operator looks for a container with this name."""
    main = CONTAINER | {"properties": CONTAINER["properties"] | {"name": {"enum": list(container)}}}
    pod = POD | {"properties": POD["properties"] | {"containers": array(main, 1, 1)}}
    replica = obj(
        {
            "replicas": whole(1),
            "restartPolicy": {"enum": ["OnFailure", "Never", "Always", "ExitCode"]},
            "template": POD_TEMPLATE | {"properties": POD_TEMPLATE["properties"] | {"spec": pod}},
        },
        ("replicas", "template"),
    )
    return obj(dict.fromkeys(names, replica), required) | {"minProperties": 1}


PYTORCH = obj(
    {
        "runPolicy": RUN_POLICY,
        "nprocPerNode": text(r"^(auto|cpu|gpu|[1-9][0-9]*)$"),
        "elasticPolicy": obj(
            {
                "minReplicas": whole(1),
                "maxReplicas": whole(1),
                "rdzvBackend": {"enum": ["c10d", "etcd", "etcd-v2"]},
                "maxRestarts": whole(),
            }
        ),
        "pytorchReplicaSpecs": replicas(("Master", "Worker"), ("pytorch",)),
    },
    ("pytorchReplicaSpecs",),
)
TENSORFLOW = obj(
    {
        "runPolicy": RUN_POLICY,
        "tfReplicaSpecs": replicas(("Chief", "PS", "Worker", "Evaluator"), ("tensorflow",)),
    },
    ("tfReplicaSpecs",),
)
JAX = obj(
    {"runPolicy": RUN_POLICY, "jaxReplicaSpecs": replicas(("Worker",), ("jax",), ("Worker",))},
    ("jaxReplicaSpecs",),
)
MPI = obj(
    {
        "runPolicy": RUN_POLICY,
        "slotsPerWorker": whole(1),
        "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
        "mpiReplicaSpecs": replicas(("Launcher", "Worker"), ("launcher", "worker"), ("Launcher", "Worker")),
    },
    ("mpiReplicaSpecs",),
)
REPLICATED_JOB = obj(
    {
        "name": text(DNS_1123_LABEL, 63),
        "replicas": whole(1),
        "template": obj({"metadata": obj({"labels": LABELS}), "spec": JOB}, ("spec",)),
    },
    ("name", "template"),
)
RUNTIME = obj(
    {
        "mlPolicy": obj({"numNodes": whole(1), "torch": obj({}), "jax": obj({})}),
        "template": obj(
            {
                "spec": obj(
                    {
                        "replicatedJobs": array(REPLICATED_JOB, 1, 1),
                        "failurePolicy": obj({"maxRestarts": whole()}),
                    },
                    ("replicatedJobs",),
                )
            },
            ("spec",),
        ),
    },
    ("template",),
)
TRAIN_JOB = obj(
    {
        "runtimeRef": obj(
            {
                "apiGroup": {"const": "trainer.kubeflow.org"},
                "kind": {"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
                "name": text(DNS_1035_LABEL, 63),
            },
            ("name",),
        ),
        "trainer": obj({"numNodes": whole(1), "numProcPerNode": whole(1)}),
    },
    ("runtimeRef",),
)
SERVICE = obj(
    {
        "clusterIP": {"const": "None"},
        "publishNotReadyAddresses": FLAG,
        "selector": LABELS,
        "ports": array(obj({"name": text(DNS_1035_LABEL, 15), "port": whole(1)}, ("port",)), 1),
    },
    ("ports",),
)
_SPECS = {
    ("batch/v1", "Job"): JOB,
    ("kubeflow.org/v1", "PyTorchJob"): PYTORCH,
    ("kubeflow.org/v1", "TFJob"): TENSORFLOW,
    ("kubeflow.org/v1", "JAXJob"): JAX,
    ("kubeflow.org/v2beta1", "MPIJob"): MPI,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): RUNTIME,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_JOB,
    ("v1", "Service"): SERVICE,
}


def schema_of(api: str, kind: str) -> Schema:
    """Return the schema of a resource. Raise KeyError for another kind."""
    head = {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": METADATA}
    if (api, kind) == ("v1", "ConfigMap"):
        named = obj({"name": text(DNS_1123_SUBDOMAIN), "labels": LABELS}, ("name",))
        data = {"type": "object", "propertyNames": text(r"^[-._a-zA-Z0-9]+$"), "additionalProperties": TEXT}
        return obj({**head, "metadata": named, "data": data}, ("apiVersion", "kind", "metadata"))
    return obj({**head, "spec": _SPECS[api, kind]}, ("apiVersion", "kind", "metadata", "spec"))
