"""The ways of starting a task on this machine, behind one interface of a few repeatable verbs."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from agents.node.errors import AgentError
from agents.node.gpus.mps import MpsShare
from agents.node.spec.task_spec import TaskSpec

REGISTRY_AUTH_FILE = "config.json"
"""The name of a file with logins, as docker wants it; podman takes any."""
CREATED, RUNNING, EXITED = "created", "running", "exited"


class ContainerInfo(NamedTuple):
    """A task as its runtime knows it. Unknown is None."""

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
    """A spec with what the node decided about it: everything a runtime needs to create the task."""

    spec: TaskSpec
    task_dir: str  # the task's own folder on the node
    log_path: str
    host_ports: Dict[int, int]  # port of the task -> port on the node's loopback address
    home_path: Optional[str]
    mount_sources: Dict[str, str]  # target -> path on the node
    real_gpus: List[str]  # the UUIDs of those an engine hands in; pretend ones are not among them
    network: Optional[str]  # by name, the job's own or "host"; None for a runtime without networks
    subnet: Optional[str]  # of the job's own network
    network_exists: bool  # it stood ready before the job came
    task_uid: Optional[int]
    lock_fd: Optional[int]  # a lock that outlives us in the child that creates
    devices: Sequence[str] = ()  # of a fabric
    mps_share: Optional[MpsShare] = None  # of a GPU, where it is enforced


class Image(NamedTuple):
    """An image on the node; ``image_id`` is the config digest."""

    image_id: str
    refs: List[str]
    digests: List[str]
    size_mib: Optional[int]
    cuda: Optional[str] = None  # what it asks of the driver, such as 12.4; None: it does not say

    @property
    def names(self) -> List[str]:
        """Every name by which somebody may ask for it."""
        return [self.image_id, *self.refs, *self.digests]


class WritablePaths(NamedTuple):
    """The folders to which a task writes outside its volumes.

    ``home`` may hold files from before it. ``by``: what runs a program that may read them, before its words.
    """

    task_paths: List[str]
    home_paths: List[str] = []
    command_prefix: List[str] = []


class Runtime:
    """What each runtime answers, in every state.

    ``create`` makes the task without running it and raises the refusal ``name_conflict`` when the name is
    taken. ``start`` runs a created task. ``find`` gives None for a name that does not exist. ``remove`` ends
    and removes a task whatever its state, and does nothing when there is none. None of them touches a task
    without our cluster label.
    """

    kind: str
    log_format: str
    pools_networks = False
    """Whether networks are made ahead for this runtime."""

    def version(self) -> Optional[str]:
        """The engine's version, None when it cannot be used."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Learns ahead what makes starts quick. Repeatable, and nothing depends on it."""

    def prepare(self, config: ContainerConfig) -> None:
        """Makes what a task needs before it is created: its network for instance. Repeatable."""

    def create(self, config: ContainerConfig) -> None:
        raise NotImplementedError

    def start(self, name: str) -> None:
        raise NotImplementedError

    def start_info(self, name: str) -> Tuple[Optional[int], Optional[float]]:
        """Process number and start time of a task that was just started."""
        found = self.find(name)
        return (found.pid, found.started_s) if found else (None, None)

    def kill(self, name: str, *, timeout_s: float) -> None:
        """Kills a running task at once; returns when its first process is gone, or after so long."""
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
        """Makes a job's network, or a spare one when ``job`` is None. One of this name is success."""
        raise NotImplementedError

    def remove_network(self, name: str) -> None:
        """Removes the network of a job of which no task is left. Repeatable."""

    def networks(self, cluster: str) -> List[str]:
        """The names of the networks with our cluster's label."""
        return []

    def external_networks(self) -> Optional[List[Dict[str, Any]]]:
        """The networks that people made: name, driver, and of each subnet the first and last address it gives out.

        None where it cannot be said.
        """
        return []

    def collect_log(self, name: str, path: str) -> None:
        """Sees to it that the task's log so far stands at ``path``, in its own folder, and stays there.

        Asked every second while it runs, and before each read. Repeatable; nothing to do when there is no such task.
        """

    def writable_paths(self, name: str) -> Optional[WritablePaths]:
        """The folders to which a running task writes outside its volumes; None where that is not known."""
        return None

    def shell(self, name: str) -> Dict[str, Any]:
        """How a terminal gets a shell in a running task (``agents.node.terminals.shell``).

        Either ``command``, and ``hang_up`` which with a signal and a number signals that process of the task; or what
        a process needs to stand beside it.
        """
        raise NotImplementedError

    def images(self) -> List[Image]:
        """Images on the node; empty for a runtime without images."""
        return []

    def pull(self, image: str, progress: Callable[[str], None], login_folder: Optional[str]) -> Image:
        """Brings an image; with ``login_folder`` as who stands in the LOGIN_FILE there."""
        raise NotImplementedError

    def load(self, archive_path: str) -> Image:
        raise NotImplementedError

    def store_path(self) -> Optional[str]:
        """A folder on the file system that holds its images; None for a runtime without images."""
        return None

    def images_in_use(self) -> Set[str]:
        """The ``image_id`` of each image that a container of anybody was made of, also of one that has ended."""
        return set()

    def remove_image(self, image: Image) -> bool:
        """Removes an image with all its names, and never a container; False when the engine keeps it."""
        raise NotImplementedError

    def refresh_firewall(self) -> Optional[str]:
        """Put what containers may not reach into force, also for those that run. Repeatable.

        Return blank, or why it is not in force, or None where this runtime has no firewall. Raise Refusal where no
        container may start without it.
        """
        return None

    def firewall_fault(self) -> Optional[str]:
        """As :meth:`refresh_firewall`, with the message of a refusal as the answer."""
        try:
            return self.refresh_firewall()
        except AgentError as refusal:
            return refusal.message

    def info(self) -> Dict[str, Any]:
        """What hello says of this runtime."""
        return {"kind": self.kind, "version": self.version()}
