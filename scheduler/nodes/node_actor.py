"""One actor per node: a thread that owns the connection, its deadlines, and all work on the node.

Notifications only mean "check now"; the work is read from the database each time. When the inbox is full they
are dropped, and the next reconciliation finds what was missed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from django.db import Error as DatabaseError
from django.db import connection
from django.utils import timezone

from agents import verbs
from agents.connect_limiter import ConnectLimiter
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import (
    AgentError,
    Container,
    EngineEvent,
    GpuFaultReported,
    GpuHealthChanged,
    InvalidEventsReceived,
    InvalidReplyError,
    OutcomeUnknownError,
    TaskExited,
    TaskKey,
    read_reported_images,
)
from agents.link import TokenBucket
from agents.node.errors import DISK_FULL
from portal.database.pool_middleware import release_connection
from portal.domain.nodes.node_breaker import IncidentKind
from portal.domain.nodes.node_operations import CONNECT, OPERATIONS
from portal.domain.states import GpuHealth
from portal.domain.stored_texts import stored_text
from portal.models import Gpu, Node, Task
from portal.services.cluster.recovery import RECONCILE
from portal.services.environments.prefetch import PULL_IMAGE
from portal.services.jobs.files import READ_FILES_HINT
from portal.services.nodes import nodes, quarantine
from portal.services.nodes.alerts import record_xid
from portal.services.nodes.gpus import record_gpu_health
from portal.services.storage.data_set_sizes import MEASURE_HINT
from scheduler.leases import HeldLease, LeaseLostError
from scheduler.nodes import dispatch
from scheduler.nodes.data_set_sizes import submit_measurement
from scheduler.nodes.engine_connect import EngineConnectError, connection_settings, open_engine
from scheduler.nodes.files import submit_requests
from scheduler.nodes.image_pulls import ImagePuller, record_images
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_operations import run_due_operations
from scheduler.nodes.node_queue import REQUEST_HINTS, KeyedPool, NodeQueue
from scheduler.nodes.pending_events import PendingEvents
from scheduler.nodes.reconcile import collect_and_remove, on_connected, reconcile

log = logging.getLogger(__name__)

INBOX_SIZE = 200
RECONCILE_EVERY_S = 10.0
MIN_RECONCILE_INTERVAL_S = 1.0
HEALTH_CHANGES_PER_S, HEALTH_CHANGES_BURST = 1.0, 200.0
UNREACHABLE_AFTER_S = 15.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 15.0
STABLE_AFTER_S = 10.0
"""A connection that lasted this long is reopened at once when it breaks."""
RETRY_S = 5.0
MAX_WAIT_S = 1.0
MAX_UNRECORDED_INCIDENTS = 8
"""Incidents kept while the database is unavailable."""
PERMANENT_ERRORS = frozenset({"host_key_mismatch", "authentication_refused", "protocol_version", "forbidden"})
"""Connection errors that need an administrator; the page shows them at once."""

_EVENTS = "events"
"""Notification that events of the node wait; their number is not bounded by the inbox."""
IMAGES = "images"
"""Notification that an environment changed, so that the node's images are listed again."""


_CONNECT_LIMIT = ConnectLimiter()


