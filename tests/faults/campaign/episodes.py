"""One episode: jobs are submitted and cancelled while drawn faults befall the engine; then it must come to rest."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connection

from portal.config.celery import app
from portal.domain.states import TERMINAL_JOB_STATES
from portal.errors import FairwayError
from portal.models import Job, Node
from portal.services.jobs.submission import do_cancel_job
from portal.services.nodes.quarantine import do_clear_node_quarantine
from tests import factories
from tests.engine_harness import EngineHarness, containers_alive, wait_for
from tests.faults.campaign.checker import (
    Ledgers,
    lines,
    make_journal,
    script,
    wrong_in_journals,
    wrong_in_record,
)
from tests.faults.campaign.targets import (
    GPUS,
    NODES,
    OVER_SSH,
    STATE_MIB,
    Server,
    Worker,
    agents_of,
    over_ssh,
    send_all,
    settings_of,
    small_disks,
)
from tests.rig.faulty_link import LinkConditions

LASTS_S = 6.0
QUIET_WITHIN_S = 180.0
"""Sixty seconds are promised for an orphan once faults have stopped; the rest is for the jobs' time and retries."""

Act = tuple[float, Callable[[], None]]


class Field:
    """The engine with its nodes, on which episodes follow each other."""

    def __init__(self, root: Path, postgres: Server, valkey: Server, workers: int) -> None:
        self.root, self.postgres, self.valkey, self.count = root, postgres, valkey, workers
        self.ending = contextlib.ExitStack()
        self.boots = 0

    def __enter__(self) -> Field:
        self.harness = EngineHarness(self.root / "data")
        self.ending.callback(self.harness.close)
        self.people = [factories.user(name) for name in ("ada", "ben")]
        self.admin = factories.user("root", admin=True)
        self.project = factories.project(member=self.people[0], manager=self.people[1])
        self.environment = factories.environment(runtime="process", tool=False)
        pool = factories.pool()
        self.nodes = [
            self.harness.mark_enrolled(self.harness.create_node(pool=pool, gpus=GPUS, name=name), gpus=GPUS)
            for name in NODES
        ]
        self.disks = self.ending.enter_context(
            small_disks([self.harness.folder / name / "state" for name in NODES])
        )
        west = next(node for node in self.nodes if node.name == OVER_SSH)
        self.wire = self.ending.enter_context(over_ssh(west, self.harness))
        # one journal for all: a job does not know where it will run, and GPUs have names of their own
        self.journal = self.harness.folder / "journal"
        make_journal(self.journal, [f"SIM-{name}-{index}" for name in NODES for index in range(GPUS)])
        self.workers = [Worker(self.harness) for _ in range(self.count)]
        for worker in self.workers:
            worker.keep()
        wait_for("all nodes answer", self._all_answer, 60)
        return self

    def _all_answer(self) -> bool:
        return Node.objects.filter(reachable=True, last_seen_at__isnull=False).count() == len(NODES)

    def __exit__(self, *error: object) -> None:
        self.ending.close()

    # -- one episode -----------------------------------------------------------------------------------

    def episode(self, seed: str) -> dict[str, Any]:
        """What befell it, and what was wrong."""
        draw = random.Random(seed)
        self._forgive()
        self.acknowledged: set[str] = set()
        self.cancelled: set[str] = set()
        before = len(lines([self.journal], "starts"))
        names, acts = self._drawn(draw)
        began_s = time.monotonic()
        ledgers = {name: self.harness.folder / name / "state" / "ledger.json" for name in NODES}
        with Ledgers(ledgers) as watched:
            for at_s, act in sorted(acts, key=lambda each: each[0]):
                time.sleep(max(0.0, began_s + at_s - time.monotonic()))
                act()
            self._heal()
            healed_s = time.monotonic()
            restless = self._come_to_rest(watched)
        wrong = [*watched.wrong, *wrong_in_journals([self.journal]), *restless]
        wrong += wrong_in_record(self.acknowledged, self.cancelled)
        return {
            "faults": names,
            "acknowledged": len(self.acknowledged),
            "cancelled": len(self.cancelled),
            "starts": len(lines([self.journal], "starts")) - before,
            "ledger_versions": watched.versions,
            "quiet_after_s": round(time.monotonic() - healed_s, 1),
            "wrong": sorted(set(wrong)),
        }

    def _drawn(self, draw: random.Random) -> tuple[list[str], list[Act]]:
        """What happens when: jobs, cancels of some of them, and one to four faults with their ends."""
        acts: list[Act] = []
        for _ in range(draw.randint(4, 9)):
            at_s, milli = draw.uniform(0.0, LASTS_S * 0.7), draw.choice([1000, 1000, 500])
            tasks, gpus = draw.choice([(1, 1), (1, 2), (2, 1)]) if milli == 1000 else (1, 1)
            lasts_s = draw.choice([0.2, 1.0, 3.0])
            who, code = draw.choice(self.people), draw.choice([0, 0, 0, 0, 3])
            cancel_s = at_s + draw.choice([0.0, 0.02, 0.3, 1.5]) if draw.random() < 0.3 else None
            acts += self._job(at_s, who, milli, tasks, gpus, lasts_s, code, cancel_s)
        names = []
        for _ in range(draw.randint(1, 4)):
            name = draw.choice(sorted(FAULTS))
            on_wire = name.endswith("wire")  # which may last longer than anybody waits for a sign of life
            begin_s = draw.uniform(0.1, LASTS_S)
            lasts_s = draw.choice([0.1, 1.0, 4.0, 18.0 if on_wire else 4.0])
            node, worker = draw.choice(self.nodes), draw.choice(self.workers)
            names.append(f"{name}@{begin_s:.2f}+{lasts_s:g}:{OVER_SSH if on_wire else node.name}")
            begin, end = FAULTS[name](self, node, worker)
            acts += [(begin_s, begin), (begin_s + lasts_s, end)]
        acts += [(float(at_s), self._keep_workers) for at_s in range(1, int(LASTS_S) + 6)]
        return names, acts

    def _job(
        self,
        at_s: float,
        who: Any,
        milli: int,
        tasks: int,
        gpus: int,
        lasts_s: float,
        code: int,
        cancel_s: float | None,
    ) -> list[Act]:
        made: list[Job] = []

        def submit() -> None:
            with unheard():
                job = factories.job(
                    who,
                    self.project,
                    self.environment,
                    command=script(self.journal, milli, lasts_s, code),
                    tasks=tasks,
                    gpus_per_task=gpus,
                    milli_per_gpu=milli,
                    cpu_milli=100,
                    memory_mib=64,
                    termination_grace_s=1,
                )
                self.acknowledged.add(job.public_id)
                made.append(job)

        def cancel() -> None:
            with unheard():
                if made:
                    self.cancelled.add(made[0].public_id)
                    do_cancel_job(who, made[0])

        return [(at_s, submit)] if cancel_s is None else [(at_s, submit), (cancel_s, cancel)]

    # -- rest ------------------------------------------------------------------------------------------

    def _keep_workers(self) -> None:
        for worker in self.workers:
            worker.keep()

    def _heal(self) -> None:
        """Ends every fault, also one whose end an act did not reach."""
        self.postgres.start()
        self.valkey.start()
        for worker in self.workers:
            worker.send(signal.SIGCONT)
        self._keep_workers()
        _weather(self)
        for node in self.nodes:
            send_all(agents_of(settings_of(node)), signal.SIGCONT)
            (self.harness.folder / node.name / "state" / "filler").unlink(missing_ok=True)
        connection.close()

    def _forgive(self) -> None:
        """Nodes that an episode before put aside are trusted: each episode stands for a day of its own."""
        for node in Node.objects.all():
            do_clear_node_quarantine(self.admin, node)

    def _come_to_rest(self, watched: Ledgers) -> list[str]:
        """Waits until all jobs have ended and nothing is left on the nodes; gives what is, when it is too late."""
        deadline_s = time.monotonic() + QUIET_WITHIN_S
        left: list[str] = ["nobody could look"]
        while left:
            if time.monotonic() > deadline_s:
                return [f"not at rest: {each}" for each in left]
            time.sleep(0.2)
            self._keep_workers()
            with unheard():
                live = Job.objects.exclude(state__in=[state.value for state in TERMINAL_JOB_STATES])
                left = [f"{job.public_id} {job.state} {job.reason}" for job in live]
                left += [f"{name} lives" for name in containers_alive(self.harness.folder)]
                left += [f"{name} in a ledger" for name in watched.holding()]
        return []


