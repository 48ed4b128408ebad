"""Two enrolled nodes with real SSH and podman, and jobs for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portal.domain.states import RuntimeKind
from portal.models import ClusterSettings, Job, Node
from tests import factories
from tests.engine_harness import InProcessEngine
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.rig.rootless import enrol_rootless


def two_rig_nodes(
    make_rig: Any,
    cluster: RigCluster,
    image: RigImage,
    stores: Sequence[Sequence[Path]],
    settings: Any,
    folder: Path,
    gpus: int = 4,
    exported_roots: Sequence[str] = (),
    rootless: bool = False,
) -> dict[str, Any]:
    """Two nodes that answer, each with an image store and pretend GPUs, and an environment of the image.

    ``exported_roots`` are the folders below which they show volumes. ``rootless`` nodes load the image.
    """
    settings.DATA_DIR = folder
    settings.LOG_DIR = folder / "logs"
    settings.KEY_FILES = {
        "control": str(cluster.keys["control"]),
        "watch": "",
        "tunnel": "",
        "signing": "",
    }
    machines: list[RigNode] = make_rig(2, image_stores=stores, gpus=gpus).nodes
    factories.cluster_settings()
    ClusterSettings.objects.update(cluster_id=cluster.id)
    pool = factories.pool()
    nodes = []
    for machine in machines:
        if exported_roots:
            machine.set_local(allowed_mount_roots=list(exported_roots))
        if rootless:
            enrol_rootless(cluster, machine, image)
        else:
            cluster.enrol(machine)
        target = cluster.target(machine)
        nodes.append(
            Node.objects.create(
                name=machine.name,
                pool=pool,
                host=target.host,
                port=target.port,
                ssh_user=target.user,
                host_key=target.host_key,
                runtime=RuntimeKind.PODMAN.value,
            )
        )
    owner = factories.user("ada")
    dataset = {
        "machines": machines,
        "nodes": nodes,
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(tool=False, image=image.name, archive=str(image.archive)),
        "engine": InProcessEngine(),
    }
    wait_until(dataset, lambda: Node.objects.filter(state="ready", reachable=True).count() == 2)
    return dataset


def wait_until(dataset, condition, job: Job | None = None, within_s: float = 60.0) -> None:
    assert dataset["engine"].run_until(condition, within_s), describe(job) if job else "not reached"


def submit(dataset, *command: str, **fields) -> Job:
    fields = {"memory_mib": 64, "termination_grace_s": 1, **fields}
    return factories.job(
        dataset["owner"], dataset["project"], dataset["environment"], command=list(command), **fields
    )


def in_state(job: Job, state: str):
    return lambda: job.refresh_from_db() or job.state == state


def describe(job: Job) -> str:
    tasks = [f"{t.node} {t.state} {t.status_message}" for a in job.attempts.all() for t in a.task_rows.all()]
    return "\n".join(
        [f"{e.kind} {e.before}>{e.after} {e.reason} {e.message}" for e in job.events.all()] + tasks
    )