class NodeActor(threading.Thread):
    """The only sender of commands to its node while the lease is held."""

    def __init__(
        self,
        node: Node,
        lease: HeldLease,
        denied_addresses: Callable[[], list[str]],
        connect: Callable[[Node], NodeEngine] = open_engine,
    ) -> None:
        super().__init__(name=f"node-{node.name}", daemon=True)
        self.node_id = node.pk
        self.node_name = node.name
        self.settings = connection_settings(node)
        """The name, address and host key that it uses."""
        self.lease = lease
        self._open_engine = connect
        self._inbox: queue.Queue[str] = queue.Queue(INBOX_SIZE)
        self._events = PendingEvents()
        self._stopping = threading.Event()
        self._connection: NodeConnection | None = None
        self._requested: set[str] = set()
        """Notifications that are not handled yet."""
        self._reconnecting: NodeEngine | None = None
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._images = ImagePuller(lambda: self.notify(PULL_IMAGE))
        self._pool = KeyedPool(f"worker-{node.name}", self._errors.put, lambda: self.notify("done"))
        self._file_pool = KeyedPool(
            f"files-{node.name}", self._errors.put, lambda: self.notify(READ_FILES_HINT)
        )
        self._queue = NodeQueue(self._pool, self._images, self._reconcile_soon)
        self._backoff_s = FIRST_BACKOFF_S
        self._connect_at_s = 0.0
        self._reconcile_at_s = 0.0
        self._next_poll_s = 0.0
        self._last_contact_s: float | None = None
        self._reconciled_s = 0.0
        self._health_changes = TokenBucket(HEALTH_CHANGES_PER_S, HEALTH_CHANGES_BURST)
        self._connected_s = 0.0
        self._denied_addresses: list[str] = []
        self._read_denied_addresses = denied_addresses
        self._unrecorded_incidents: list[tuple[IncidentKind, str]] = []

    def notify(self, message: str) -> None:
        """Ask the actor to check its work now; dropped when the inbox is full."""
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait(message)

    def handle_soon(self, event: EngineEvent) -> None:
        """Take an event of the node; called by the thread that reads the connection."""
        if self._events.add(event):
            self.notify(_EVENTS)

    def stop(self) -> None:
        """Ask the thread to end; it closes the connection and touches no task."""
        self._stopping.set()
        self.notify("end")

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Loop until stopped or the lease is lost. An error closes the connection, never ends the thread."""
        try:
            while not self._stopping.is_set():
                try:
                    self._run_once()
                except LeaseLostError as error:
                    log.info("%s: %s", self.node_name, error)
                    return
                except InvalidReplyError as error:
                    self._drop_connection(f"{error}", IncidentKind.MALFORMED)
                except OutcomeUnknownError as error:
                    open_still = self._connection is not None and self._connection.engine.is_open
                    self._drop_connection(
                        f"{error}", IncidentKind.COMMAND_TIMEOUTS if open_still else IncidentKind.LINK_LOST
                    )
                except AgentError as error:
                    log.warning("%s refused: %s", self.node_name, error)
                    self._next_poll_s = self._reconcile_at_s = time.monotonic() + RETRY_S
                    if error.code == "stale_epoch":
                        self._drop_connection("The node has seen a higher epoch.")
                except DatabaseError as error:
                    log.warning("%s: the database does not answer: %s", self.node_name, error)
                    connection.close()
                    self._stopping.wait(random.uniform(0.5, 2.0))  # noqa: S311 - not for secrets
                except Exception:
                    log.exception("%s: the iteration failed", self.node_name)
                    self._drop_connection("Internal error; see the log of worker-nodes.")
                finally:
                    connection.close_if_unusable_or_obsolete()
        finally:
            if self._connection is not None:
                self._connection.engine.close()
            self._pool.shut_down()
            self._file_pool.shut_down()
            self._images.stop()
            connection.close()

    def _run_once(self) -> None:
        self._record_incidents()
        if not self._errors.empty():
            raise self._errors.get()
        if self._connection is not None and not self._connection.engine.is_open:
            self._drop_connection("The node closed the connection.", IncidentKind.LINK_LOST)
        if CONNECT in self._requested:
            self._requested.discard(CONNECT)
            self._apply_settings()
        if self._connection is None:
            self._connect()
        due = self._process_inbox()
        if self._connection is None:
            return
        now_s = time.monotonic()
        if now_s >= self._reconcile_at_s:
            self._update_denied_addresses(self._connection)
            reconcile(self._connection)
            self._last_contact_s = self._reconciled_s = time.monotonic()
            self._reconcile_at_s = self._last_contact_s + RECONCILE_EVERY_S * random.uniform(0.9, 1.1)  # noqa: S311
            self._requested |= {
                READ_FILES_HINT,
                *REQUEST_HINTS,
            }  # notifications may have reached another process
            due = True
        if IMAGES in self._requested:
            self._requested.discard(IMAGES)
            images = self._connection.engine.request(verbs.HELLO, read_reported_images)
            record_images(self._connection.node, images, self._images.in_progress())
        if PULL_IMAGE in self._requested:
            self._requested.discard(PULL_IMAGE)
            self._images.prefetch(self._connection.node)
        if OPERATIONS in self._requested:
            self._requested.discard(OPERATIONS)
            self._pool.submit(
                "orders",
                partial(run_due_operations, self._connection, partial(self._reconnect, self._connection)),
                read_s=time.monotonic(),
            )
        if self._requested & {READ_FILES_HINT, MEASURE_HINT}:
            self._requested -= {READ_FILES_HINT, MEASURE_HINT}
            submit_requests(self._connection, self._file_pool)
            submit_measurement(self._connection, self._file_pool)
        if due or now_s >= self._next_poll_s:
            has_requests = bool(self._requested & REQUEST_HINTS)
            self._requested -= REQUEST_HINTS
            self._next_poll_s = time.monotonic() + self._queue.run_due(
                self._connection, has_requests=has_requests
            )

    def _process_inbox(self) -> bool:
        """Wait for a message or deadline and handle events; return True when notified."""
        due_s = (
            self._connect_at_s if self._connection is None else min(self._next_poll_s, self._reconcile_at_s)
        )
        wait_s = min(MAX_WAIT_S, max(0.0, due_s - time.monotonic()))
        due = False
        try:
            release_connection()
            item = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while True:
                if item != _EVENTS:
                    due = True
                    self._requested.add(item)
                if item == RECONCILE:
                    self._reconcile_soon()
                item = self._inbox.get_nowait()
        except queue.Empty:
            self._handle_events()
            return due

    def _handle_events(self) -> None:
        """Handle as many events as a node may cause work now; the others follow within ``MAX_WAIT_S``."""
        exits = []
        for event in self._events.take():
            if isinstance(event, TaskExited):
                exits.append(event.container)
            else:
                self._on_event(event)
        if exits:
            self._on_exits(exits)

    def _reconcile_soon(self) -> None:
        self._reconcile_at_s = 0.0

    # -- connection --------------------------------------------------------------------------------

    def _connect(self) -> None:
        if time.monotonic() < self._connect_at_s:
            return
        node = Node.objects.select_related("pool").get(pk=self.node_id)
        self.node_name, self.settings = node.name, connection_settings(node)
        release_connection()
        try:
            with _CONNECT_LIMIT.acquire(last_attempt_failed=self._backoff_s > FIRST_BACKOFF_S):
                engine = self._open_engine(node)
        except EngineConnectError as error:
            self._record_unreachable(node, error, permanent=error.code in PERMANENT_ERRORS)
            return
        try:
            node_connection = NodeConnection(engine, self.lease, node)
            on_connected(node_connection, time.time())
            self._denied_addresses = []
            self._update_denied_addresses(node_connection)
            node.refresh_from_db()
            record_images(node, engine.hello["images"], self._images.in_progress())
            engine.watch(self.handle_soon)
        except EngineConnectError as error:
            engine.close()
            self._record_unreachable(node, error, permanent=True)
            return
        except BaseException:
            engine.close()
            raise
        self._connection = node_connection
        self._requested |= {OPERATIONS, PULL_IMAGE}
        self._last_contact_s = time.monotonic()
        self._connected_s, self._reconcile_at_s = self._last_contact_s, 0.0
        log.info("connected to %s", node.name)

    def _apply_settings(self) -> None:
        """Use the present name of the node, and reconnect if its address or host key was changed."""
        before, node = self.settings, Node.objects.get(pk=self.node_id)
        self.node_name, self.settings = node.name, connection_settings(node)
        if self._connection is not None:
            self._connection.node.name = node.name  # messages of work in progress name it
            if before.target != self.settings.target:
                log.info("connecting to %s again: its address or host key was changed", node.name)
                self._reconnect(self._connection)
                self._connection = None
        self._backoff_s, self._connect_at_s = FIRST_BACKOFF_S, 0.0

    def _update_denied_addresses(self, node_connection: NodeConnection) -> None:
        """Send the node the addresses denied to containers, before any start and when they change."""
        if not node_connection.engine.supports(verbs.DENY_EGRESS):
            return
        addresses = self._read_denied_addresses()
        if addresses == self._denied_addresses:
            return
        try:
            node_connection.engine.command(verbs.DENY_EGRESS, networks=addresses)
            self._denied_addresses = addresses
        except AgentError as error:
            # with a full disk it starts nothing; the reconciliation records that
            if error.code != DISK_FULL:
                raise

    def _record_unreachable(self, node: Node, problem: EngineConnectError, *, permanent: bool) -> None:
        self._back_off()
        silent_s = self._silent_for_s(node)
        if permanent or silent_s is None or silent_s >= UNREACHABLE_AFTER_S:
            nodes.record_unreachable(node.pk, str(problem), problem.code)

    def _silent_for_s(self, node: Node) -> float | None:
        """Return seconds since the last contact with the node; None when there was none."""
        if self._last_contact_s is not None:
            return time.monotonic() - self._last_contact_s
        if node.last_seen_at is None:
            return None
        return (timezone.now() - node.last_seen_at).total_seconds()

    def _record_incidents(self) -> None:
        """Record incidents of the connection; those that the database rejects stay for a later call."""
        while self._unrecorded_incidents:
            incident, reason = self._unrecorded_incidents[0]
            quarantine.record_incident(self.node_id, incident, message=reason)
            del self._unrecorded_incidents[0]

    def _reconnect(self, node_connection: NodeConnection) -> None:
        """Close the connection because another agent takes over. Called in the pool; not an incident."""
        self._reconnecting = node_connection.engine
        node_connection.engine.close()

    def _drop_connection(self, reason: str, incident: IncidentKind | None = None) -> None:
        """Close the connection; ``incident`` when the node or the network caused it."""
        log.warning("lost the connection to %s: %s", self.node_name, reason)
        if self._connection is not None:
            if incident is not None and self._connection.engine is not self._reconnecting:
                self._unrecorded_incidents = [*self._unrecorded_incidents, (incident, reason)][
                    -MAX_UNRECORDED_INCIDENTS:
                ]
            self._connection.engine.close()
            self._connection = None
            if time.monotonic() - self._connected_s >= STABLE_AFTER_S:
                self._backoff_s = FIRST_BACKOFF_S
                self._connect_at_s = 0.0  # retry once at once, then with growing delays
                return
        self._back_off()

    def _back_off(self) -> None:
        self._connect_at_s = time.monotonic() + self._backoff_s * random.uniform(0.5, 1.5)  # noqa: S311
        self._backoff_s = min(self._backoff_s * 2, LAST_BACKOFF_S)

    # -- events ------------------------------------------------------------------------------------

    def _on_event(self, event: EngineEvent) -> None:
        match event:
            case GpuHealthChanged(uuid, health, message, fatal):
                gpu = Gpu.objects.filter(uuid=uuid, node_id=self.node_id).first()
                if gpu is None or not record_gpu_health(gpu.pk, GpuHealth(health), message, fatal=fatal):
                    return
                if self._health_changes.take(1.0) > 0:  # each change adds an audit row and triggers a cycle
                    raise InvalidReplyError("The health of its GPUs changes repeatedly.")
            case GpuFaultReported(uuid, xid, times):
                record_xid(self.node_id, uuid, xid, times)
            case InvalidEventsReceived(times, problem):
                message = stored_text(f"{times} events could not be parsed. The last: {problem}.")
                quarantine.record_incident(self.node_id, IncidentKind.MALFORMED, message=message)

    def _on_exits(self, exits: Sequence[Container]) -> None:
        rows = Task.objects.filter(
            node_id=self.node_id, attempt__job__public_id__in={each.key.job for each in exits}
        )
        columns = ("attempt__job__public_id", "attempt__number", "rank", "pk")
        known = {TaskKey(*key): pk for *key, pk in rows.values_list(*columns)}
        ended = {known[each.key]: each for each in exits if each.key in known}
        if any(each.key not in known for each in exits):
            # an unknown container ended: reconcile, but not after every such message
            soon_s = self._reconciled_s + MIN_RECONCILE_INTERVAL_S
            self._reconcile_at_s = min(self._reconcile_at_s, soon_s)
        if ended:
            dispatch.record_task_ends(self._connection, ended)
        if ended and self._connection is not None:
            attempts = {(each.key.job, each.key.attempt) for each in ended.values()}
            collect_and_remove(self._connection, sorted(attempts))