@contextlib.contextmanager
def unheard() -> Any:
    """What the record does not take now was not acknowledged."""
    try:
        yield
    except DatabaseError:
        connection.close()
    except (FairwayError, redis.RedisError):
        pass


# -- faults --------------------------------------------------------------------------------------------

Pair = tuple[Callable[[], None], Callable[[], None]]


def _kill_worker(field: Field, node: Node, worker: Worker) -> Pair:
    return lambda: worker.send(signal.SIGKILL), worker.keep


def _stop_worker(field: Field, node: Node, worker: Worker) -> Pair:
    return lambda: worker.send(signal.SIGSTOP), lambda: worker.send(signal.SIGCONT)


def _kill_agents(field: Field, node: Node, worker: Worker) -> Pair:
    return lambda: send_all(agents_of(settings_of(node)), signal.SIGKILL), _nothing


def _freeze_agents(field: Field, node: Node, worker: Worker) -> Pair:
    frozen: list[int] = []

    def begin() -> None:
        frozen.extend(agents_of(settings_of(node)))
        send_all(frozen, signal.SIGSTOP)

    return begin, lambda: send_all(frozen, signal.SIGCONT)


def _reboot(field: Field, node: Node, worker: Worker) -> Pair:
    def begin() -> None:
        field.boots += 1
        field.harness.reboot(node.name, f"boot-{os.getpid()}-{field.boots}")
        send_all(agents_of(settings_of(node)), signal.SIGKILL)

    return begin, _nothing


