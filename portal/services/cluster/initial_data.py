"""First rows of a new cluster: administrator with a one-time link, pool, project, this machine, environment.

Each step checks before it creates, so that a restart leaves everything as users changed it.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from pathlib import Path

from django.conf import settings
from django.db import transaction

from agents import bundle
from agents.node.gpus.nvml import open_nvml
from portal.domain.states import JobKind, NodeTransport, Role, RuntimeKind
from portal.errors import FairwayError
from portal.models import Environment, Membership, Node, NodePool, Project, Template, User
from portal.models.public_id import name_error
from portal.services.accounts.users import do_create_magic_link
from portal.services.audit import record_action
from portal.services.cluster.demo import ensure_demo
from portal.services.environments.code_server import ensure_process_code_server
from portal.services.environments.environments import EnvironmentInput, do_save_environment
from portal.services.environments.process_environment import (
    TOOL_PORT,
    code_server_command,
    ensure_process_jupyterlab,
    jupyterlab_command,
)
from portal.services.jobs.starter_templates import ensure_starter_templates
from portal.services.nodes import enrolment
from portal.services.nodes.nodes import do_create_pool

log = logging.getLogger(__name__)

FIRST_ADMIN = "admin"
SIMULATED_GPUS = 4
SIMULATED_GPU_MODEL = "Pretend GPU"
SIMULATED_GPU_MEMORY_MIB = 16_384


def ensure_initial_data(*, local_node: bool, simulated_gpus: bool, demo: bool) -> str | None:
    """Create what is needed to sign in and submit jobs.

    Return the code of a one-time sign-in link while the first administrator has no password, else None.
    """
    enrolment.ensure_cluster()
    admin = _ensure_first_admin()
    _publish_agent()
    pool = NodePool.objects.order_by("id").first() or do_create_pool(admin, "default")
    _ensure_first_project(admin)
    ensure_starter_templates()
    if local_node:
        _ensure_local_node(admin, pool, simulated_gpus)
        _ensure_local_environment(admin)
        _ensure_code_server()
    if demo:
        ensure_demo(admin)
    if admin.has_usable_password() or not admin.is_active:
        return None
    return do_create_magic_link(None, admin)


def _ensure_first_admin() -> User:
    existing = User.objects.filter(is_admin=True).order_by("id").first()
    if existing is not None:
        return existing
    with transaction.atomic():
        admin = User.objects.create_user(FIRST_ADMIN, None, full_name="First administrator", is_admin=True)
        record_action(None, "user.first_admin", admin)
    return admin


def _ensure_first_project(admin: User) -> None:
    if Project.objects.exists():
        return
    with transaction.atomic():
        project = Project.objects.create(name="default", title="Initial project of all users")
        Membership.objects.create(user=admin, project=project, role=Role.MANAGER.value)
        record_action(admin, "project.create", project, after={"name": "default"})


def _publish_agent() -> None:
    """Store the signed agent in the data directory, for the local node and for enrolment scripts."""
    fresh = settings.DATA_DIR / "agent" / "building.pyz"
    bundle.build_archive(fresh)
    enrolment.prepare_agent(fresh.read_bytes())
    fresh.unlink()


def _ensure_local_node(admin: User, pool: NodePool, simulated_gpus: bool) -> None:
    if Node.objects.filter(transport=NodeTransport.LOCAL.value).exists():
        return
    folder = settings.DATA_DIR / "node"
    gpus = _gpu_provider(folder / "pretend_gpus.json", simulated_gpus)
    enrolment.do_create_local_node(admin, _host_name(), pool, folder, settings.DATA_DIR / "homes", gpus)


def _gpu_provider(path: Path, simulated_gpus: bool) -> str:
    """Return the provider for real GPUs if NVML finds any, else for simulated GPUs in a file, or none."""
    if open_nvml().gpus():
        return "nvml"
    if not simulated_gpus:
        return "none"
    uuid_prefix = f"pretend-{socket.gethostname()}-{os.urandom(3).hex()}"
    return enrolment.simulated_gpu_provider(
        path, uuid_prefix, SIMULATED_GPU_MODEL, SIMULATED_GPU_MEMORY_MIB, SIMULATED_GPUS
    )


def _ensure_local_environment(admin: User) -> None:
    """Create the JupyterLab environment; without it (such as without network) the portal still starts."""
    try:
        prefix = ensure_process_jupyterlab(settings.DATA_DIR)
    except FairwayError as error:
        log.error("the initial environment could not be created: %s", error.message)
        return
    existing = Environment.objects.filter(name="jupyterlab-local").first()
    if existing is not None and existing.prefix == str(prefix):
        return
    environment = do_save_environment(
        None,
        EnvironmentInput(
            name="jupyterlab-local",
            title="JupyterLab on this machine",
            description="Python with JupyterLab, run as a process of the user's account without a container.",
            runtime=RuntimeKind.PROCESS,
            prefix=str(prefix),
            tool="jupyterlab",
            tool_command=tuple(jupyterlab_command(prefix)),
            tool_port=TOOL_PORT,
        ),
        existing,
    )
    Template.objects.get_or_create(
        name="notebook",
        defaults={
            "title": "Notebook",
            "description": "JupyterLab with one GPU.",
            "kind": JobKind.WORKSPACE.value,
            "environment": environment,
            "fields": {"gpus_per_task": 1, "cpu_milli": 1000, "memory_mib": 2048},
        },
    )


def _ensure_code_server() -> None:
    """Create an environment with VS Code: that of this machine if every account can run it, else installed later."""
    program = shutil.which("code-server")
    real = Path(program).resolve() if program else None
    if program and real and all(folder.stat().st_mode & 0o001 for folder in real.parents):
        prefix, command = Path(program).parent.parent, code_server_command(program)
        description = "code-server, run as a process of the user's account without a container."
    else:
        try:
            prefix, command = ensure_process_code_server(settings.DATA_DIR)
        except (FairwayError, OSError) as error:
            log.error("the environment with VS Code could not be created: %s", error)
            return
        description = (
            "Installed in your home on first use, which takes some minutes; its page shows how far it is."
        )
    existing = Environment.objects.filter(name="code-server-local").first()
    if existing is not None and existing.tool_command == command:
        return
    do_save_environment(
        None,
        EnvironmentInput(
            name="code-server-local",
            title="VS Code on this machine",
            description=description,
            runtime=RuntimeKind.PROCESS,
            prefix=str(prefix),
            tool="code-server",
            tool_command=tuple(command),
            tool_port=TOOL_PORT,
        ),
        existing,
    )


def _host_name() -> str:
    """Return the host name as a node name, or "local" if it is not a valid one."""
    name = socket.gethostname().split(".")[0].lower()
    return "local" if name_error(name) else name
