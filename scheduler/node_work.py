"""What the record wants of one node now: starts, stops, terminals and first answers of servers, when each is due."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from django.db import Error as DatabaseError

from agents.engines.contract import AgentError, TaskKey, Unknown
from portal.models import ClusterSettings, Task
from portal.services import lifecycle
from portal.services.reaching import should_check_rendezvous
from portal.services.terminals import terminals_to_open
from portal.words.reasons import EndReason
from portal.words.states import AttemptState, JobKind
from scheduler import dispatch
from scheduler.dispatch import NextStep, NodeConnection
from scheduler.hands import KeyedPool
from scheduler.images import ImagePuller
from scheduler.leases import LeaseLostError
from scheduler.reaching import check_connectivity
from scheduler.reconcile import collect_and_remove
from scheduler.terminals import open_terminal

log = logging.getLogger(__name__)

STOP_RETRY_S = 5.0
CONNECTIVITY_RETRY_S = 1.0
PROBE_INTERVAL_S = 0.25
IMAGE_POLL_S = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 8.0
MAX_START_ATTEMPTS = 5
NOTHING_DUE_S = 3600.0

Key = tuple[str, int]


class NodeQueue:
    """The work of one node, read from the record at each look and given to the hands."""

    def __init__(self, pool: KeyedPool, images: ImagePuller, reconcile_soon: Callable[[], None]) -> None:
        self._pool = pool
        self._images = images
        self._reconcile_soon = reconcile_soon
        self._due_s: dict[Key, float] = {}
        self._start_attempts: dict[int, int] = {}

    def run_due(self, door: NodeConnection) -> float:
        """Begins what is due; gives the seconds until something else is."""
        held = dispatch.active_tasks(door.node)
        if any(_needs_details(task) for task in held):
            held = dispatch.active_tasks_with_details(door.node)
        wanted: dict[Key, Callable[[], None]] = {}
        adopting: bool | None = None  # after a restore nothing starts, also not what the record had begun
        for task in held:
            if task.attempt.stop_wanted_at is not None:
                wanted[("stop", task.attempt_id)] = partial(self._stop, door, task)
            elif task.leave_wanted_at is not None:
                wanted[("leave", task.pk)] = partial(self._evict, door, task)
            elif should_check_rendezvous(task, task.attempt):
                wanted[("reach", task.attempt_id)] = partial(self._check_connectivity, door, task)
            elif lifecycle.should_start(task, task.attempt):
                if adopting is None:
                    adopting = ClusterSettings.objects.get(id=1).adopt_only
                if not adopting:
                    wanted[("start", task.pk)] = partial(self._start, door, task)
            elif _awaits_readiness(task):
                wanted[("probe", task.pk)] = partial(self._probe, door, task)
        for terminal in terminals_to_open(door.node):
            wanted[("terminal", terminal.pk)] = partial(open_terminal, door, terminal)
        self._due_s = {key: due_s for key, due_s in self._due_s.items() if key in wanted}
        live = {task.pk for task in held}
        self._start_attempts = {pk: tries for pk, tries in self._start_attempts.items() if pk in live}
        next_s = NOTHING_DUE_S
        for key, work in wanted.items():
            wait_s = self._due_s.get(key, 0.0) - time.monotonic()
            if wait_s > 0:
                next_s = min(next_s, wait_s)
            else:
                self._pool.submit(key, work)
        return next_s

    def _schedule(self, kind: str, row: int, after_s: float) -> None:
        self._due_s[(kind, row)] = time.monotonic() + after_s

    # -- start -------------------------------------------------------------------------------------

    def _start(self, door: NodeConnection, task: Task) -> None:
        if self._images.is_pulling(task):
            self._schedule("start", task.pk, IMAGE_POLL_S)
            return
        failed = self._images.take_failure(task)
        if failed is not None:
            dispatch.fail_task(door.node, task, EndReason.IMAGE_MISSING, failed)
            return
        tries = self._start_attempts[task.pk] = self._start_attempts.get(task.pk, 0) + 1
        try:
            after = dispatch.start_task(door, task, attempts_left=MAX_START_ATTEMPTS - tries)
        except (Unknown, LeaseLostError, DatabaseError):
            raise
        except Exception:  # one task that cannot be told to the node must not keep the others from it
            log.exception("task %s could not be started on %s", task.pk, door.node.name)
            if tries >= MAX_START_ATTEMPTS:
                detail = "an error of Fairway's own; its log has the details."
                dispatch.fail_task(door.node, task, EndReason.START_REFUSED, detail)
                return
            after = NextStep.RETRY
        match after:
            case NextStep.DONE:
                return
            case NextStep.PULL_IMAGE:
                self._images.pull(door.node, task)
                self._schedule("start", task.pk, IMAGE_POLL_S)
            case NextStep.RETRY:
                self._schedule("start", task.pk, min(FIRST_RETRY_S * 2.0 ** (tries - 1), LAST_RETRY_S))
                self._reconcile_soon()  # what it says may be news to the record

    def _check_connectivity(self, door: NodeConnection, task: Task) -> None:
        self._schedule("reach", task.attempt_id, CONNECTIVITY_RETRY_S)
        check_connectivity(door, task)

    # -- stop --------------------------------------------------------------------------------------

    def _stop(self, door: NodeConnection, task: Task) -> None:
        self._schedule("stop", task.attempt_id, STOP_RETRY_S)
        self._end(door, task, lambda: dispatch.stop_attempt(door, task.attempt))

    def _evict(self, door: NodeConnection, task: Task) -> None:
        self._schedule("leave", task.pk, STOP_RETRY_S)
        self._end(door, task, lambda: dispatch.stop_task(door, task))

    def _end(self, door: NodeConnection, task: Task, stop: Callable[[], bool]) -> None:
        try:
            if stop():
                collect_and_remove(door, task.attempt.job.public_id, task.attempt.number)
        except AgentError as refusal:
            if refusal.code == "stale_epoch":
                raise Unknown(refusal.message) from refusal  # a new hello brings a higher one
            log.warning("%s does not stop attempt %s: %s", door.node.name, task.attempt_id, refusal)

    # -- the server of a workspace -----------------------------------------------------------------

    def _probe(self, door: NodeConnection, task: Task) -> None:
        self._schedule("probe", task.pk, PROBE_INTERVAL_S)
        port = task.attempt.job.environment.tool_port
        key = TaskKey(task.attempt.job.public_id, task.attempt.number, task.rank)
        try:
            answers = port is None or door.engine.probe(key, port, "/") is not None
        except AgentError as refusal:  # it has just ended, and the news is on its way
            log.info("%s cannot be asked on %s: %s", key, door.node.name, refusal)
            return
        if answers:
            lifecycle.record_attempt_ready(task.attempt_id)


def _needs_details(task: Task) -> bool:
    attempt = task.attempt
    return lifecycle.should_start(task, attempt) or should_check_rendezvous(task, attempt) or _awaits_readiness(task)


def _awaits_readiness(task: Task) -> bool:
    attempt = task.attempt
    return (
        attempt.state == AttemptState.RUNNING
        and attempt.ready_at is None
        and attempt.job.kind == JobKind.WORKSPACE.value
    )
