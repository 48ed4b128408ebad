"""Desired actions for one node (starts, stops, terminals, readiness probes), when each is due, and their threads."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from django.db import Error as DatabaseError
from django.db import connection

from agents import verbs
from agents.engines.replies import AgentError, OutcomeUnknownError, TaskKey, read_listening, read_status
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import AttemptState, JobKind, RuntimeKind
from portal.models import ClusterSettings, Task
from portal.selectors.jobs.rights import Denial
from portal.services.jobs.checkpoints import listing_is_due
from portal.services.jobs.notebooks import LIST_NOTEBOOKS_HINT, listings_to_make
from portal.services.lifecycle import job_control, readiness
from portal.services.lifecycle.rendezvous_check import should_check_rendezvous
from portal.services.workspaces.saved_images import SAVE_IMAGE_HINT, images_to_save
from portal.services.workspaces.secret_replacement import (
    REPLACE_SECRET_HINT,
    Replacement,
    due_replacements,
)
from portal.services.workspaces.terminals import OPEN_TERMINAL_HINT, terminals_to_open
from scheduler.leases import LeaseLostError
from scheduler.nodes import dispatch
from scheduler.nodes.checkpoints import list_checkpoints, listing_applies
from scheduler.nodes.dispatch import NextStep
from scheduler.nodes.environment_records import record_environment, recording_wait_s
from scheduler.nodes.gang_connectivity import check_connectivity
from scheduler.nodes.image_pulls import ImagePuller
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.notebooks import list_notebooks
from scheduler.nodes.reconcile import collect_and_remove
from scheduler.nodes.saved_images import save_image
from scheduler.nodes.secret_replacements import replace_secret
from scheduler.nodes.storage_usage import POLL_S as STORAGE_POLL_S
from scheduler.nodes.storage_usage import measure_storage
from scheduler.nodes.terminals import open_terminal

log = logging.getLogger(__name__)

MAX_THREADS = 4
STOP_RETRY_S = 5.0
CONNECTIVITY_RETRY_S = 1.0
PROBE_INTERVAL_S = 0.25
SERVICE_PROBE_INTERVAL_S = 1.0
LIVENESS_INTERVAL_S = 5.0
FAILED_LIVENESS_PROBES = 2
"""After this many failed probes in a row a replica gets no more requests; one may be a short pause."""
ENVIRONMENT_POLL_S = 0.5
IMAGE_POLL_S = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 8.0
MAX_START_ATTEMPTS = 5
NOTHING_DUE_S = 3600.0
SECRET_RETRY_S = 10.0

REQUEST_HINTS = frozenset({OPEN_TERMINAL_HINT, LIST_NOTEBOOKS_HINT, SAVE_IMAGE_HINT, REPLACE_SECRET_HINT})
"""Notifications of requests that ``run_due`` answers."""

Key = tuple[str, int]
_STORAGE: Key = ("storage", 0)


class KeyedPool:
    """A small thread pool, so that one slow call to a node does not delay the others."""

    def __init__(
        self, name: str, on_error: Callable[[BaseException], None], on_done: Callable[[], None]
    ) -> None:
        self._name = name
        self._on_error = on_error
        self._on_done = on_done
        self._work: queue.SimpleQueue[tuple[object, Callable[[], None]] | None] = queue.SimpleQueue()
        self._busy: set[object] = set()
        self._ended_s: dict[object, float] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, key: object, work: Callable[[], None], read_s: float) -> None:
        """Start ``work``, found due by a read that began at ``read_s`` of the monotonic clock.

        Not if work with the same key is running, queued, or ended after that time: it may have done this already.
        ``on_done`` causes the next read.
        """
        with self._lock:
            if not self._accepts(key, read_s):
                return
            self._ended_s = {each: ended_s for each, ended_s in self._ended_s.items() if ended_s > read_s}
            self._busy.add(key)
            if len(self._threads) < min(len(self._busy), MAX_THREADS):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._work.put((key, work))

    def accepts(self, key: object, read_s: float) -> bool:
        """Return True if ``submit`` would start work with this key now."""
        with self._lock:
            return self._accepts(key, read_s)

    def _accepts(self, key: object, read_s: float) -> bool:
        return key not in self._busy and self._ended_s.get(key, read_s) <= read_s

    def shut_down(self, within_s: float = 2.0) -> None:
        """Accept no more work; wait up to ``within_s`` for running work."""
        for _ in self._threads:
            self._work.put(None)
        deadline_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            key, work = item
            try:
                work()
            except BaseException as error:  # the actor decides what to do
                self._on_error(error)
            finally:
                connection.close_if_unusable_or_obsolete()
                with self._lock:
                    self._ended_s[key] = time.monotonic()
                    self._busy.discard(key)
                self._on_done()
        connection.close()


class NodeQueue:
    """Work of one node, read from the database on each run and submitted to the pool."""

    def __init__(self, pool: KeyedPool, images: ImagePuller, reconcile_soon: Callable[[], None]) -> None:
        self._pool = pool
        self._images = images
        self._reconcile_soon = reconcile_soon
        self._due_s: dict[Key, float] = {_STORAGE: time.monotonic() + STORAGE_POLL_S}
        self._start_attempts: dict[int, int] = {}
        self._failed_probes: dict[int, int] = {}
        self._has_requests = False
        self._needed_details = False
        """The last run found starts or probes: probably the next one does, too."""

    def run_due(self, connection: NodeConnection, *, has_requests: bool = True) -> float:
        """Submit what is due; return the seconds until the next due time.

        Requests of people (``REQUEST_HINTS``) are read if there may be new ones, or some are not answered.
        """
        read_s = time.monotonic()
        read = dispatch.active_tasks_with_details if self._needed_details else dispatch.active_tasks
        tasks = read(connection.node)
        needs_details = any(_needs_details(task) for task in tasks)
        if needs_details and not self._needed_details:
            tasks = dispatch.active_tasks_with_details(connection.node)
        self._needed_details = needs_details
        actions: dict[Key, Callable[[], None]] = {}
        starts: dict[Key, Task] = {}
        next_s = NOTHING_DUE_S
        recovering: bool | None = None  # after a restore nothing starts, even if a start was recorded before
        for task in tasks:
            if task.attempt.stop_requested_at is not None:
                actions[("stop", task.attempt_id)] = partial(self._stop, connection, task)
            elif task.eviction_requested_at is not None:
                actions[("evict", task.pk)] = partial(self._evict, connection, task)
            elif should_check_rendezvous(task, task.attempt):
                actions[("connectivity", task.attempt_id)] = partial(
                    self._check_connectivity, connection, task
                )
            elif job_control.should_start(task, task.attempt):
                if recovering is None:
                    recovering = ClusterSettings.objects.get(id=1).recovery_mode
                if not recovering:
                    starts["start", task.pk] = task
            elif _awaits_readiness(task):
                actions[("probe", task.pk)] = partial(self._probe, connection, task)
            elif task.attempt.job.has_start_order and job_control.awaits_ports(task):
                actions[("listening", task.pk)] = partial(self._probe_ports, connection, task)
            elif (wait_s := recording_wait_s(connection, task)) is not None:
                if wait_s <= 0:
                    actions.setdefault(
                        ("environment", 0), partial(record_environment, connection, task)
                    )  # of one job at a time
                next_s = min(next_s, max(wait_s, ENVIRONMENT_POLL_S))
            elif listing_is_due(task.attempt) and listing_applies(connection, task):
                actions[("checkpoints", task.attempt_id)] = partial(list_checkpoints, connection, task)
            if _is_ready_replica(task):
                actions[("liveness", task.pk)] = partial(self._probe_liveness, connection, task)
        actions |= self._start_actions(connection, starts, read_s)
        if has_requests or self._has_requests:
            requests = _requests(connection)
            for due in due_replacements(connection.node):
                requests["secret", due.task.pk] = partial(self._replace_secret, connection, due)
            self._has_requests = bool(requests)
            actions |= requests
        actions[_STORAGE] = partial(self._measure_storage, connection)
        self._due_s = {key: due_s for key, due_s in self._due_s.items() if key in actions}
        live = {task.pk for task in tasks}
        self._start_attempts = {pk: attempts for pk, attempts in self._start_attempts.items() if pk in live}
        self._failed_probes = {pk: count for pk, count in self._failed_probes.items() if pk in live}
        for key, work in actions.items():
            wait_s = self._due_s.get(key, 0.0) - time.monotonic()
            if wait_s > 0:
                next_s = min(next_s, wait_s)
            else:
                self._pool.submit(key, work, read_s)
        return next_s

    def _schedule(self, kind: str, row: int, after_s: float) -> None:
        self._due_s[(kind, row)] = time.monotonic() + after_s

    # -- start -------------------------------------------------------------------------------------

    def _start_actions(
        self, connection: NodeConnection, starts: Mapping[Key, Task], read_s: float
    ) -> dict[Key, Callable[[], None]]:
        """Return the actions that start tasks; the rights of their owners are read for all of them at once."""
        due = [
            task
            for key, task in starts.items()
            if self._due_s.get(key, 0.0) <= time.monotonic() and self._pool.accepts(key, read_s)
        ]
        denials = dispatch.denials_by_task(due)
        return {
            key: partial(self._start, connection, task, denials.get(task.pk)) for key, task in starts.items()
        }

    def _start(self, connection: NodeConnection, task: Task, denial: Denial | None) -> None:
        if self._images.is_pulling(connection.node, task):
            self._schedule("start", task.pk, IMAGE_POLL_S)
            return
        failed = self._images.take_failure(task)
        if failed is not None:
            dispatch.fail_task(connection.node, task, EndReason.IMAGE_MISSING, failed)
            return
        attempts = self._start_attempts[task.pk] = self._start_attempts.get(task.pk, 0) + 1
        try:
            next_step = dispatch.start_task(
                connection, task, attempts_left=MAX_START_ATTEMPTS - attempts, denial=denial
            )
        except (OutcomeUnknownError, LeaseLostError, DatabaseError):
            raise
        except Exception:  # one invalid task must not block the others on the node
            log.exception("task %s could not be started on %s", task.pk, connection.node.name)
            if attempts >= MAX_START_ATTEMPTS:
                detail = "an internal error; see the log."
                dispatch.fail_task(connection.node, task, EndReason.START_REFUSED, detail)
                return
            next_step = NextStep.RETRY
        match next_step:
            case NextStep.DONE:
                return
            case NextStep.PULL_IMAGE:
                self._images.pull(connection.node, task)
                self._schedule("start", task.pk, IMAGE_POLL_S)
            case NextStep.RETRY:
                self._schedule("start", task.pk, min(FIRST_RETRY_S * 2.0 ** (attempts - 1), LAST_RETRY_S))
                self._reconcile_soon()  # its answer may be new

    def _check_connectivity(self, connection: NodeConnection, task: Task) -> None:
        self._schedule("connectivity", task.attempt_id, CONNECTIVITY_RETRY_S)
        check_connectivity(connection, task)

    def _replace_secret(self, connection: NodeConnection, replacement: Replacement) -> None:
        self._schedule("secret", replacement.task.pk, SECRET_RETRY_S)
        replace_secret(connection, replacement)

    def _measure_storage(self, connection: NodeConnection) -> None:
        self._schedule(*_STORAGE, STORAGE_POLL_S)
        measure_storage(connection)

    # -- stop --------------------------------------------------------------------------------------

    def _stop(self, connection: NodeConnection, task: Task) -> None:
        self._schedule("stop", task.attempt_id, STOP_RETRY_S)
        self._end(connection, task, lambda: dispatch.stop_attempt(connection, task.attempt))

    def _evict(self, connection: NodeConnection, task: Task) -> None:
        self._schedule("evict", task.pk, STOP_RETRY_S)
        self._end(connection, task, lambda: dispatch.stop_task(connection, task))

    def _end(self, connection: NodeConnection, task: Task, stop: Callable[[], bool]) -> None:
        try:
            if stop():
                collect_and_remove(connection, [(task.attempt.job.public_id, task.attempt.number)])
        except AgentError as error:
            if error.code == "stale_epoch":
                raise OutcomeUnknownError(error.message) from error  # a new hello brings a higher epoch
            log.warning("%s does not stop attempt %s: %s", connection.node.name, task.attempt_id, error)

    # -- readiness of workspaces and services -------------------------------------------------------------------

    def _probe(self, connection: NodeConnection, task: Task) -> None:
        is_service = task.attempt.job.kind == JobKind.SERVICE.value
        self._schedule("probe", task.pk, SERVICE_PROBE_INTERVAL_S if is_service else PROBE_INTERVAL_S)
        if _ask(connection, task, _is_ready):
            readiness.record_attempt_ready(task.attempt_id)

    def _probe_liveness(self, connection: NodeConnection, task: Task) -> None:
        self._schedule("liveness", task.pk, LIVENESS_INTERVAL_S)
        answers = _ask(connection, task, _is_ready)
        if answers is None:
            return
        failed = self._failed_probes[task.pk] = 0 if answers else self._failed_probes.get(task.pk, 0) + 1
        if answers != (task.attempt.unresponsive_since is None) and (
            answers or failed >= FAILED_LIVENESS_PROBES
        ):
            readiness.record_attempt_responsive(task.attempt_id, answers)

    def _probe_ports(self, connection: NodeConnection, task: Task) -> None:
        self._schedule("listening", task.pk, PROBE_INTERVAL_S)
        if _ask(connection, task, _listens):
            job_control.record_task_listening(task.pk)


def _requests(connection: NodeConnection) -> dict[Key, Callable[[], None]]:
    """Return the actions that answer requests of people."""
    actions: dict[Key, Callable[[], None]] = {}
    for terminal in terminals_to_open(connection.node):
        actions["terminal", terminal.pk] = partial(open_terminal, connection, terminal)
    for listing in listings_to_make(connection.node):
        actions["notebooks", listing.pk] = partial(list_notebooks, connection, listing)
    for saved in images_to_save(connection.node):
        actions["save_image", saved.pk] = partial(save_image, connection, saved)
    return actions


def _ask(
    connection: NodeConnection, task: Task, question: Callable[[NodeConnection, TaskKey, Task], bool]
) -> bool | None:
    """Return what the node answers about a running task; None if it has just ended and the event is on its way."""
    key = TaskKey(task.attempt.job.public_id, task.attempt.number, task.rank)
    try:
        return question(connection, key, task)
    except AgentError as error:
        log.info("%s failed on %s: %s", key, connection.node.name, error)
        return None


def _probe(connection: NodeConnection, key: TaskKey, port: int, path: str) -> int | None:
    return connection.engine.request(verbs.PROBE, read_status, **vars(key), port=port, path=path)


def _listens_on(connection: NodeConnection, key: TaskKey, ports: Collection[int]) -> bool:
    return connection.engine.request(verbs.LISTENING, read_listening, **vars(key), ports=sorted(ports))


def _listens(connection: NodeConnection, key: TaskKey, task: Task) -> bool:
    return _listens_on(connection, key, task.role_ports.values())


def _is_ready(connection: NodeConnection, key: TaskKey, task: Task) -> bool:
    job = task.attempt.job
    port = job.published_port
    if job.kind == JobKind.WORKSPACE.value:
        return port is None or _probe(connection, key, port, "/") is not None
    if port is None:
        return False
    if path := job.replica.version.readiness_path:
        status = _probe(connection, key, port, path)
        return status is not None and 200 <= status < 400
    # a process listens on the port of its node itself
    listens_on = task.ports.get(str(port)) if task.node.runtime == RuntimeKind.PROCESS.value else port
    return isinstance(listens_on, int) and _listens_on(connection, key, [listens_on])


def _needs_details(task: Task) -> bool:
    attempt = task.attempt
    return (
        job_control.should_start(task, attempt)
        or should_check_rendezvous(task, attempt)
        or _awaits_readiness(task)
        or _is_ready_replica(task)
        or bool(task.role_ports)
    )


def _is_ready_replica(task: Task) -> bool:
    attempt = task.attempt
    return (
        attempt.job.kind == JobKind.SERVICE.value
        and attempt.state == AttemptState.RUNNING
        and attempt.ready_at is not None
        and attempt.stop_requested_at is None
    )


def _awaits_readiness(task: Task) -> bool:
    attempt = task.attempt
    return (
        attempt.state == AttemptState.RUNNING
        and attempt.ready_at is None
        and attempt.job.kind != JobKind.TRAINING.value
    )
