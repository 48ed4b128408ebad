"""The ledger of a node: highest epoch, attempts, tombstones, held GPU milli and task records, on disk.

All agent processes of the node share the file under one flock, and every change is fsynced before it takes
effect. The ledger, not the portal, prevents double allocation of a GPU on this machine.

Task phases: ``reserved`` (GPUs held, nothing created), ``starting`` (container exists and may be running),
``running``, ``exited``. GPUs are held in the first three.

A pooled network is created ahead for a later job: first recorded here, then created, then ready. The job that
takes it removes it from the pool in the same transaction.

``jobs`` has the highest attempt and the tombstones of each job. Most of those without tasks are moved to
:mod:`agents.node.ledger.past_jobs`, so a transaction takes the same time on a node that had ten thousand jobs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import time
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from agents.node import errors
from agents.node.errors import AgentError
from agents.node.host import procfs
from agents.node.host.atomic_files import file_lock, read_json, write_atomic
from agents.node.ledger.image_usage import record_use
from agents.node.ledger.other_clusters import NOTHING, HeldElsewhere, OtherClusters
from agents.node.ledger.past_jobs import PastJobs
from agents.node.settings import Settings
from agents.node.spec.task_spec import MILLI_PER_GPU, TaskSpec, network_name

RESERVED, STARTING, RUNNING, EXITED = "reserved", "starting", "running", "exited"
LIVE_PHASES = (RESERVED, STARTING, RUNNING)
JOB_RETENTION_S = 30 * 86_400.0
_JOB_NETWORK_BITS = 26
_JOBS_KEPT, _JOBS_MOVED = 50, 100
"""Jobs without tasks: the latest stay in the ledger, and as many older ones are moved at once."""

Record = Dict[str, Any]
"""One task record: plain JSON, keys as in :func:`_new_record`."""
_FileVersion = Tuple[int, int, int]
"""Inode, time of modification in ns and size: each change replaces the file."""


class Admission(NamedTuple):
    record: Record
    is_repeat: bool  # the task was already admitted


class Ledger:
    """The ledger file of one node. Each method is a transaction."""

    def __init__(
        self,
        state_dir: str,
        *,
        subnets: str = "10.197.0.0/16",
        uids: Tuple[int, int] = (0, 0),
        others: Optional[OtherClusters] = None,
    ) -> None:
        self._path = os.path.join(state_dir, "ledger.json")
        self._lock_path = os.path.join(state_dir, "ledger.lock")
        self._subnets = ipaddress.IPv4Network(subnets)
        self._uids = uids
        self._others = others
        self._past = PastJobs(state_dir)
        self._cached: Tuple[Optional[_FileVersion], Record] = (None, _empty_ledger())

    @classmethod
    def open(cls, settings: Settings) -> Ledger:
        """Return the ledger of this machine's agents, which considers those of other clusters, too."""
        uids = (settings.uid_first, settings.uid_count)
        return cls(settings.state_dir, subnets=settings.subnets, uids=uids, others=OtherClusters(settings))

    # -- reading ------------------------------------------------------------------------------------------

    def read(self) -> Record:
        """Return the current ledger, which must not be modified. Cheap while the file is unchanged."""
        seen = self._version()
        if seen is None:
            return _empty_ledger()
        version, state = self._cached
        if seen != version:
            state = read_json(self._path) or _empty_ledger()
            self._cached = (seen, state)
        return state

    def _version(self) -> Optional[_FileVersion]:
        """Return what identifies the content of the file; None without a file."""
        try:
            facts = os.stat(self._path)
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size

    def tasks(self) -> Dict[str, Record]:
        """Return all records by container name."""
        tasks: Dict[str, Record] = self.read()["tasks"]
        return tasks

    def tasks_of(self, job: str, attempt: int) -> Dict[str, Record]:
        return {
            name: record
            for name, record in self.tasks().items()
            if record["job"] == job and record["attempt"] == attempt
        }

    def epoch(self) -> int:
        return int(self.read()["epoch"])

    def is_tombstoned(self, job: str, attempt: int) -> bool:
        entry = self.read()["jobs"].get(job) or self._past.all().get(job, {})
        return attempt in entry.get("tombstones", ())

    def tombstones(self, *, newest: Optional[int] = None) -> List[Record]:
        """Return all tombstones as (job, attempt), or those of the ``newest`` jobs by last contact."""
        jobs = sorted(
            {**self._past.all(), **self.read()["jobs"]}.items(),
            key=lambda each: float(each[1]["last_seen_s"]),
            reverse=True,
        )
        return [
            {"job": job, "attempt": attempt}
            for job, facts in jobs[:newest]
            for attempt in facts["tombstones"]
        ]

    def live_milli(self) -> Dict[str, int]:
        return _live_milli(self.read())

    def pooled_networks(self) -> Dict[str, Record]:
        """Return pooled networks by name: ``runtime``, ``subnet``, ``ready``."""
        spares: Dict[str, Record] = self.read().get("network_pool", {})
        return spares

    def networks(self) -> Set[str]:
        """Return the names of all networks of tasks and of the pool."""
        used = {task_network(record) for record in self.tasks().values()}
        return {name for name in used if name is not None} | set(self.pooled_networks())

    # -- writing ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Record]:
        """Run a transaction: changes of the block are on disk when it ends.

        After an exception the file is unchanged.
        """
        with file_lock(self._lock_path):
            try:
                with open(self._path, "rb") as stream:
                    before = stream.read()
            except FileNotFoundError:
                before = b""
            state = json.loads(before) if before else _empty_ledger()
            yield state
            self._move_past_jobs(state)
            content = json.dumps(state, separators=(",", ":"), sort_keys=True).encode()
            if content != before:
                write_atomic(self._path, content)
                self._cached = (self._version(), state)

    def _move_past_jobs(self, state: Record) -> None:
        """Move the oldest jobs without tasks to the other file once there are many; first there, then away here."""
        jobs = state["jobs"]
        if len(jobs) < _JOBS_KEPT + _JOBS_MOVED:
            return
        busy = {record["job"] for record in state["tasks"].values()}
        idle = sorted(jobs.keys() - busy, key=lambda job: (jobs[job]["last_seen_s"], job))
        moved = idle[: len(idle) - _JOBS_KEPT]
        if len(moved) >= _JOBS_MOVED:
            self._past.add({job: jobs[job] for job in moved})
            for job in moved:
                del jobs[job]

    def _job(self, state: Record, job: str) -> Record:
        """Return the entry of a job in the ledger, created or brought back when missing."""
        entry: Optional[Record] = state["jobs"].get(job)
        if entry is None:
            entry = dict(self._past.all().get(job) or {"attempt": 0, "tombstones": [], "last_seen_s": 0.0})
            state["jobs"][job] = entry
        return entry

    def check_epoch(self, epoch: int) -> None:
        """Refuse commands with an epoch below the highest seen, and record the highest."""
        if epoch == self.epoch():
            return
        with self.transaction() as state:
            _check_epoch(state, epoch)

    def admit(
        self, epoch: int, spec: TaskSpec, *, needs_uid: bool = False, needs_network: bool = False
    ) -> Admission:
        """Reserve the GPUs of a task or refuse; a repeated admission succeeds."""
        with self._held_elsewhere() as elsewhere, self.transaction() as state:
            _check_epoch(state, epoch)
            job = self._job(state, spec.job)
            if spec.attempt in job["tombstones"]:
                raise AgentError(
                    errors.TOMBSTONED,
                    f"Attempt {spec.attempt} of {spec.job} was stopped and cannot start again.",
                )
            if spec.task in _stopped_tasks(job, spec.attempt):
                raise AgentError(errors.TOMBSTONED, f"{spec.name} was evicted and cannot start again.")
            if spec.attempt < job["attempt"]:
                raise AgentError(
                    errors.TOMBSTONED,
                    f"Attempt {spec.attempt} of {spec.job} is older than attempt {job['attempt']}.",
                )
            known = state["tasks"].get(spec.name)
            if known is not None:
                if known["digest"] != spec.digest or known["runtime"] != spec.runtime:
                    raise AgentError(
                        errors.NAME_CONFLICT,
                        f"{spec.name} is known on this node with another specification.",
                    )
                return Admission(dict(known), is_repeat=True)
            _check_gpu_capacity(state, spec, elsewhere)
            _check_rendezvous_port(state, spec)
            record = _new_record(spec)
            record_use(state, spec.runtime, spec.image, time.time())
            if needs_network:
                record.update(self._allocate_network(state, spec))
            if needs_uid:
                record["task_uid"] = self._allocate_uid(state, spec, elsewhere)
            state["tasks"][spec.name] = record
            job["attempt"] = spec.attempt
            job["last_seen_s"] = time.time()
            return Admission(dict(record), is_repeat=False)

    def _held_elsewhere(self) -> ContextManager[HeldElsewhere]:
        return self._others.held() if self._others is not None else contextlib.nullcontext(NOTHING)

    def assign_ports(
        self, name: str, ports: Sequence[int], is_free: Callable[[int], bool], port_range: Tuple[int, int]
    ) -> Dict[int, int]:
        """Assign each port of a task a free port of the node; idempotent."""
        with self.transaction() as state:
            record = state["tasks"][name]
            taken = {
                port
                for each in state["tasks"].values()
                if each["phase"] in LIVE_PHASES
                for port in each["ports"].values()
            }
            for port in ports:
                if str(port) not in record["ports"]:
                    record["ports"][str(port)] = _free_port(taken, is_free, port_range)
                    taken.add(record["ports"][str(port)])
            return {int(port): int(number) for port, number in record["ports"].items()}

    def update_task(self, name: str, **fields: Any) -> Record:
        """Update fields of a task record; an exited task cannot become live again."""
        with self.transaction() as state:
            record = _known_task(state, name)
            if record["phase"] == EXITED and fields.get("phase") in LIVE_PHASES:
                raise AgentError(errors.TOMBSTONED, f"{name} has ended and cannot start again.")
            record.update(fields)
            if fields.get("phase") == EXITED:
                record_use(state, record["runtime"], record.get("image"), time.time())
            return dict(record)

    def tombstone(self, epoch: int, job: str, attempt: int, *, grace_s: float = 0.0) -> Dict[str, Record]:
        """Tombstone an attempt; return its tasks with their stop deadlines."""
        with self.transaction() as state:
            _check_epoch(state, epoch)
            facts = self._job(state, job)
            _add_tombstone(facts, attempt)
            facts["attempt"] = max(facts["attempt"], attempt)
            facts["last_seen_s"] = time.time()
            return _set_deadlines(state, job, attempt, time.time() + grace_s)

    def tombstone_tasks(
        self, epoch: int, job: str, attempt: int, tasks: Sequence[int], *, grace_s: float = 0.0
    ) -> Dict[str, Record]:
        """Like :meth:`tombstone`, for some tasks of an attempt that continues."""
        with self.transaction() as state:
            _check_epoch(state, epoch)
            facts = self._job(state, job)
            left = facts.setdefault("stopped_tasks", {})
            left[str(attempt)] = sorted({*left.get(str(attempt), ()), *tasks})
            facts["last_seen_s"] = time.time()
            return _set_deadlines(state, job, attempt, time.time() + grace_s, tasks)

    def set_stop_deadline(self, epoch: int, job: str, attempt: int, *, grace_s: float) -> Dict[str, Record]:
        """Like :meth:`tombstone`, but the attempt may start again."""
        with self.transaction() as state:
            _check_epoch(state, epoch)
            return _set_deadlines(state, job, attempt, time.time() + grace_s)

    def remove_tasks(self, names: Sequence[str]) -> None:
        """Remove records of tasks that are gone; their attempts get tombstones."""
        with self.transaction() as state:
            for name in names:
                record = state["tasks"].pop(name, None)
                if record is None:
                    continue
                facts = self._job(state, record["job"])
                facts["attempt"] = max(facts["attempt"], record["attempt"])
                facts["last_seen_s"] = facts["last_seen_s"] or time.time()
                if record["phase"] != RESERVED:
                    _add_tombstone(facts, record["attempt"])

    def remove_old_jobs(self, now_s: float) -> int:
        """Remove jobs without tasks and without contact for thirty days; return their number."""
        with self.transaction() as state:
            busy = {record["job"] for record in state["tasks"].values()}
            old = [
                job
                for job, facts in state["jobs"].items()
                if job not in busy and now_s - facts["last_seen_s"] > JOB_RETENTION_S
            ]
            for job in old:
                del state["jobs"][job]
            return len(self._past.remove_before(now_s - JOB_RETENTION_S).union(old).difference(state["jobs"]))

    def mark_starting(self, name: str) -> Record:
        """Set the phase ``starting`` immediately before a task runs; refuse when it was stopped."""
        with self.transaction() as state:
            record = _known_task(state, name)
            facts = state["jobs"].get(record["job"], {})
            forbidden = record["attempt"] in facts.get("tombstones", ())
            forbidden = forbidden or record["task"] in _stopped_tasks(facts, record["attempt"])
            if forbidden or record["phase"] == EXITED:
                raise AgentError(errors.TOMBSTONED, f"{name} was stopped before it ran.")
            record["phase"] = STARTING
            return dict(record)

    def cancel_reservation(self, name: str) -> None:
        """Remove a reservation for which nothing was created; the attempt may start again."""
        with self.transaction() as state:
            state["tasks"].pop(name, None)

    def set_boot_id(self, boot_id: str) -> None:
        with self.transaction() as state:
            state["boot_id"] = boot_id

    def reserve_pooled_network(self, name: str, runtime: str) -> Optional[str]:
        """Reserve a subnet for a network about to be created; return None when none is free.

        It is chosen at random from the upper half: an agent of the previous version takes subnets from below,
        and another cluster on this machine has a pool of its own.
        """
        with self.transaction() as state:
            pieces = list(self._subnets.subnets(new_prefix=_JOB_NETWORK_BITS))
            upper = pieces[len(pieces) // 2 :]
            random.shuffle(upper)
            subnet = self._free_subnet(state, upper)
            if subnet is not None:
                state.setdefault("network_pool", {})[name] = {
                    "runtime": runtime,
                    "subnet": subnet,
                    "ready": False,
                }
            return subnet

    def mark_pooled_network_ready(self, name: str) -> None:
        """Mark a network as created; the next job of its runtime may take it."""
        with self.transaction() as state:
            spare = state.get("network_pool", {}).get(name)
            if spare is not None:
                spare["ready"] = True

    def remove_pooled_network(self, name: str) -> None:
        """Remove a pooled network that could not be created."""
        with self.transaction() as state:
            state.get("network_pool", {}).pop(name, None)

    # -- allocation ---------------------------------------------------------------------------------------

    def _allocate_network(self, state: Record, spec: TaskSpec) -> Record:
        """Return the network of a task: the job's existing one, else one of the pool, else a new one."""
        for record in state["tasks"].values():
            live = record["job"] == spec.job and record["phase"] in LIVE_PHASES
            if live and record["subnet"] and record["runtime"] == spec.runtime:
                return {
                    "network": task_network(record),
                    "subnet": record["subnet"],
                    "from_pool": bool(record.get("from_pool")),
                }
        spares = state.get("network_pool", {})
        for name, spare in spares.items():
            if spare["ready"] and spare["runtime"] == spec.runtime:
                del spares[name]
                return {"network": name, "subnet": spare["subnet"], "from_pool": True}
        name = network_name(spec.cluster, spec.job)
        for record in state["tasks"].values():  # of an ended attempt that may not be removed yet
            if task_network(record) == name:
                return {"network": name, "subnet": record["subnet"], "from_pool": False}
        subnet = self._free_subnet(state, self._subnets.subnets(new_prefix=_JOB_NETWORK_BITS))
        if subnet is None:
            raise AgentError(errors.ENGINE_ERROR, "Every job network of this node is in use.")
        return {"network": name, "subnet": subnet, "from_pool": False}

    @staticmethod
    def _free_subnet(state: Record, candidates: Iterable[ipaddress.IPv4Network]) -> Optional[str]:
        taken = {record.get("subnet") for record in state["tasks"].values()}
        taken.update(spare["subnet"] for spare in state.get("network_pool", {}).values())
        routed = procfs.routed_networks()  # another cluster on this machine, or a network of the site
        for subnet in candidates:
            if str(subnet) not in taken and not any(subnet.overlaps(each) for each in routed):
                return str(subnet)
        return None

    def _allocate_uid(self, state: Record, spec: TaskSpec, elsewhere: HeldElsewhere) -> int:
        first, count = self._uids
        live = [record for record in state["tasks"].values() if record.get("task_uid") is not None]
        home = spec.home.source if spec.home else None
        for record in live:
            if home is not None and record.get("home") == home and record["phase"] in LIVE_PHASES:
                return int(record["task_uid"])  # live tasks that share a home share the account
        taken = elsewhere.uids.union(record["task_uid"] for record in live)
        turn = int(state.get("next_uid_offset", 0))
        for step in range(count):
            uid = first + (turn + step) % count
            if uid not in taken:
                state["next_uid_offset"] = (turn + step + 1) % count
                return uid
        raise AgentError(errors.ENGINE_ERROR, "Every account number for jobs of this node is in use.")


def task_network(record: Record) -> Optional[str]:
    if not record["subnet"]:
        return None
    return record.get("network") or network_name(record["cluster"], record["job"])  # older records lack it


def _empty_ledger() -> Record:
    return {
        "version": 1,
        "boot_id": None,
        "epoch": 0,
        "jobs": {},
        "tasks": {},
        "network_pool": {},
        "next_uid_offset": 0,
    }


_SPEC_KEYS = (
    *("cluster", "job", "attempt", "task", "digest", "runtime", "image", "user", "owner", "project"),
    *("rendezvous_port", "disk_mib"),
)
_UNKNOWN_AT_FIRST = (
    *("network", "subnet", "task_uid", "pid", "pid_start", "stop_deadline_s", "killed_at_s", "started_s"),
    *("ended_s", "exit_code", "oom", "peak_memory_mib", "mps", "fault", "disk_used_mib"),
)


def _new_record(spec: TaskSpec) -> Record:
    return {
        **{key: getattr(spec, key) for key in _SPEC_KEYS},
        **dict.fromkeys(_UNKNOWN_AT_FIRST),
        "home": spec.home.source if spec.home else None,
        "gpus": [share._asdict() for share in spec.gpus],
        "phase": RESERVED,
        "ports": {},
        "from_pool": False,
        "reserved_s": time.time(),
        "removed": False,
        "egress": {"mode": spec.egress.mode, "allow": list(spec.egress.allow)},
        "egress_exceptions": list(spec.egress_exceptions),
    }


def _add_tombstone(entry: Record, attempt: int) -> None:
    entry["tombstones"] = sorted({*entry["tombstones"], attempt})


def _known_task(state: Record, name: str) -> Record:
    record: Optional[Record] = state["tasks"].get(name)
    if record is None:
        raise AgentError(errors.NO_SUCH_CONTAINER, f"{name} is not known on this node.")
    return record


def _check_epoch(state: Record, epoch: int) -> None:
    if epoch < state["epoch"]:
        raise AgentError(
            errors.STALE_EPOCH,
            f"The command has epoch {epoch}, but this node has seen epoch {state['epoch']}.",
        )
    state["epoch"] = epoch


def _live_milli(state: Record) -> Dict[str, int]:
    held: Dict[str, int] = {}
    for record in state["tasks"].values():
        if record["phase"] in LIVE_PHASES:
            for share in record["gpus"]:
                held[share["uuid"]] = held.get(share["uuid"], 0) + share["milli"]
    return held


def _check_gpu_capacity(state: Record, spec: TaskSpec, elsewhere: HeldElsewhere) -> None:
    held = _live_milli(state)
    for share in spec.gpus:
        if share.uuid in elsewhere.gpus:
            raise AgentError(
                errors.GPU_OVERCOMMITTED,
                f"GPU {share.uuid} is used by the cluster {elsewhere.gpus[share.uuid]} on this machine, which should "
                "belong to one cluster only.",
            )
        if held.get(share.uuid, 0) + share.milli > MILLI_PER_GPU:
            raise AgentError(
                errors.GPU_OVERCOMMITTED,
                f"GPU {share.uuid} has {held[share.uuid]} of 1000 thousandths in use; {share.milli} "
                f"more are not available.",
            )


def _check_rendezvous_port(state: Record, spec: TaskSpec) -> None:
    for record in state["tasks"].values():
        held = (
            record["phase"] in LIVE_PHASES and record.get("rendezvous_port") is not None
        )  # older records lack it
        if held and record["rendezvous_port"] == spec.rendezvous_port:
            raise AgentError(
                errors.RENDEZVOUS_PORT_IN_USE,
                f"Port {spec.rendezvous_port} of this node is the rendezvous port of {record['job']}.",
            )


def _free_port(taken: Set[int], is_free: Callable[[int], bool], span: Tuple[int, int]) -> int:
    for _ in range(200):
        port = random.randrange(*span)  # noqa: S311 - spread, not secrecy
        if port not in taken and is_free(port):
            return port
    raise AgentError(errors.PORT_IN_USE, "No free port was found on this node.")


def _stopped_tasks(facts: Record, attempt: int) -> Sequence[int]:
    """Return the stopped tasks of an attempt; older ledgers have none."""
    tasks: Sequence[int] = facts.get("stopped_tasks", {}).get(str(attempt), ())
    return tasks


def _set_deadlines(
    state: Record, job: str, attempt: int, deadline_s: float, tasks: Optional[Sequence[int]] = None
) -> Dict[str, Record]:
    found = {}
    for name, record in state["tasks"].items():
        if record["job"] != job or record["attempt"] != attempt:
            continue
        if tasks is None or record["task"] in tasks:
            if record["phase"] in LIVE_PHASES:
                record["stop_deadline_s"] = min(record["stop_deadline_s"] or deadline_s, deadline_s)
            found[name] = dict(record)
    return found
