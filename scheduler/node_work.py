"""What the record wants of one node now: starts, stops, terminals and first answers of servers, when each is due."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from django.db import Error as DatabaseError

from agents.engines.contract import Refused, TaskKey, Unknown
from portal.models import ClusterSettings, Task
from portal.services import lifecycle
from portal.services.reaching import is_to_try
from portal.services.terminals import terminals_to_open
from portal.words.reasons import EndReason
from portal.words.states import AttemptState, JobKind
from scheduler import dispatch
from scheduler.dispatch import After, Door
from scheduler.hands import Hands
from scheduler.images import ImageBringer
from scheduler.leases import Deposed
from scheduler.reaching import try_to_reach
from scheduler.reconcile import collect_and_remove
from scheduler.terminals import open_terminal

log = logging.getLogger(__name__)

STOP_AGAIN_S = 5.0
REACH_AGAIN_S = 1.0
PROBE_EVERY_S = 0.25
IMAGE_LOOK_S = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 8.0
START_TRIES = 5
NEVER_S = 3600.0

Key = tuple[str, int]


class NodeWork:
    """The work of one node, read from the record at each look and given to the hands."""

    def __init__(self, hands: Hands, images: ImageBringer, compare_soon: Callable[[], None]) -> None:
        self._hands = hands
        self._images = images
        self._compare_soon = compare_soon
        self._due_s: dict[Key, float] = {}
        self._tries: dict[int, int] = {}

    def look(self, door: Door) -> float:
        """Begins what is due; gives the seconds until something else is."""
        held = dispatch.tasks_held(door.node)
        if any(_is_to_serve(task) for task in held):
            held = dispatch.tasks_to_serve(door.node)
        wanted: dict[Key, Callable[[], None]] = {}
        adopting: bool | None = None  # after a restore nothing starts, also not what the record had begun
        for task in held:
            if task.attempt.stop_wanted_at is not None:
                wanted[("stop", task.attempt_id)] = partial(self._stop, door, task)
            elif task.leave_wanted_at is not None:
                wanted[("leave", task.pk)] = partial(self._leave, door, task)
            elif is_to_try(task, task.attempt):
                wanted[("reach", task.attempt_id)] = partial(self._reach, door, task)
            elif lifecycle.is_to_start(task, task.attempt):
                if adopting is None:
                    adopting = ClusterSettings.objects.get(id=1).adopt_only
                if not adopting:
                    wanted[("start", task.pk)] = partial(self._start, door, task)
            elif _waits_for_its_server(task):
                wanted[("probe", task.pk)] = partial(self._probe, door, task)
        for terminal in terminals_to_open(door.node):
            wanted[("terminal", terminal.pk)] = partial(open_terminal, door, terminal)
        self._due_s = {key: due_s for key, due_s in self._due_s.items() if key in wanted}
        live = {task.pk for task in held}
        self._tries = {pk: tries for pk, tries in self._tries.items() if pk in live}
        next_s = NEVER_S
        for key, work in wanted.items():
            wait_s = self._due_s.get(key, 0.0) - time.monotonic()
            if wait_s > 0:
                next_s = min(next_s, wait_s)
            else:
                self._hands.take(key, work)
        return next_s

    def _later(self, kind: str, row: int, after_s: float) -> None:
        self._due_s[(kind, row)] = time.monotonic() + after_s

    # -- start -------------------------------------------------------------------------------------

    def _start(self, door: Door, task: Task) -> None:
        if self._images.is_bringing(task):
            self._later("start", task.pk, IMAGE_LOOK_S)
            return
        failed = self._images.failure(task)
        if failed is not None:
            dispatch.give_up(door.node, task, EndReason.IMAGE_MISSING, failed)
            return
        tries = self._tries[task.pk] = self._tries.get(task.pk, 0) + 1
        try:
            after = dispatch.start_task(door, task, tries_left=START_TRIES - tries)
        except (Unknown, Deposed, DatabaseError):
            raise
        except Exception:  # one task that cannot be told to the node must not keep the others from it
            log.exception("task %s could not be started on %s", task.pk, door.node.name)
            if tries >= START_TRIES:
                detail = "an error of Fairway's own; its log has the details."
                dispatch.give_up(door.node, task, EndReason.START_REFUSED, detail)
                return
            after = After.LATER
        match after:
            case After.NOTHING:
                return
            case After.BRING_IMAGE:
                self._images.bring(door.node, task)
                self._later("start", task.pk, IMAGE_LOOK_S)
            case After.LATER:
                self._later("start", task.pk, min(FIRST_RETRY_S * 2.0 ** (tries - 1), LAST_RETRY_S))
                self._compare_soon()  # what it says may be news to the record

    def _reach(self, door: Door, task: Task) -> None:
        self._later("reach", task.attempt_id, REACH_AGAIN_S)
        try_to_reach(door, task)

    # -- stop --------------------------------------------------------------------------------------

    def _stop(self, door: Door, task: Task) -> None:
        self._later("stop", task.attempt_id, STOP_AGAIN_S)
        self._end(door, task, lambda: dispatch.stop_attempt(door, task.attempt))

    def _leave(self, door: Door, task: Task) -> None:
        self._later("leave", task.pk, STOP_AGAIN_S)
        self._end(door, task, lambda: dispatch.stop_task(door, task))

    def _end(self, door: Door, task: Task, stop: Callable[[], bool]) -> None:
        try:
            if stop():
                collect_and_remove(door, task.attempt.job.public_id, task.attempt.number)
        except Refused as refusal:
            if refusal.code == "stale_epoch":
                raise Unknown(refusal.message) from refusal  # a new hello brings a higher one
            log.warning("%s does not stop attempt %s: %s", door.node.name, task.attempt_id, refusal)

    # -- the server of a workspace -----------------------------------------------------------------

    def _probe(self, door: Door, task: Task) -> None:
        self._later("probe", task.pk, PROBE_EVERY_S)
        port = task.attempt.job.environment.tool_port
        key = TaskKey(task.attempt.job.public_id, task.attempt.number, task.rank)
        try:
            answers = port is None or door.engine.probe(key, port, "/") is not None
        except Refused as refusal:  # it has just ended, and the news is on its way
            log.info("%s cannot be asked on %s: %s", key, door.node.name, refusal)
            return
        if answers:
            lifecycle.attempt_ready(task.attempt_id)


def _is_to_serve(task: Task) -> bool:
    attempt = task.attempt
    return lifecycle.is_to_start(task, attempt) or is_to_try(task, attempt) or _waits_for_its_server(task)


def _waits_for_its_server(task: Task) -> bool:
    attempt = task.attempt
    return (
        attempt.state == AttemptState.RUNNING
        and attempt.ready_at is None
        and attempt.job.kind == JobKind.WORKSPACE.value
    )
