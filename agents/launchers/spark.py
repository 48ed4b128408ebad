"""Launcher ``spark``: a standalone Spark cluster for the job, with the driver in rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.cluster import cluster_command, cluster_files
from agents.launchers.gang import GangShape, Launcher, LaunchFile, LaunchSpec, Options, RankNetwork
from agents.launchers.options import LauncherOption
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

_OPTIONS = (
    LauncherOption("executor_cores", 1, "Cores of each executor.", 1, 1024),
    LauncherOption("executor_memory_mib", 1024, "Heap of each executor, in MiB.", 128, 1024 * 1024),
    LauncherOption(
        "gpus_per_spark_task", 1, "GPUs of each Spark task, where tasks of the job have GPUs.", 1, 64
    ),
)
_DISCOVERY_FILE, _WORKER_FILE = "discover_gpus.sh", "worker.sh"
_DISCOVERY = """#!/bin/sh
# Indices of the GPUs of this task, which are numbered from 0.
printf '{"name": "gpu", "addresses": ['
separator=
for index in $(seq 0 $((COUNT - 1))); do printf '%s"%s"' "$separator" "$index"; separator=', '; done
printf ']}\\n'
"""
_WORKER = """export SPARK_WORKER_DIR="${TMPDIR:-/tmp}/spark"
if [ -e "$FAIRWAY_SECRETS/discover_gpus.sh" ]; then
  script=$(mktemp) && cp "$FAIRWAY_SECRETS/discover_gpus.sh" "$script" && chmod 700 "$script"
  export SPARK_WORKER_OPTS="$SPARK_WORKER_OPTS -Dspark.worker.resource.gpu.discoveryScript=$script"
fi
exec "$@"
"""
"""Spark executes the discovery script itself, which the mount of the files forbids; its folder is not writable."""


def launch_spark(gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options) -> LaunchSpec:
    """Run a master and the driver in rank 0, and a worker with one executor in each other task.

    The command may be ``spark-submit`` or a Python program: both read spark-defaults.conf in SPARK_CONF_DIR. See
    https://spark.apache.org/docs/latest/spark-standalone.html ("Starting a Cluster Manually", "Resource Allocation
    and Configuration") and https://spark.apache.org/docs/latest/configuration.html. The job starts when all
    executors have registered, as barrier mode needs. A single task runs Spark locally. Raise ValueError when the
    tasks cannot reach each other.
    """
    settings = {"spark.dynamicAllocation.enabled": "false"}
    variables = {"SPARK_CONF_DIR": SECRETS_PLACEHOLDER}
    if gang.tasks == 1:
        settings |= {"spark.master": "local[*]"}
        return LaunchSpec(tuple(command), variables, files={"spark-defaults.conf": _defaults(settings)})
    master, member = gang.rendezvous, gang.member(rank.number)
    if master is None or member.address is None:
        raise ValueError("spark needs the addresses of all tasks")
    url = f"spark://{master.host}:{master.port}"
    cores, memory = int(options["executor_cores"]), options["executor_memory_mib"]
    executors = gang.members[1:]
    gpus = min(each.gpus for each in executors)
    settings |= {
        "spark.master": url,
        "spark.driver.host": str(gang.members[0].address),
        "spark.driver.bindAddress": str(gang.members[0].address),
        "spark.executor.cores": str(cores),
        "spark.executor.memory": f"{memory}m",
        "spark.cores.max": str(cores * len(executors)),
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }
    if gpus:
        settings |= {
            "spark.executor.resource.gpu.amount": str(gpus),
            "spark.task.resource.gpu.amount": str(options["gpus_per_spark_task"]),
        }
    files = cluster_files() | {"spark-defaults.conf": _defaults(settings)}
    java = ["spark-class", "org.apache.spark.deploy"]
    if rank.number == gang.members[0].rank:
        service = [java[0], f"{java[1]}.master.Master", "--host", master.address, "--port", str(master.port)]
        return LaunchSpec(
            cluster_command(master, [*service, "--webui-port", "0"], command), variables, files=files
        )
    service = [java[0], f"{java[1]}.worker.Worker", "--host", member.address, "--webui-port", "0"]
    service += ["--cores", str(cores), "--memory", f"{memory}m", url]
    if member.gpus:
        files[_DISCOVERY_FILE] = LaunchFile(_DISCOVERY.replace("COUNT", str(member.gpus)))
        variables["SPARK_WORKER_OPTS"] = f"-Dspark.worker.resource.gpu.amount={member.gpus}"
    service = ["/bin/sh", f"{SECRETS_PLACEHOLDER}/{_WORKER_FILE}", *service]
    files[_WORKER_FILE] = LaunchFile(_WORKER)
    return LaunchSpec(cluster_command(master, service), variables, files=files)


def _defaults(settings: dict[str, str]) -> LaunchFile:
    return LaunchFile("".join(f"{name} {value}\n" for name, value in settings.items()))


SPARK = Launcher(
    launch_spark,
    "spark: a Spark cluster, driver in rank 0",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
)