def _fill_disk(field: Field, node: Node, worker: Worker) -> Pair:
    filler = field.harness.folder / node.name / "state" / "filler"

    def begin() -> None:
        if field.disks:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
                for _ in range(STATE_MIB * 64):
                    stream.write(b"\0" * 16_384)

    return begin, lambda: filler.unlink(missing_ok=True)


def _flush_broker(field: Field, node: Node, worker: Worker) -> Pair:
    def begin() -> None:
        with contextlib.suppress(redis.RedisError):
            redis.Redis.from_url(settings.REDIS_URL, socket_timeout=2).flushall()

    return begin, _nothing


def _kill_broker(field: Field, node: Node, worker: Worker) -> Pair:
    return lambda: field.valkey.end(signal.SIGKILL), field.valkey.start


def _stop_database(field: Field, node: Node, worker: Worker) -> Pair:
    return lambda: field.postgres.end(signal.SIGQUIT), field.postgres.start


def _messages_again(field: Field, node: Node, worker: Worker) -> Pair:
    def begin() -> None:
        with contextlib.suppress(Exception):  # the broker may be away: then nothing comes again
            for _ in range(30):
                app.send_task("scheduler.cycle", args=["again"], queue="cycle", retry=False)
                hint = [node.public_id, "start", ""]
                app.send_task("scheduler.notify_node", args=hint, queue="nodes", retry=False)

    return begin, begin


def _freeze_wire(field: Field, node: Node, worker: Worker) -> Pair:
    """Neither side hears of it, and both believe in the connection."""
    return lambda: _weather(field, frozen=True), lambda: _weather(field)


def _cut_wire(field: Field, node: Node, worker: Worker) -> Pair:
    return lambda: _weather(field, cut_after_bytes=0), lambda: _weather(field)


def _slow_wire(field: Field, node: Node, worker: Worker) -> Pair:
    return lambda: _weather(field, delay_s=0.4, bytes_per_s=8_000), lambda: _weather(field)


def _weather(field: Field, **changes: Any) -> None:
    """Weather from now on, also for connections that stand."""
    for name, value in vars(LinkConditions(**changes)).items():
        setattr(field.wire.weather, name, value)


def _nothing() -> None:
    """The fault has no end of its own."""


FAULTS: dict[str, Callable[[Field, Node, Worker], Pair]] = {
    "kill worker": _kill_worker,
    "stop worker": _stop_worker,
    "kill agents": _kill_agents,
    "freeze agents": _freeze_agents,
    "reboot node": _reboot,
    "fill disk": _fill_disk,
    "flush broker": _flush_broker,
    "kill broker": _kill_broker,
    "stop database at once": _stop_database,
    "messages again": _messages_again,
    "freeze wire": _freeze_wire,
    "cut wire": _cut_wire,
    "slow wire": _slow_wire,
}
