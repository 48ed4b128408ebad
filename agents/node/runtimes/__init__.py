"""Runtimes: interface for running tasks on this machine, with idempotent operations."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from agents.node.errors import INVALID_SPEC, AgentError
from agents.node.gpus.mps import MpsShare
from agents.node.spec.image_names import normalize_image_name
from agents.node.spec.task_spec import TaskSpec

REGISTRY_AUTH_FILE = "config.json"
"""Name of a file with registry logins, as docker requires it; podman accepts any."""
CREATED, RUNNING, EXITED = "created", "running", "exited"


class ContainerInfo(NamedTuple):
    """A task as its runtime reports it. Unknown values are None."""

    name: str
    cluster: str
    job: str
    attempt: int
    task: int
    digest: str
    state: str  # created, running, exited
    exit_code: Optional[int]
    oom: Optional[bool]
    pid: Optional[int]
    started_s: Optional[float]
    ended_s: Optional[float]
    peak_memory_mib: Optional[int] = None
    owner: Optional[str] = None
    project: Optional[str] = None


class ContainerConfig(NamedTuple):
    """A task spec with the node's decisions: all that a runtime needs to create the task."""

    spec: TaskSpec
    task_dir: str  # folder of the task on the node
    log_path: str
    host_ports: Dict[int, int]  # port of the task -> port on the node's loopback address
    home_path: Optional[str]
    mount_sources: Dict[str, str]  # target -> path on the node
    real_gpus: List[str]  # UUIDs of GPUs passed by the engine; without simulated ones
    network: Optional[str]  # the job's own by name, or "host"; None for a runtime without networks
    subnet: Optional[str]  # of the job's own network
    network_exists: bool  # created ahead of the job
    task_uid: Optional[int]
    lock_fd: Optional[int]  # a lock that the creating child process inherits
    devices: Sequence[str] = ()  # of a fabric
    mps_share: Optional[MpsShare] = None  # where it is enforced


class Image(NamedTuple):
    """An image on the node; ``image_id`` is the config digest."""

    image_id: str
    refs: List[str]
    digests: List[str]
    size_mib: Optional[int]
    cuda: Optional[str] = None  # minimum CUDA version of the driver, such as 12.4; None: unknown

    @property
    def names(self) -> List[str]:
        """Return all names that refer to the image."""
        return [self.image_id, *self.refs, *self.digests]

    @property
    def normalized_names(self) -> Set[str]:
        return {normalize_image_name(name) for name in self.names}


class WritablePaths(NamedTuple):
    """Folders that a task writes to outside its volumes.

    ``home_paths`` may contain earlier files. ``command_prefix`` runs a program with permission to read them.
    """

    task_paths: List[str]
    home_paths: List[str] = []
    command_prefix: List[str] = []


