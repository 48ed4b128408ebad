"""Starting, stopping and settling tasks: each verb can be repeated after a crash at any point.

One lock per task name keeps agent processes from working on the same task; the ledger says what was
promised, the runtime says what is. Between the two the order is always: promise, act, record.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

from agents.node import cgroup, checkpoint, fabric, machine, meeting, progress, refusals, task_rows
from agents.node.durable import locked
from agents.node.gpus import OK, GpuProvider
from agents.node.ledger import EXITED, HOLDING, RESERVED, RUNNING, STARTING, Ledger, Record, network_of
from agents.node.mps_daemons import MpsDaemons
from agents.node.oom import KernelLog
from agents.node.places import Places
from agents.node.refusals import Refusal, bad_spec
from agents.node.runtimes import CREATED, Found, Order, Runtime
from agents.node.runtimes import EXITED as IS_EXITED
from agents.node.runtimes import RUNNING as IS_RUNNING
from agents.node.settings import Settings
from agents.node.spec import TaskSpec, parse_spec, public_id, seconds, whole_number

Fields = Dict[str, Any]
_PORT_TRIES = 3
_TOMBSTONES_LISTED = 1000
_SETTLE_WITHIN_S = 10.0
_STOP_WITHIN_S, _KILLED_WITHIN_S, _KILLED_AGAIN_WITHIN_S = 8.0, 4.0, 0.2
"""How long a stop waits for all it kills, and for one task; for one that stayed the last time only for a moment."""
_FULL_AGAIN_AFTER_S = 300.0
_SAID_NOTHING: Fields = {"saved_ago_s": None, "progress": None, "progress_ago_s": None}
_SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2", "KILL", "STOP", "CONT")


class Tasks:
    """The tasks of this node.

    ``poke`` is called when one may have ended, so that the watch looks at once; ``starting`` when a start
    begins and when it has ended, so that what can wait keeps out of its way.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        places: Places,
        runtimes: Dict[str, Runtime],
        gpus: GpuProvider,
        agent: List[str],
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.places = places
        self.runtimes = runtimes
        self.gpus = gpus
        self.mps = MpsDaemons(settings, ledger, gpus, agent)
        self.poke: Callable[[], None] = lambda: None
        self.starting: Callable[[], None] = lambda: None
        self.peaks: Dict[str, cgroup.Usage] = {}
        self._groups: Dict[str, cgroup.Group] = {}
        self._kernel_log = KernelLog()
        self._meetings = meeting.Meetings()
        self._full = ""
        self._full_until_s = 0.0

    # -- start --------------------------------------------------------------------------------------------

    def start(self, fields: Fields) -> Fields:
        """Starts a task, or says that it runs already."""
        return self._asked(fields, begins=True)

    def prepare(self, fields: Fields) -> Fields:
        """All of a start but its last step: the task is created, and begins once its start comes."""
        return self._asked(fields, begins=False)

    def _asked(self, fields: Fields, *, begins: bool) -> Fields:
        epoch = whole_number(fields, "epoch")
        spec = parse_spec(fields.get("spec"))
        if spec.cluster != self.settings.cluster:
            raise bad_spec(f"This node belongs to the cluster {self.settings.cluster}.")
        runtime = self.runtimes.get(spec.runtime)
        if runtime is None:
            raise bad_spec(f"This node has no runtime {spec.runtime}.")
        self.starting()
        try:
            return self._start(epoch, spec, runtime, begins)
        finally:
            self.starting()

    def _start(self, epoch: int, spec: TaskSpec, runtime: Runtime, begins: bool) -> Fields:
        with self.places.needs_image(spec.image), self._alone(spec.name) as hold_fd:
            known = self.ledger.tasks().get(spec.name)
            if known is None:
                self.places.check_room()
                self._check_gpus(spec)
                fabric.devices_of(spec.devices, self.settings.fabric_devices)
            own = spec.runtime == "process" and os.geteuid() == 0
            bridged = spec.runtime != "process" and not spec.node_network and spec.network is None
            admission = self._admit(epoch, spec, needs_uid=own, needs_network=bridged)
            record, repeated = admission.record, admission.repeated
            try:
                return self._bring_up(spec, runtime, record, repeated, hold_fd, begins=begins)
            except Refusal:
                self._take_back(spec.name, runtime)
                raise

    def _check_gpus(self, spec: TaskSpec) -> None:
        known = {facts.uuid: facts for facts in self.gpus.gpus()}
        for share in spec.gpus:
            facts = known.get(share.uuid)
            if facts is None:
                raise Refusal(refusals.UNKNOWN_GPU, f"There is no GPU {share.uuid} on this node.")
            if facts.health != OK:
                raise Refusal(refusals.UNKNOWN_GPU, f"GPU {share.uuid} is {facts.health} and takes no work.")

    def _admit(self, epoch: int, spec: TaskSpec, *, needs_uid: bool, needs_network: bool) -> Any:
        try:
            return self.ledger.admit(epoch, spec, needs_uid=needs_uid, needs_network=needs_network)
        except Refusal as refusal:
            if refusal.code != refusals.OVER_MILLI:
                raise
        self.heal()  # perhaps what holds the GPU has ended and nobody looked
        return self.ledger.admit(epoch, spec, needs_uid=needs_uid, needs_network=needs_network)

    def _bring_up(
        self,
        spec: TaskSpec,
        runtime: Runtime,
        record: Record,
        repeated: bool,
        hold_fd: Optional[int],
        *,
        begins: bool,
    ) -> Fields:
        name = spec.name
        if record["phase"] == EXITED:
            return task_rows.started(name, record, IS_EXITED, already=True)
        found = runtime.find(name) if repeated else None
        if found is None and record["phase"] != RESERVED:
            self._settle(name, runtime)
            raise Refusal(refusals.TOMBSTONED, f"{name} was started before and has vanished.")
        for turn in range(_PORT_TRIES):
            if found is None:
                self._free_meet_port(spec)
                found = self._create(spec, runtime, record, hold_fd)
            if found is not None and found.digest != spec.digest:
                raise Refusal(
                    refusals.NAME_CONFLICT, f"{name} exists on this node with another specification."
                )
            if found is not None and found.state == IS_EXITED:
                return task_rows.started(name, self._settle(name, runtime) or record, IS_EXITED, already=True)
            already = found is not None and found.state == IS_RUNNING
            if already and record["phase"] == RUNNING:
                return task_rows.started(name, record, IS_RUNNING, already=True)
            if not already:
                if begins or not spec.listens:
                    self._free_meet_port(spec)
                if not begins:
                    self._listen(spec)
                    return task_rows.started(name, record, CREATED, already=repeated)
                share = self.mps.share_of(spec)
                if share is not None:
                    self.ledger.note(name, mps=self.mps.begin(share))
                self.ledger.begin(name)
                try:
                    runtime.start(name)
                except Refusal as refusal:
                    if refusal.code != refusals.PORT_IN_USE or turn == _PORT_TRIES - 1:
                        raise
                    runtime.remove(name)
                    self.ledger.note(name, ports={})
                    found = None
                    continue
            break
        return task_rows.started(name, self._note_started(name, runtime), IS_RUNNING, already=already)

    def _free_meet_port(self, spec: TaskSpec) -> None:
        """Refuses when something on this machine listens where the ranks of a gang are to meet, but for ourselves."""
        if spec.meet_port is not None:
            self._meetings.let_go(spec.name, self.places.folder(spec.name), spec.meet_port)

    def _listen(self, spec: TaskSpec) -> None:
        if spec.listens and spec.meet_port is not None:
            says = meeting.greeting(spec.cluster, spec.job, spec.attempt)
            self._meetings.listen(spec.name, self.places.folder(spec.name), spec.meet_port, says)

    def _create(
        self, spec: TaskSpec, runtime: Runtime, record: Record, hold_fd: Optional[int]
    ) -> Optional[Found]:
        """Creates the task; gives the one that stands in the way when the name is taken, None otherwise."""
        order = self._order(spec, record, hold_fd)
        runtime.prepare(order)
        try:
            runtime.create(order)
        except Refusal as refusal:
            if refusal.code != refusals.NAME_CONFLICT:
                raise
            found = runtime.find(spec.name)
            if found is None:
                raise
            return found
        return None

    def _order(self, spec: TaskSpec, record: Record, hold_fd: Optional[int]) -> Order:
        uid, gid = self._owner(spec, record)
        ports = {}
        if spec.ports:
            ports = self.ledger.assign_ports(spec.name, spec.ports, self._is_free, self.settings.job_ports)
        sources = self.places.volumes.sources(spec, uid, gid)
        simulated = {facts.uuid: facts.simulated for facts in self.gpus.gpus()}
        return Order(
            spec=spec,
            folder=self.places.prepare_task(spec, uid, gid),
            log_path=self.places.log(spec.name),
            host_ports=ports,
            home_path=sources[spec.home.target] if spec.home else None,
            mount_sources=sources,
            real_gpus=[share.uuid for share in spec.gpus if not simulated.get(share.uuid, True)],
            network="host" if spec.node_network else spec.network or network_of(record),
            subnet=record["subnet"],
            network_is_made=spec.node_network or spec.network is not None or bool(record.get("made_ahead")),
            devices=fabric.devices_of(spec.devices, self.settings.fabric_devices),
            own_uid=record["own_uid"],
            hold_fd=hold_fd,
            share=self.mps.share_of(spec),
        )

    def _owner(self, spec: TaskSpec, record: Record) -> Any:
        if os.geteuid() != 0:
            return None, None  # without root everything belongs to our account
        if spec.runtime == "process":
            return record["own_uid"], record["own_uid"]
        return spec.uid, spec.gid

    def _is_free(self, port: int) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind((self.settings.loopback, port))
            except OSError:
                return False
            return True

    def _note_started(self, name: str, runtime: Runtime) -> Record:
        """What runs must be in the ledger: when that cannot be written, it does not run."""
        try:
            return self._note_running(name, runtime)
        except Refusal:
            runtime.remove(name)
            raise

    def _note_running(self, name: str, runtime: Runtime) -> Record:
        pid, started_s = runtime.begun(name)
        facts = machine.process(pid) if pid else None
        record = self.ledger.note(
            name,
            phase=RUNNING,
            pid=pid,
            pid_start=facts.start_ticks if facts else None,
            started_s=started_s or time.time(),
        )
        self.look_at_peak(name)  # while its control group is there for certain
        self.poke()
        return record

    def _take_back(self, name: str, runtime: Runtime) -> None:
        """After a refused start: frees what was reserved, if it is certain that nothing runs."""
        record = self.ledger.tasks().get(name)
        if record is None or record["phase"] not in (RESERVED, STARTING):
            return
        with contextlib.suppress(Refusal):
            found = runtime.find(name)
            stranger = found is not None and found.digest != record["digest"]
            if found is None or stranger or found.state == CREATED:
                if found is not None and not stranger:
                    runtime.remove(name)
                self._clean(name, record, runtime)
                self.ledger.drop(name)
                self.places.drop_task(name)

    # -- stop ---------------------------------------------------------------------------------------------

    def stop(self, fields: Fields) -> Fields:
        """Forbids the attempt first, then asks its tasks to end; says whether all are gone.

        With ``tasks`` the same for these tasks alone: the others go on.
        """
        epoch, attempt = whole_number(fields, "epoch"), whole_number(fields, "attempt")
        job = public_id(fields, "job")
        grace_s = seconds(fields.get("grace_s"), 10.0)
        tasks = _task_numbers(fields.get("tasks"))
        if tasks is not None:
            records = self.ledger.tombstone_tasks(epoch, job, attempt, tasks, grace_s=grace_s)
        elif fields.get("tombstone", True):
            records = self.ledger.tombstone(epoch, job, attempt, grace_s=grace_s)
        else:
            records = self.ledger.stopping(epoch, job, attempt, grace_s=grace_s)
        if not records:  # a ledger that was lost must not keep what runs from being stopped
            records = self._unknown_to_ledger(job, attempt, tasks)
        until_s = time.monotonic() + _STOP_WITHIN_S
        gone = [self._stop_one(name, record, until_s) for name, record in sorted(records.items())]
        self.poke()
        if all(gone):
            return {
                "gone": True,
                "tasks": [
                    task_rows.facts(name, record)
                    for name, record in self.ledger.tasks_of(job, attempt).items()
                    if tasks is None or record["task"] in tasks
                ],
            }
        return {"stopping": True, "stuck_s": self._stuck_s(records)}

    def _stuck_s(self, names: Iterable[str]) -> Optional[float]:
        """For how long a task of these has been there although it was killed, seconds; None: none is."""
        known = self.ledger.tasks()
        killed = [known[name]["killed_s"] for name in names if known.get(name, {}).get("killed_s")]
        return time.time() - min(killed) if killed else None

    def _unknown_to_ledger(
        self, job: str, attempt: int, tasks: Optional[List[int]] = None
    ) -> Dict[str, Record]:
        return {
            found.name: {"runtime": runtime.kind, "phase": None, "stop_at_s": None}
            for runtime in self.runtimes.values()
            for found in runtime.tasks(self.settings.cluster)
            if found.job == job and found.attempt == attempt and (tasks is None or found.task in tasks)
        }

    def _stop_one(self, name: str, record: Record, until_s: float) -> bool:
        """Moves one task towards its end, for which it waits until ``until_s`` at most; True when it is gone."""
        if record["phase"] == EXITED and record["removed"]:
            return True
        runtime = self.runtimes[record["runtime"]]
        with self._alone(name):
            found = runtime.find(name)
            if found is not None and found.state == IS_RUNNING:
                if (record["stop_at_s"] or 0.0) > time.time():
                    with contextlib.suppress(
                        Refusal
                    ):  # it ended between the two questions: the watch sees that
                        runtime.signal(name, "TERM")
                    return False
                self.look_at_peak(name)
                again = record.get("killed_s") is not None
                patience_s = min(_KILLED_WITHIN_S, until_s - time.monotonic())
                runtime.kill(
                    name,
                    within_s=_KILLED_AGAIN_WITHIN_S if again else max(_KILLED_AGAIN_WITHIN_S, patience_s),
                )
            current = self.ledger.tasks().get(name)
            if current is None:
                runtime.remove(name)
            elif current["phase"] == RESERVED or (found is not None and found.state == CREATED):
                runtime.remove(name)
                self._clean(name, current, runtime)
                self.ledger.note(name, phase=EXITED, removed=True, ended_s=time.time())
            else:
                gone = self._settle(name, runtime) is not None
                if not gone and current.get("killed_s") is None:
                    self.ledger.note(name, killed_s=time.time())
                return gone
            return True

    def past_deadline(self, now_s: float) -> List[str]:
        """The tasks that were asked to leave and whose time for it is over."""
        return [
            name
            for name, record in self.ledger.tasks().items()
            if record["phase"] in HOLDING and record["stop_at_s"] is not None and record["stop_at_s"] <= now_s
        ]

    def end_now(self, name: str) -> None:
        """Ends a task whose time to leave is over, or that lost the daemon which bounds it."""
        record = self.ledger.tasks().get(name)
        if record is not None:
            self._stop_one(name, record, time.monotonic() + _STOP_WITHIN_S)

    def signal(self, fields: Fields) -> Fields:
        """Sends a signal to one task, or to all of an attempt."""
        self.ledger.check_epoch(whole_number(fields, "epoch"))
        wanted = str(fields.get("signal", "TERM")).upper()
        wanted = wanted[3:] if wanted.startswith("SIG") else wanted
        if wanted not in _SIGNALS:
            raise bad_spec(f"The signal is not one of {', '.join(_SIGNALS)}.")
        job, attempt = public_id(fields, "job"), whole_number(fields, "attempt")
        records = {
            name: record
            for name, record in self.ledger.tasks_of(job, attempt).items()
            if record["phase"] == RUNNING and fields.get("task") in (None, record["task"])
        }
        if not records:
            raise Refusal(
                refusals.NO_SUCH_CONTAINER, f"Nothing of attempt {attempt} of {job} runs on this node."
            )
        for name, record in records.items():
            self.runtimes[record["runtime"]].signal(name, wanted)
        return {"signalled": sorted(records)}

    def remove(self, fields: Fields) -> Fields:
        """Drops an attempt that has ended, with its logs. Nothing left is success."""
        epoch, attempt = whole_number(fields, "epoch"), whole_number(fields, "attempt")
        job = public_id(fields, "job")
        self.ledger.check_epoch(epoch)
        records = self.ledger.tasks_of(job, attempt)
        for name, record in records.items():
            runtime = self.runtimes[record["runtime"]]
            with self._alone(name):
                if record["phase"] in HOLDING and self._settle(name, runtime) is None:
                    raise Refusal(refusals.NOT_ALLOWED, f"{name} still runs; it is stopped first.")
                if not (self.ledger.tasks().get(name) or record)["removed"]:
                    runtime.remove(name)
                    self._clean(name, record, runtime)
                self.places.drop_task(name)
                self.ledger.forget([name])
        return {"removed": sorted(records)}

    # -- the end of a task --------------------------------------------------------------------------------

    def settle(self, name: str) -> bool:
        """Records the end of a task that has ended; False while it runs."""
        record = self.ledger.tasks().get(name)
        if record is None or (record["phase"] == EXITED and record["removed"]):
            return True
        with self._alone(name):
            return self._settle(name, self.runtimes[record["runtime"]]) is not None

    def _settle(self, name: str, runtime: Runtime) -> Optional[Record]:
        """Under the task's lock: records how it ended, then removes the container. None while it runs."""
        record = self.ledger.tasks().get(name)
        if record is None:
            return None
        if record["phase"] != EXITED:
            found = self._ended(name, runtime, record)
            if found is not None and found.state != IS_EXITED:
                return None
            self.look_at_peak(name)
            group = self._groups.pop(name, None)
            peak = self.peaks.pop(name, cgroup.NOTHING)
            oom_seen = bool(peak.oom_kills) or (group is not None and self._kernel_log.killed(group.folder))
            oom_seen = oom_seen and (found is None or found.exit_code != 0)
            record = self.ledger.note(
                name,
                phase=EXITED,
                exit_code=found.exit_code if found else None,
                oom=(found.oom or oom_seen) if found else (oom_seen or None),
                peak_memory_mib=(found.peak_memory_mib if found else None) or peak.peak_memory_mib,
                started_s=record["started_s"] or (found.started_s if found else None),
                ended_s=(found.ended_s if found else None) or time.time(),
                fault=self._fault_of(record) if found is None or found.exit_code != 0 else None,
            )
            self.poke()
        if not record["removed"]:
            runtime.remove(name)
            self._clean(name, record, runtime)
            record = self.ledger.note(name, removed=True)
        return record

    def _ended(self, name: str, runtime: Runtime, record: Record) -> Optional[Found]:
        """The task as its runtime knows it; waits a little for an engine that is slow to notice the end."""
        deadline_s = time.monotonic() + _SETTLE_WITHIN_S
        while True:
            found = runtime.find(name)
            gone = not machine.is_alive(record["pid"], record["pid_start"]) and record["pid"] is not None
            if found is None:
                if gone or record["pid"] is None:
                    return None
                # The engine forgot a process that lives: ours to end; its GPU is held until then.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record["pid"], 9)
            elif found.state != IS_RUNNING or not gone:
                return found
            if time.monotonic() > deadline_s:
                return found or task_rows.still_there(name, record)
            time.sleep(0.02)

    def _fault_of(self, record: Record) -> Optional[str]:
        return record.get("fault") or self.mps.fault_of(record)

    def _clean(self, name: str, record: Record, runtime: Runtime) -> None:
        """Drops the secrets and the scratch of a task, and the job's network with its last task."""
        self._meetings.let_go(name, self.places.folder(name), None)
        self.places.drop_secrets(name)
        self.places.volumes.drop_scratch(name)
        network = network_of(record)
        others = (
            network_of(each) == network and each["phase"] in HOLDING and other != name
            for other, each in self.ledger.tasks().items()
        )
        if network is not None and not any(others):
            runtime.remove_network(network)

    def look_at_peak(self, name: str) -> None:
        """Remembers the memory a task used at most; its control group goes soon after it ended."""
        group = self._groups.get(name)
        if group is None:
            pid = self.ledger.tasks().get(name, {}).get("pid")
            group = cgroup.of_process(pid) if pid else None
        if group is not None:
            self._groups[name] = group
            usage = group.usage()
            if usage.peak_memory_mib is not None:
                self.peaks[name] = usage

    # -- seeing -------------------------------------------------------------------------------------------

    def list_tasks(self, fields: Fields) -> Fields:
        """Every task of this node, live or ended and not yet removed, and every tombstone."""
        records = dict(self.ledger.tasks())
        rows = []
        for runtime in self.runtimes.values():
            for found in runtime.tasks(self.settings.cluster):
                record = records.pop(found.name, None)
                rows.append(task_rows.row(found, record, runtime.kind))
                if record and found.exit_code:  # of one whose end is not settled yet
                    told = {key: record.get(key) for key in task_rows.TOLD_OF_DISK}
                    rows[-1] = {**told, "fault": self._fault_of(record), **rows[-1]}
        rows.extend(task_rows.facts(name, record) for name, record in records.items())
        for row in rows:
            row.update(self._said(row) if row["state"] == IS_RUNNING else _SAID_NOTHING)
        return {
            "containers": sorted(rows, key=lambda row: str(row["name"])),
            "tombstones": self.ledger.tombstones(newest=_TOMBSTONES_LISTED),
            "boot_id": machine.boot_id(self.settings.boot_id_path),
            "highest_epoch": self.ledger.epoch(),
            "full_disk": self.full_disk(),
            "clock_s": time.time(),
        }

    def _said(self, row: Fields) -> Fields:
        """What a running task tells by its files."""
        folder, started_s, now_s = self.places.folder(row["name"]), row["started_s"], time.time()
        told = progress.told(folder, started_s, now_s)
        return {
            "saved_ago_s": checkpoint.saved_ago_s(folder, started_s, now_s),
            "progress": told.done if told else None,
            "progress_ago_s": told.ago_s if told else None,
        }

    def note_full_disk(self, sentence: str) -> None:
        """Remembers for a while that an engine had no room: its own disk may not be among those we look at."""
        if self.places.short_of_room(self.settings.disk_floor_mib) is not None:
            return
        self._full, self._full_until_s = sentence, time.monotonic() + _FULL_AGAIN_AFTER_S

    def full_disk(self) -> Optional[str]:
        """Why this node takes no work for want of room; None while there is some.

        A disk that was short counts as full until it has a tenth more than the floor, so that a node on the
        edge does not come and go.
        """
        floor = self.settings.disk_floor_mib
        short = self.places.short_of_room(floor + floor // 10 if self._full else floor)
        if short is not None:
            self._full = f"The disk of the node is full: {short}"
        elif time.monotonic() >= self._full_until_s:
            self._full = ""
        return self._full or None

    def heal(self) -> None:
        """Brings ledger and machine into step: ends recorded, crashed starts undone, leftovers removed."""
        for runtime in self.runtimes.values():
            here = {found.name: found for found in runtime.tasks(self.settings.cluster)}
            for name, record in list(self.ledger.tasks().items()):
                if record["runtime"] == runtime.kind:
                    self._heal_one(name, record, here.get(name), runtime)
            for name, found in here.items():
                orphaned = name not in self.ledger.tasks() and found.state != IS_RUNNING
                if orphaned and self.ledger.is_tombstoned(found.job, found.attempt):
                    runtime.remove(name)

    def _heal_one(self, name: str, record: Record, found: Optional[Found], runtime: Runtime) -> None:
        stands = record["phase"] == RUNNING and found is not None and found.state == IS_RUNNING
        if stands or (record["phase"] == EXITED and record["removed"]):
            return
        with self._alone(name, wait=False) as hold_fd:
            current = self.ledger.tasks().get(name)
            if hold_fd is None or current is None:
                return
            found = runtime.find(name)
            if current["phase"] == RESERVED and found is None:
                self._clean(name, current, runtime)
                self.ledger.drop(name)
                self.places.drop_task(name)
            elif found is not None and found.digest != current["digest"]:
                self.ledger.drop(name)
            elif found is not None and found.state == IS_RUNNING and current["phase"] in (RESERVED, STARTING):
                self._note_running(name, runtime)
            elif found is None or found.state == IS_EXITED or current["phase"] == EXITED:
                self._settle(name, runtime)

    def enter_boot(self) -> bool:
        """After a reboot: removes what the engines revived and ends what it left; True when there was one."""
        now = machine.boot_id(self.settings.boot_id_path)
        if self.ledger.read()["boot_id"] == now:
            return False
        with locked(os.path.join(self.settings.state_dir, "boot.lock")):
            before = self.ledger.read()["boot_id"]
            if before == now:
                return False
            if before is not None:
                self._end_last_boot()
            self.ledger.set_boot(now)
            return before is not None

    def _end_last_boot(self) -> None:
        for runtime in self.runtimes.values():
            for found in runtime.tasks(self.settings.cluster):
                if found.state != IS_EXITED:
                    runtime.remove(found.name)
        for name, record in list(self.ledger.tasks().items()):
            if record["phase"] in HOLDING:
                runtime = self.runtimes[record["runtime"]]
                runtime.remove(name)
                self._clean(name, record, runtime)
                self.ledger.note(name, phase=EXITED, removed=True, rebooted=True, ended_s=time.time())

    @contextlib.contextmanager
    def _alone(self, name: str, *, wait: bool = True) -> Iterator[Optional[int]]:
        with locked(self.places.lock(name), wait=wait) as descriptor:
            yield descriptor


def _task_numbers(raw: Any) -> Optional[List[int]]:
    """The numbers of tasks in a request; None when it is about all of them."""
    if raw is None:
        return None
    if not isinstance(raw, list) or not raw or any(type(each) is not int or each < 0 for each in raw):
        raise bad_spec("tasks is not a list of task numbers.")
    return raw
