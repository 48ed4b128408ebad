"""Rows for tests, made through the services where they have rules of their own."""

from __future__ import annotations

import itertools
from typing import Any

from portal.domain.states import Role
from portal.models import (
    ClusterSettings,
    Environment,
    Gpu,
    Job,
    LayerProfile,
    Membership,
    Node,
    NodePool,
    PipelinePlan,
    Project,
    User,
)
from portal.services.jobs.submission import JobRequest, do_submit_job
from scheduler.pipeline_plans import answer_plan_query

_numbers = itertools.count(1)

PASSWORD = "correct horse battery staple"


def user(name: str = "", *, admin: bool = False, password: str | None = None) -> User:
    """A saved person."""
    return User.objects.create_user(name or f"person-{next(_numbers)}", password, is_admin=admin)


def project(name: str = "", *, parent: Project | None = None, **roles: User) -> Project:
    """A project; ``manager=``, ``member=`` and ``viewer=`` place people in it."""
    row = Project.objects.create(name=name or f"project-{next(_numbers)}", parent=parent)
    for role, user in roles.items():
        Membership.objects.create(project=row, user=user, role=Role(role).value)
    return row


def pool(name: str = "") -> NodePool:
    """An empty pool."""
    return NodePool.objects.create(name=name or f"pool-{next(_numbers)}")


def node(
    pool_row: NodePool, *, gpus: int = 4, name: str = "", runtime: str = "podman", **fields: Any
) -> Node:
    """A ready, reachable node with whole GPUs."""
    number = next(_numbers)
    row = Node.objects.create(
        name=name or f"node-{number}",
        pool=pool_row,
        state="ready",
        reachable=True,
        runtime=runtime,
        cpu_milli=fields.pop("cpu_milli", 16_000),
        memory_mib=fields.pop("memory_mib", 64_000),
        **fields,
    )
    Gpu.objects.bulk_create(
        Gpu(node=row, uuid=f"GPU-{number}-{index}", index=index, model="Test 80", memory_mib=81_920)
        for index in range(gpus)
    )
    return row


def environment(name: str = "", *, runtime: str = "podman", tool: bool = True, **fields: Any) -> Environment:
    """An environment, with JupyterLab's port when it has a tool."""
    return Environment.objects.create(
        name=name or f"environment-{next(_numbers)}",
        title="Test environment",
        runtime=runtime,
        image=fields.pop("image", "localhost/test:1"),
        tool="jupyterlab" if tool else "",
        tool_port=8888 if tool else None,
        tool_command=["jupyter", "lab"] if tool else [],
        **fields,
    )


def cluster_settings() -> ClusterSettings:
    """The one settings row."""
    return ClusterSettings.objects.get_or_create(id=1)[0]


def pending_jobs(owner: User, count: int) -> list[Job]:
    """Waiting jobs of one project, with a node of four GPUs."""
    node(pool("main"), gpus=4, name="n1")
    where = project("nlp", member=owner), environment("batch", tool=False)
    return [job(owner, *where, name=f"j{number}") for number in range(count)]


def job(owner: User, project_row: Project, environment_row: Environment, **fields: Any) -> Job:
    """A submitted job; a training run of ``true`` with one GPU unless told otherwise."""
    fields.setdefault("name", f"job-{next(_numbers)}")
    if fields.get("kind") != "workspace":
        fields.setdefault("command", ["true"])
    return do_submit_job(owner, JobRequest(project=project_row, environment=environment_row, **fields))


def basic_cluster() -> dict[str, Any]:
    """A pool with one node, a project with one member, and an environment."""
    in_pool, owner = pool(), user()
    return {
        "pool": in_pool,
        "node": node(in_pool),
        "owner": owner,
        "project": project(member=owner),
        "environment": environment(),
    }


LAYERS = {
    "model": "mlp",
    "batch_size": 32,
    "nodes": [
        {"id": str(number), "op": f"Linear {number}", "fwd_ms": 1.0, "bwd_ms": 2.0, "activation_bytes": 1e6,
         "parameter_bytes": 4e6}
        for number in range(6)
    ],
    "edges": [[str(number), str(number + 1)] for number in range(5)],
}  # fmt: skip
"""A layer profile: six equal layers."""


def layer_profile(owner: User, project: Project, name: str = "mlp") -> LayerProfile:
    layers = answer_plan_query("profile", {"profile": LAYERS})["layers"]
    return LayerProfile.objects.create(
        project=project, name=name, content=LAYERS, layers=layers, batch_size=32, created_by=owner
    )


def pipeline_plan(profile: LayerProfile, pool: NodePool | None = None, **fields: Any) -> PipelinePlan:
    """A plan for one node with two GPUs."""
    body = {"profile": profile.content, "levels": [(2, 1e10)], "memory_bytes": None}
    given = {
        "nodes": 1,
        "gpus_per_node": 2,
        "node_bandwidth": 1e10,
        "answer": answer_plan_query("plan", body),
    }
    return PipelinePlan.objects.create(
        profile=profile, pool=pool, created_by=profile.created_by, **given | fields
    )