class Runtime:
    """Interface of a runtime.

    ``create`` creates the task without running it; it raises the refusal ``name_conflict`` when the name is
    taken. ``start`` runs a created task. ``find`` returns None for an unknown name. ``remove`` ends and
    removes a task in any state, and does nothing without one. Tasks without this cluster's label are never
    touched.
    """

    kind: str
    log_format: str
    pools_networks = False
    """Whether networks are created ahead for this runtime."""

    def version(self) -> Optional[str]:
        """Return the engine's version, None when it is unusable."""
        raise NotImplementedError

    def unsupported_reason(self) -> Optional[str]:
        """Return why tasks cannot run with this version of the engine; None if they can."""
        return None

    def warm_up(self) -> None:
        """Fill caches that speed up starts; idempotent and optional."""

    def prepare(self, config: ContainerConfig) -> None:
        """Create what a task needs beforehand, such as its network; idempotent."""

    def create(self, config: ContainerConfig) -> None:
        raise NotImplementedError

    def start(self, name: str) -> None:
        raise NotImplementedError

    def start_info(self, name: str) -> Tuple[Optional[int], Optional[float]]:
        """Return process id and start time of a task just started."""
        found = self.find(name)
        return (found.pid, found.started_s) if found else (None, None)

    def kill(self, name: str, *, timeout_s: float) -> None:
        """Kill a running task; return when its first process is gone, or after ``timeout_s``."""
        raise NotImplementedError

    def find(self, name: str) -> Optional[ContainerInfo]:
        raise NotImplementedError

    def tasks(self, cluster: str) -> List[ContainerInfo]:
        raise NotImplementedError

    def signal(self, name: str, signal_name: str) -> None:
        raise NotImplementedError

    def remove(self, name: str) -> None:
        raise NotImplementedError

    def create_network(
        self, name: str, subnet: str, *, job: Optional[str] = None, lock_fd: Optional[int] = None
    ) -> None:
        """Create a job's network, or a pooled one when ``job`` is None; succeed if it exists."""
        raise NotImplementedError

    def remove_network(self, name: str) -> None:
        """Remove the network of a job without tasks; idempotent."""

    def remove_stale_bridges(self) -> int:
        """Remove interfaces of networks that no longer exist; return their number."""
        return 0

    def networks(self, cluster: str) -> List[str]:
        """Return the names of networks with this cluster's label."""
        return []

    def external_networks(self) -> Optional[List[Dict[str, Any]]]:
        """Return user-defined networks: name, driver, and first and last assignable address of each subnet.

        None when unknown.
        """
        return []

    def collect_log(self, name: str, path: str) -> None:
        """Ensure that the task's log so far is at ``path`` in its folder.

        Called every second while it runs and before each read. Idempotent; does nothing without such a task.
        """

    def writable_paths(self, name: str) -> Optional[WritablePaths]:
        """Return the folders that a running task writes to outside its volumes; None when unknown."""
        return None

    def shell(self, name: str) -> Dict[str, Any]:
        """Return how to open a shell in a running task (``agents.node.terminals.shell``).

        Either ``command``, ``piped`` (without a terminal), ``exec``, to which another command is appended, and
        ``hang_up``, which signals a process of the task given a signal and a process id; or what a process
        needs to join the task.
        """
        raise NotImplementedError

    def images(self) -> List[Image]:
        """Return the images on the node; empty for a runtime without images."""
        return []

    def pull(self, image: str, progress: Callable[[str], None], login_folder: Optional[str]) -> Image:
        """Pull an image; ``login_folder`` contains the file ``REGISTRY_AUTH_FILE``."""
        raise NotImplementedError

    def load(self, archive_path: str) -> Image:
        raise NotImplementedError

    def save(self, name: str, reference: str, max_mib: int) -> Tuple[Image, int]:
        """Save the file system of a running task as an image; return it and the MiB of changed files.

        Mounts, variables, command and labels of the task are left out. Refuse more than ``max_mib``.
        """
        raise AgentError(INVALID_SPEC, "A task without a container cannot be saved as an image.")

    def store_path(self) -> Optional[str]:
        """Return a folder on the file system of its images; None for a runtime without images."""
        return None

    def images_in_use(self) -> Set[str]:
        """Return the ``image_id`` of each image with a container of any owner and state."""
        return set()

    def remove_image(self, image: Image) -> bool:
        """Remove an image with all its names, never a container; return False when the engine keeps it."""
        raise NotImplementedError

    def refresh_firewall(self) -> Optional[str]:
        """Apply the rules for containers, also running ones; idempotent.

        Return blank, or why they are not in force, or None for a runtime without firewall. Raise AgentError
        where no container may start without them.
        """
        return None

    def seccomp_fault(self) -> Optional[str]:
        """Return blank if containers are refused user namespaces and AF_VSOCK, or why they cannot be; None for a
        runtime without containers.
        """
        return None

    def firewall_fault(self) -> Optional[str]:
        """Like :meth:`refresh_firewall`, but return the message of a refusal."""
        try:
            return self.refresh_firewall()
        except AgentError as error:
            return error.message

    def port_fault(self) -> Optional[str]:
        """Close the ports of tasks to tasks of other accounts; idempotent.

        Return blank, or why they are open, or None for a runtime whose tasks have networks of their own.
        """
        return None

    def info(self) -> Dict[str, Any]:
        """Return the runtime's part of hello."""
        return {"kind": self.kind, "version": self.version()}
