"""Launcher ``ray``: a Ray cluster for the job; the command runs on its head."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.cluster import READY_FILE, cluster_command, cluster_files
from agents.launchers.gang import GangShape, Launcher, LaunchFile, LaunchSpec, Options, RankNetwork
from agents.launchers.options import LauncherOption

_OPTIONS = (
    LauncherOption("cpus_per_task", 1, "Logical CPUs that each task offers to Ray.", 1, 1024),
    LauncherOption("object_store_mib", 128, "Size of the object store of each task, in MiB.", 80, 1024 * 1024),
)  # fmt: skip
_READY = """import ray, sys, time

ray.init(address={endpoint!r}, log_to_driver=False)
for _ in range(120):
    if sum(node["Alive"] for node in ray.nodes()) >= {tasks}:
        sys.exit()
    time.sleep(1)
sys.exit("fairway: after 120 s fewer than {tasks} tasks have joined the Ray cluster.")
"""


def launch_ray(gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options) -> LaunchSpec:
    """Run ``ray start`` in all tasks, with the head in rank 0, where the command finds it by RAY_ADDRESS.

    See https://docs.ray.io/en/latest/cluster/vms/user-guides/launching-clusters/on-premises.html ("Manually set up
    a Ray cluster") and https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations: workers listen
    on free ports. A single task starts Ray itself. Raise ValueError when the tasks cannot reach each other.
    """
    if gang.tasks == 1:
        return LaunchSpec(tuple(command))
    head, member = gang.rendezvous, gang.member(rank.number)
    if head is None or member.address is None:
        raise ValueError("ray needs the addresses of all tasks")
    endpoint = f"{head.host}:{head.port}"
    sizes = [f"--num-cpus={options['cpus_per_task']}", f"--num-gpus={member.gpus}"]
    sizes.append(f"--object-store-memory={int(options['object_store_mib']) * 1024 * 1024}")
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats", "--block"]
    files = cluster_files()
    start = ["ray", "start", f"--node-ip-address={member.address}"]
    variables = {"RAY_ADDRESS": endpoint}
    if rank.number != gang.members[0].rank:
        service = [*start, f"--address={endpoint}", *sizes, *ports]
        return LaunchSpec(cluster_command(head, service), variables, files=files)
    service = [*start, "--head", f"--port={head.port}", "--include-dashboard=false", *sizes, *ports]
    files[READY_FILE] = LaunchFile(_READY.format(endpoint=endpoint, tasks=gang.tasks))
    return LaunchSpec(cluster_command(head, service, command), variables, files=files)


RAY = Launcher(
    launch_ray,
    "ray: a Ray cluster, head in rank 0",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
)
