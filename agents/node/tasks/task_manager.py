"""Starts, stops and finalizes tasks; every operation is idempotent and recovers after a crash.

One lock per task name keeps agent processes from working on the same task. The ledger records intent, the
runtime has the actual state. The order is always: record the intent, act, record the result.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, Callable, ContextManager, Dict, Iterable, List, Optional

from agents.node import errors
from agents.node.errors import AgentError, RecreateContainerError, invalid_spec
from agents.node.gpus import OK, GpuProvider, open_gpus
from agents.node.gpus.mps_daemons import MpsDaemons
from agents.node.host import cgroup, procfs
from agents.node.host.atomic_files import file_lock
from agents.node.ledger.ledger import (
    EXITED,
    LIVE_PHASES,
    RESERVED,
    RUNNING,
    STARTING,
    Ledger,
    Record,
    task_network,
)
from agents.node.network import fabric, rendezvous
from agents.node.runtimes import CREATED, ContainerConfig, ContainerInfo, Runtime
from agents.node.runtimes import EXITED as IS_EXITED
from agents.node.runtimes import RUNNING as IS_RUNNING
from agents.node.runtimes.choose import open_runtimes
from agents.node.settings import Settings
from agents.node.spec import report_files
from agents.node.spec.task_spec import (
    TaskSpec,
    container_name,
    parse_files,
    parse_integer,
    parse_public_id,
    parse_seconds,
    parse_spec,
)
from agents.node.storage.directories import NodeDirectories
from agents.node.tasks import task_rows
from agents.node.tasks.task_code import unpack_code

JsonObject = Dict[str, Any]
_MAX_PORT_ATTEMPTS = 3
_MAX_TOMBSTONES_LISTED = 1000
_EXIT_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S, _KILL_TIMEOUT_S, _REPEATED_KILL_TIMEOUT_S = 8.0, 4.0, 0.2
"""How long a stop waits for all killed tasks, for one, and for one that survived the last kill."""
_DISK_FULL_HOLD_S = 300.0
_SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2", "KILL", "STOP", "CONT")


class TaskManager:
    """The tasks of this node.

    ``wake_monitor`` is called when a task may have ended; ``on_start`` when a start begins and ends, so that
    background work can wait.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        directories: NodeDirectories,
        runtimes: Dict[str, Runtime],
        gpus: GpuProvider,
        agent_command: List[str],
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.directories = directories
        self.runtimes = runtimes
        self.gpus, self._unpacker = gpus, [*agent_command, "archive"]
        self.mps_daemons = MpsDaemons(settings, ledger, gpus, agent_command)
        self.wake_monitor: Callable[[], None] = lambda: None
        self.on_start: Callable[[], None] = lambda: None
        self.peaks: Dict[str, cgroup.CgroupUsage] = {}
        self._cgroups: Dict[str, cgroup.Cgroup] = {}
        self._kernel_log = cgroup.OomLog()
        self._rendezvous = rendezvous.RendezvousListeners()
        self._disk_full_message = ""
        self._disk_full_until_s = 0.0

    @classmethod
    def open(cls, settings: Settings, agent_command: List[str]) -> TaskManager:
        """Return the tasks of the node with these settings."""
        return cls(
            settings,
            Ledger.open(settings),
            NodeDirectories(settings),
            open_runtimes(settings, agent_command),
            open_gpus(settings.gpu_provider),
            agent_command,
        )

    # -- start --------------------------------------------------------------------------------------------

    def start(self, request: JsonObject) -> JsonObject:
        """Start a task, or report that it already runs."""
        return self._handle_start(request, start=True)

    def update_files(self, request: JsonObject) -> JsonObject:
        """Replace launch files of a running task; ``changed`` are the names of those that differed."""
        task = parse_integer(request, "task")
        job, attempt = parse_public_id(request, "job"), parse_integer(request, "attempt")
        name = container_name(self.settings.cluster, job, attempt, task)
        files = parse_files(request, "files")
        with self._task_lock(name):
            record = self.ledger.tasks().get(name)
            if record is None or record["phase"] not in LIVE_PHASES:
                raise AgentError(errors.NO_SUCH_CONTAINER, f"{name} is not running.")
            return {"changed": self.directories.update_launch_files(name, record["runtime"], files)}

    def prepare(self, request: JsonObject) -> JsonObject:
        """Execute all steps of a start but the last; the task is created and waits for its start."""
        return self._handle_start(request, start=False)

    def _handle_start(self, request: JsonObject, *, start: bool) -> JsonObject:
        epoch = parse_integer(request, "epoch")
        spec = parse_spec(request.get("spec"))
        if spec.cluster != self.settings.cluster:
            raise invalid_spec(f"This node belongs to the cluster {self.settings.cluster}.")
        runtime = self.runtimes.get(spec.runtime)
        if runtime is None:
            raise invalid_spec(f"This node has no runtime {spec.runtime}.")
        self.on_start()
        try:
            return self._start(epoch, spec, runtime, start)
        finally:
            self.on_start()

    def _start(self, epoch: int, spec: TaskSpec, runtime: Runtime, start: bool) -> JsonObject:
        with self.directories.hold_image(spec.image), self._task_lock(spec.name) as hold_fd:
            known = self.ledger.tasks().get(spec.name)
            if known is None:
                self.directories.check_disk_space()
                self._check_gpus(spec)
                fabric.expand_device_patterns(spec.devices, self.settings.fabric_devices)
            own = spec.runtime == "process" and os.geteuid() == 0
            bridged = spec.runtime != "process" and not spec.host_network and spec.network is None
            admission = self._admit(epoch, spec, needs_uid=own, needs_network=bridged)
            record, repeated = admission.record, admission.is_repeat
            try:
                return self._create_and_start(spec, runtime, record, repeated, hold_fd, start=start)
            except AgentError:
                self._undo_start(spec.name, runtime)
                raise

    def _check_gpus(self, spec: TaskSpec) -> None:
        known = {facts.uuid: facts for facts in self.gpus.gpus()}
        for share in spec.gpus:
            facts = known.get(share.uuid)
            if facts is None:
                raise AgentError(errors.UNKNOWN_GPU, f"There is no GPU {share.uuid} on this node.")
            if facts.health != OK:
                raise AgentError(
                    errors.UNKNOWN_GPU, f"GPU {share.uuid} is {facts.health} and accepts no tasks."
                )

    def _admit(self, epoch: int, spec: TaskSpec, *, needs_uid: bool, needs_network: bool) -> Any:
        try:
            return self.ledger.admit(epoch, spec, needs_uid=needs_uid, needs_network=needs_network)
        except AgentError as error:
            if error.code != errors.GPU_OVERCOMMITTED:
                raise
        self.reconcile()  # the holder of the GPU may have ended unnoticed
        return self.ledger.admit(epoch, spec, needs_uid=needs_uid, needs_network=needs_network)

    def _create_and_start(
        self,
        spec: TaskSpec,
        runtime: Runtime,
        record: Record,
        is_repeat: bool,
        lock_fd: Optional[int],
        *,
        start: bool,
    ) -> JsonObject:
        name = spec.name
        if record["phase"] == EXITED:
            return task_rows.start_reply(name, record, IS_EXITED, already=True)
        found = runtime.find(name) if is_repeat else None
        if found is None and record["phase"] != RESERVED:
            self._finalize(name, runtime)
            raise AgentError(errors.TOMBSTONED, f"{name} was started before and has disappeared.")
        for turn in range(_MAX_PORT_ATTEMPTS):
            if found is None:
                self._release_rendezvous_port(spec)
                found = self._create(spec, runtime, record, lock_fd)
            if found is not None and found.digest != spec.digest:
                raise AgentError(
                    errors.NAME_CONFLICT, f"{name} exists on this node with another specification."
                )
            if found is not None and found.state == IS_EXITED:
                return task_rows.start_reply(
                    name, self._finalize(name, runtime) or record, IS_EXITED, already=True
                )
            already = found is not None and found.state == IS_RUNNING
            if already and record["phase"] == RUNNING:
                return task_rows.start_reply(name, record, IS_RUNNING, already=True)
            if not already:
                if start or not spec.hold_rendezvous_port:
                    self._release_rendezvous_port(spec)
                if not start:
                    self._hold_rendezvous_port(spec)
                    return task_rows.start_reply(name, record, CREATED, already=is_repeat)
                share = self.mps_daemons.mps_share(spec)
                if share is not None:
                    self.ledger.update_task(name, mps=self.mps_daemons.ensure_running(share))
                self.ledger.mark_starting(name)
                try:
                    runtime.start(name)
                except AgentError as error:
                    again = error.code == errors.PORT_IN_USE or isinstance(error, RecreateContainerError)
                    if not again or turn == _MAX_PORT_ATTEMPTS - 1:
                        raise
                    runtime.remove(name)
                    self.ledger.update_task(name, ports={})
                    found = None
                    continue
            break
        return task_rows.start_reply(name, self._record_started(name, runtime), IS_RUNNING, already=already)

    def _release_rendezvous_port(self, spec: TaskSpec) -> None:
        """Refuse when another program listens on the rendezvous port."""
        if spec.rendezvous_port is not None:
            self._rendezvous.release(spec.name, self.directories.task_dir(spec.name), spec.rendezvous_port)

    def _hold_rendezvous_port(self, spec: TaskSpec) -> None:
        if spec.hold_rendezvous_port and spec.rendezvous_port is not None:
            says = rendezvous.rendezvous_greeting(spec.cluster, spec.job, spec.attempt)
            self._rendezvous.listen(
                spec.name, self.directories.task_dir(spec.name), spec.rendezvous_port, says
            )

    def _create(
        self, spec: TaskSpec, runtime: Runtime, record: Record, lock_fd: Optional[int]
    ) -> Optional[ContainerInfo]:
        """Create the task; when the name is taken, return the existing one, otherwise None."""
        order = self._container_config(spec, record, lock_fd)
        unpack_code(self._unpacker, self.directories, order, self._owner_ids(spec, record))
        runtime.prepare(order)
        try:
            runtime.create(order)
        except AgentError as error:
            if error.code != errors.NAME_CONFLICT:
                raise
            found = runtime.find(spec.name)
            if found is None:
                raise
            return found
        return None

    def _container_config(self, spec: TaskSpec, record: Record, lock_fd: Optional[int]) -> ContainerConfig:
        uid, gid = self._owner_ids(spec, record)
        ports = {}
        if spec.ports:
            ports = self.ledger.assign_ports(
                spec.name, spec.ports, self._is_port_free, self.settings.job_ports
            )
        sources = self.directories.volumes.prepare_mounts(spec, uid, gid)
        simulated = {facts.uuid: facts.simulated for facts in self.gpus.gpus()}
        return ContainerConfig(
            spec=spec,
            task_dir=self.directories.prepare_task(
                spec, uid, gid, record["subnet"] if spec.local_rendezvous else None
            ),
            log_path=self.directories.log_path(spec.name),
            host_ports=ports,
            home_path=sources[spec.home.target] if spec.home else None,
            mount_sources=sources,
            real_gpus=[share.uuid for share in spec.gpus if not simulated.get(share.uuid, True)],
            network="host" if spec.host_network else spec.network or task_network(record),
            subnet=record["subnet"],
            network_exists=spec.host_network or spec.network is not None or bool(record.get("from_pool")),
            devices=fabric.expand_device_patterns(spec.devices, self.settings.fabric_devices),
            task_uid=record["task_uid"],
            lock_fd=lock_fd,
            mps_share=self.mps_daemons.mps_share(spec),
        )

    def _owner_ids(self, spec: TaskSpec, record: Record) -> Any:
        if os.geteuid() != 0:
            return None, None  # without root everything belongs to the agent's account
        if spec.runtime == "process":
            return record["task_uid"], record["task_uid"]
        return spec.uid, spec.gid

    def _is_port_free(self, port: int) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind((self.settings.loopback, port))
            except OSError:
                return False
            return True

    def _record_started(self, name: str, runtime: Runtime) -> Record:
        """Record a started task; remove it when the ledger cannot be written."""
        try:
            return self._record_running(name, runtime)
        except AgentError:
            runtime.remove(name)
            raise

    def _record_running(self, name: str, runtime: Runtime) -> Record:
        pid, started_s = runtime.start_info(name)
        facts = procfs.read_process(pid) if pid else None
        record = self.ledger.update_task(
            name,
            phase=RUNNING,
            pid=pid,
            pid_start=facts.start_ticks if facts else None,
            started_s=started_s or time.time(),
        )
        self.record_peak_memory(name)  # while its control group certainly exists
        self.wake_monitor()
        return record

    def _undo_start(self, name: str, runtime: Runtime) -> None:
        """After a refused start, release its reservation if it is certain that nothing runs."""
        record = self.ledger.tasks().get(name)
        if record is None or record["phase"] not in (RESERVED, STARTING):
            return
        with contextlib.suppress(AgentError):
            found = runtime.find(name)
            orphan = found is not None and found.digest != record["digest"]
            if found is None or orphan or found.state == CREATED:
                if found is not None and not orphan:
                    runtime.remove(name)
                self._clean_up(name, record, runtime)
                self.ledger.cancel_reservation(name)
                self.directories.remove_task(name)

    # -- stop ---------------------------------------------------------------------------------------------

    def stop(self, request: JsonObject) -> JsonObject:
        """Tombstone the attempt, then stop its tasks; report whether all are gone.

        With ``tasks`` this applies to these tasks only.
        """
        epoch, attempt = parse_integer(request, "epoch"), parse_integer(request, "attempt")
        job = parse_public_id(request, "job")
        grace_s = parse_seconds(request.get("grace_s"), 10.0)
        tasks = _parse_task_numbers(request.get("tasks"))
        if tasks is not None:
            records = self.ledger.tombstone_tasks(epoch, job, attempt, tasks, grace_s=grace_s)
        elif request.get("tombstone", True):
            records = self.ledger.tombstone(epoch, job, attempt, grace_s=grace_s)
        else:
            records = self.ledger.set_stop_deadline(epoch, job, attempt, grace_s=grace_s)
        if not records:  # running tasks must be stoppable after the loss of a ledger
            records = self._find_unrecorded(job, attempt, tasks)
        until_s = time.monotonic() + _STOP_TIMEOUT_S
        gone = [self._stop_one(name, record, until_s) for name, record in sorted(records.items())]
        self.wake_monitor()
        if all(gone):
            return {
                "gone": True,
                "tasks": [
                    task_rows.row_from_ledger(name, record)
                    for name, record in self.ledger.tasks_of(job, attempt).items()
                    if tasks is None or record["task"] in tasks
                ],
            }
        return {"stopping": True, "stuck_s": self._stuck_s(records)}

    def _stuck_s(self, names: Iterable[str]) -> Optional[float]:
        """Return how long one of these tasks has survived SIGKILL, in seconds; None: none has."""
        known = self.ledger.tasks()
        killed = [known[name]["killed_at_s"] for name in names if known.get(name, {}).get("killed_at_s")]
        return time.time() - min(killed) if killed else None

    def _find_unrecorded(
        self, job: str, attempt: int, tasks: Optional[List[int]] = None
    ) -> Dict[str, Record]:
        return {
            found.name: {"runtime": runtime.kind, "phase": None, "stop_deadline_s": None}
            for runtime in self.runtimes.values()
            for found in runtime.tasks(self.settings.cluster)
            if found.job == job and found.attempt == attempt and (tasks is None or found.task in tasks)
        }

    def _stop_one(self, name: str, record: Record, deadline_s: float) -> bool:
        """Advance the end of one task, waiting until ``deadline_s`` at most; return True when it is gone."""
        if record["phase"] == EXITED and record["removed"]:
            return True
        runtime = self.runtimes[record["runtime"]]
        with self._task_lock(name):
            found = runtime.find(name)
            if found is not None and found.state == IS_RUNNING:
                if (record["stop_deadline_s"] or 0.0) > time.time():
                    with contextlib.suppress(AgentError):  # it ended meanwhile; the monitor notices
                        runtime.signal(name, "TERM")
                    return False
                self.record_peak_memory(name)
                again = record.get("killed_at_s") is not None
                patience_s = min(_KILL_TIMEOUT_S, deadline_s - time.monotonic())
                runtime.kill(
                    name,
                    timeout_s=_REPEATED_KILL_TIMEOUT_S
                    if again
                    else max(_REPEATED_KILL_TIMEOUT_S, patience_s),
                )
            current = self.ledger.tasks().get(name)
            if current is None:
                runtime.remove(name)
            elif current["phase"] == RESERVED or (found is not None and found.state == CREATED):
                runtime.remove(name)
                self._clean_up(name, current, runtime)
                self.ledger.update_task(name, phase=EXITED, removed=True, ended_s=time.time())
            else:
                gone = self._finalize(name, runtime) is not None
                if not gone and current.get("killed_at_s") is None:
                    self.ledger.update_task(name, killed_at_s=time.time())
                return gone
            return True

    def tasks_past_deadline(self, now_s: float) -> List[str]:
        return [
            name
            for name, record in self.ledger.tasks().items()
            if record["phase"] in LIVE_PHASES
            and record["stop_deadline_s"] is not None
            and record["stop_deadline_s"] <= now_s
        ]

    def kill(self, name: str) -> None:
        """Kill a task that exceeded its stop deadline or lost its MPS daemon."""
        record = self.ledger.tasks().get(name)
        if record is not None:
            self._stop_one(name, record, time.monotonic() + _STOP_TIMEOUT_S)

    def signal(self, request: JsonObject) -> JsonObject:
        """Send a signal to one task, or to all of an attempt."""
        self.ledger.check_epoch(parse_integer(request, "epoch"))
        wanted = str(request.get("signal", "TERM")).upper()
        wanted = wanted[3:] if wanted.startswith("SIG") else wanted
        if wanted not in _SIGNALS:
            raise invalid_spec(f"The signal must be one of {', '.join(_SIGNALS)}.")
        job, attempt = parse_public_id(request, "job"), parse_integer(request, "attempt")
        records = {
            name: record
            for name, record in self.ledger.tasks_of(job, attempt).items()
            if record["phase"] == RUNNING and request.get("task") in (None, record["task"])
        }
        if not records:
            raise AgentError(
                errors.NO_SUCH_CONTAINER, f"No task of attempt {attempt} of {job} runs on this node."
            )
        for name, record in records.items():
            self.runtimes[record["runtime"]].signal(name, wanted)
        return {"signalled": sorted(records)}

    def remove(self, request: JsonObject) -> JsonObject:
        """Remove an ended attempt with its logs; succeed when nothing is left."""
        epoch, attempt = parse_integer(request, "epoch"), parse_integer(request, "attempt")
        job = parse_public_id(request, "job")
        self.ledger.check_epoch(epoch)
        records = self.ledger.tasks_of(job, attempt)
        for name, record in records.items():
            runtime = self.runtimes[record["runtime"]]
            with self._task_lock(name):
                if record["phase"] in LIVE_PHASES and self._finalize(name, runtime) is None:
                    raise AgentError(errors.FORBIDDEN, f"{name} is still running; stop it first.")
                if not (self.ledger.tasks().get(name) or record)["removed"]:
                    runtime.remove(name)
                    self._clean_up(name, record, runtime)
                self.directories.remove_task(name)
                self.ledger.remove_tasks([name])
        return {"removed": sorted(records)}

    # -- the end of a task --------------------------------------------------------------------------------

    def finalize(self, name: str) -> bool:
        """Record the end of a task; return False while it runs."""
        record = self.ledger.tasks().get(name)
        if record is None or (record["phase"] == EXITED and record["removed"]):
            return True
        with self._task_lock(name):
            return self._finalize(name, self.runtimes[record["runtime"]]) is not None

    def _finalize(self, name: str, runtime: Runtime) -> Optional[Record]:
        """Record how a task ended and remove its container; None while it runs. Requires the task's lock."""
        record = self.ledger.tasks().get(name)
        if record is None:
            return None
        if record["phase"] != EXITED:
            found = self._wait_for_exit(name, runtime, record)
            if found is not None and found.state != IS_EXITED:
                return None
            self.record_peak_memory(name)
            group = self._cgroups.pop(name, None)
            peak = self.peaks.pop(name, cgroup.NO_USAGE)
            oom_seen = bool(peak.oom_kills) or (
                group is not None and self._kernel_log.has_oom_kill(group.memory_dir)
            )
            oom_seen = oom_seen and (found is None or found.exit_code != 0)
            record = self.ledger.update_task(
                name,
                phase=EXITED,
                exit_code=found.exit_code if found else None,
                oom=(found.oom or oom_seen) if found else (oom_seen or None),
                peak_memory_mib=(found.peak_memory_mib if found else None) or peak.peak_memory_mib,
                started_s=record["started_s"] or (found.started_s if found else None),
                ended_s=(found.ended_s if found else None) or time.time(),
                fault=self._task_fault(record) if found is None or found.exit_code != 0 else None,
            )
            self.wake_monitor()
        if not record["removed"]:
            runtime.remove(name)
            self._clean_up(name, record, runtime)
            record = self.ledger.update_task(name, removed=True)
        return record

    def _wait_for_exit(self, name: str, runtime: Runtime, record: Record) -> Optional[ContainerInfo]:
        """Return the task as its runtime reports it; wait briefly for an engine that notices the end late."""
        deadline_s = time.monotonic() + _EXIT_TIMEOUT_S
        while True:
            found = runtime.find(name)
            gone = not procfs.is_alive(record["pid"], record["pid_start"]) and record["pid"] is not None
            if found is None:
                if gone or record["pid"] is None:
                    return None
                # the engine lost a running process: kill it; its GPU is held until it is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record["pid"], 9)
            elif found.state != IS_RUNNING or not gone:
                return found
            if time.monotonic() > deadline_s:
                return found or task_rows.running_info(name, record)
            time.sleep(0.02)

    def task_name(self, request: JsonObject) -> str:
        """Return the name of the task that a request concerns; rank 0 unless it names another."""
        job, attempt = parse_public_id(request, "job"), parse_integer(request, "attempt")
        task = parse_integer({"task": 0, **request}, "task")
        return container_name(self.settings.cluster, job, attempt, task)

    def _task_fault(self, record: Record) -> Optional[str]:
        return record.get("fault") or self.mps_daemons.task_fault(record)

    def _clean_up(self, name: str, record: Record, runtime: Runtime) -> None:
        """Remove secrets and scratch of a task, and the job's network with its last task."""
        self._rendezvous.release(name, self.directories.task_dir(name), None)
        self.directories.remove_secrets(name)
        self.directories.volumes.remove_scratch(name)
        network = task_network(record)
        others = (
            task_network(each) == network and each["phase"] in LIVE_PHASES and other != name
            for other, each in self.ledger.tasks().items()
        )
        if network is not None and not any(others):
            runtime.remove_network(network)

    def record_peak_memory(self, name: str) -> None:
        """Record the peak memory of a task; its control group is removed soon after its end."""
        group = self._cgroups.get(name)
        if group is None:
            pid = self.ledger.tasks().get(name, {}).get("pid")
            group = cgroup.cgroup_of(pid) if pid else None
        if group is not None:
            self._cgroups[name] = group
            usage = group.usage()
            if usage.peak_memory_mib is not None:
                self.peaks[name] = usage

    # -- listing and reconciliation -----------------------------------------------------------------------

    def list_tasks(self, request: JsonObject) -> JsonObject:
        """Return all tasks, running or ended and not yet removed, and all tombstones."""
        records = dict(self.ledger.tasks())
        rows = []
        for runtime in self.runtimes.values():
            for found in runtime.tasks(self.settings.cluster):
                record = records.pop(found.name, None)
                rows.append(task_rows.row_from_runtime(found, record, runtime.kind))
                if record and found.exit_code:  # ended but not yet finalized
                    reported = {key: record.get(key) for key in task_rows.DISK_FIELDS}
                    rows[-1] = {**reported, "fault": self._task_fault(record), **rows[-1]}
        rows.extend(task_rows.row_from_ledger(name, record) for name, record in records.items())
        for row in rows:
            row.update(self._running_reports(row) if row["state"] == IS_RUNNING else report_files.NO_REPORTS)
            row.update(self.read_last_reports(row["name"]))
        return {
            "containers": sorted(rows, key=lambda row: str(row["name"])),
            "tombstones": self.ledger.tombstones(newest=_MAX_TOMBSTONES_LISTED),
            "boot_id": procfs.boot_id(self.settings.boot_id_path),
            "highest_epoch": self.ledger.epoch(),
            "disk_full_message": self.disk_full_message(),
            "clock_s": time.time(),
        }

    def _running_reports(self, row: JsonObject) -> JsonObject:
        folder, log_path = self.directories.task_dir(row["name"]), self.directories.log_path(row["name"])
        return report_files.read_reports(folder, log_path, row["started_s"], time.time())

    def read_last_reports(self, name: str) -> JsonObject:
        """Return the last metrics and the commit that a task reported, also after its end."""
        return report_files.read_last_reports(self.directories.task_dir(name))

    def record_disk_full(self, message: str) -> None:
        """Remember for a while that an engine's disk is full, which may not be among the watched disks."""
        if self.directories.disk_shortage(self.settings.min_free_disk_mib) is not None:
            return
        self._disk_full_message, self._disk_full_until_s = message, time.monotonic() + _DISK_FULL_HOLD_S

    def disk_full_message(self) -> Optional[str]:
        """Return why this node accepts no work for lack of disk space; None while there is enough.

        A disk that was short must exceed the minimum by a tenth before it counts as sufficient again
        (hysteresis).
        """
        floor = self.settings.min_free_disk_mib
        short = self.directories.disk_shortage(floor + floor // 10 if self._disk_full_message else floor)
        if short is not None:
            self._disk_full_message = f"The disk of the node is full: {short}"
        elif time.monotonic() >= self._disk_full_until_s:
            self._disk_full_message = ""
        return self._disk_full_message or None

    def reconcile(self) -> None:
        """Reconcile ledger and machine: record ends, undo interrupted starts, remove leftovers."""
        for runtime in self.runtimes.values():
            here = {found.name: found for found in runtime.tasks(self.settings.cluster)}
            for name, record in list(self.ledger.tasks().items()):
                if record["runtime"] == runtime.kind:
                    self._reconcile_task(name, record, here.get(name), runtime)
            for name, found in here.items():
                orphaned = name not in self.ledger.tasks() and found.state != IS_RUNNING
                if orphaned and self.ledger.is_tombstoned(found.job, found.attempt):
                    runtime.remove(name)

    def _reconcile_task(
        self, name: str, record: Record, found: Optional[ContainerInfo], runtime: Runtime
    ) -> None:
        stands = record["phase"] == RUNNING and found is not None and found.state == IS_RUNNING
        if stands or (record["phase"] == EXITED and record["removed"]):
            return
        with self._task_lock(name, wait=False) as hold_fd:
            current = self.ledger.tasks().get(name)
            if hold_fd is None or current is None:
                return
            found = runtime.find(name)
            if current["phase"] == RESERVED and found is None:
                self._clean_up(name, current, runtime)
                self.ledger.cancel_reservation(name)
                self.directories.remove_task(name)
            elif found is not None and found.digest != current["digest"]:
                self.ledger.cancel_reservation(name)
            elif found is not None and found.state == IS_RUNNING and current["phase"] in (RESERVED, STARTING):
                self._record_running(name, runtime)
            elif found is None or found.state == IS_EXITED or current["phase"] == EXITED:
                self._finalize(name, runtime)

    def handle_reboot(self) -> bool:
        """After a reboot, end all tasks of the last boot; return True after a reboot."""
        now = procfs.boot_id(self.settings.boot_id_path)
        if self.ledger.read()["boot_id"] == now:
            return False
        with file_lock(os.path.join(self.settings.state_dir, "boot.lock")):
            before = self.ledger.read()["boot_id"]
            if before == now:
                return False
            if before is not None:
                self._end_tasks_of_last_boot()
            self.ledger.set_boot_id(now)
            return before is not None

    def _end_tasks_of_last_boot(self) -> None:
        for runtime in self.runtimes.values():
            for found in runtime.tasks(self.settings.cluster):
                if found.state != IS_EXITED:
                    runtime.remove(found.name)
        for name, record in list(self.ledger.tasks().items()):
            if record["phase"] in LIVE_PHASES:
                runtime = self.runtimes[record["runtime"]]
                runtime.remove(name)
                self._clean_up(name, record, runtime)
                self.ledger.update_task(name, phase=EXITED, removed=True, rebooted=True, ended_s=time.time())

    def _task_lock(self, name: str, *, wait: bool = True) -> ContextManager[Optional[int]]:
        return file_lock(self.directories.lock_path(name), wait=wait)


def _parse_task_numbers(raw: Any) -> Optional[List[int]]:
    """Return the task numbers of a request; None when it concerns all tasks."""
    if raw is None:
        return None
    if not isinstance(raw, list) or not raw or any(type(each) is not int or each < 0 for each in raw):
        raise invalid_spec("tasks is not a list of task numbers.")
    return raw
