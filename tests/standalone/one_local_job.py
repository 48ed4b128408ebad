"""Creates a node on this machine and submits a job there; prints its public id, or nothing before the node is ready.

A script for `manage.py shell` of an installation without a local node, as the account of its processes.
"""

import contextlib

from django.conf import settings

from portal.domain.states import RuntimeKind
from portal.errors import Unsatisfiable
from portal.models import Environment, Node, NodePool, Project, User
from portal.services.environments.environments import EnvironmentInput, do_save_environment
from portal.services.jobs.submission import JobRequest, do_submit_job
from portal.services.nodes.enrolment import do_create_local_node, simulated_gpu_provider

admin = User.objects.get(is_admin=True)
pool = NodePool.objects.get()
if not Node.objects.exists():
    folder = settings.DATA_DIR / "node"
    gpus = simulated_gpu_provider(folder / "gpus.json", "unit", "Simulated GPU", 1024, 2)
    do_create_local_node(admin, "here", pool, folder, settings.DATA_DIR / "homes", gpus)
    plain = EnvironmentInput(
        name="plain", title="Python", description="", runtime=RuntimeKind.PROCESS, prefix="/usr"
    )
    do_save_environment(admin, plain)
request = JobRequest(
    name="short",
    project=Project.objects.get(),
    environment=Environment.objects.get(name="plain"),
    pool=pool,
    tasks=1,
    gpus_per_task=1,
    cpu_milli=100,
    memory_mib=64,
    command=("sh", "-c", "echo it ran"),
)
with contextlib.suppress(Unsatisfiable):
    print(do_submit_job(admin, request).public_id)
