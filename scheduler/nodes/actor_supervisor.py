"""Runs one actor for each node whose lease this process holds."""

from __future__ import annotations

import logging
import threading
import time

from django.db import Error as DatabaseError
from django.db import close_old_connections, connection
from django.db.models import Q

from portal.domain.nodes.node_operations import CONNECT, OPERATIONS
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState, NodeState
from portal.models import Lease, Node, Task
from portal.selectors.nodes.network_policy import DeniedAddressCache
from portal.services.environments.prefetch import PULL_IMAGE, nodes_with_images_to_pull
from portal.services.jobs.signals import nodes_with_signals
from portal.services.nodes.operations import nodes_with_due_operations
from scheduler import leases
from scheduler.nodes.engine_connect import SETTINGS_COLUMNS, connection_settings
from scheduler.nodes.node_actor import NodeActor

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0


class ActorSupervisor:
    """The actors of this process and the thread that supervises them."""

    def __init__(self) -> None:
        self.holder = leases.new_holder()
        self._actors: dict[str, NodeActor] = {}
        self._denied = DeniedAddressCache()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the supervising thread; idempotent."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="actor-supervisor", daemon=True)
                self._thread.start()

    def stop(self, within_s: float = 10.0) -> None:
        """Stop all actors and release their leases; tasks on the nodes keep running."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(within_s)
        actors = dict(self._actors)
        for actor in actors.values():
            actor.stop()
        deadline_s = time.monotonic() + within_s
        for actor in actors.values():
            actor.join(max(0.0, deadline_s - time.monotonic()))
        ended = [leases.node_lease(node) for node, actor in actors.items() if not actor.is_alive()]
        try:
            leases.release(ended, self.holder)
        except DatabaseError as error:
            log.warning("the node leases were not released and will expire: %s", error)

    def notify(self, node: str, verb: str) -> None:
        """Notify the node's actor; without one, check at once whether its lease is free."""
        actor = self._actors.get(node)
        if actor is not None and actor.is_alive():
            actor.notify(verb)
        else:
            self._wake.set()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.run_once()
            except DatabaseError as error:
                log.warning("the actor supervisor waits for the database: %s", error)
                connection.close()
            except Exception:
                log.exception("an iteration of the actor supervisor failed")
            finally:
                close_old_connections()
            self._wake.wait(POLL_INTERVAL_S)
            self._wake.clear()
        connection.close()

    def run_once(self) -> None:
        """Renew leases, stop actors of lost ones, acquire free nodes, and notify actors with work."""
        for node in [node for node, actor in self._actors.items() if not actor.is_alive()]:
            del self._actors[node]
        held = leases.renew(list(map(leases.node_lease, self._actors)), self.holder, leases.NODE_TTL_S)
        ours = {lease.name for lease in held}
        wanted = {
            node.public_id: node
            for node in Node.objects.exclude(state=NodeState.RETIRED.value).only(
                "public_id", *SETTINGS_COLUMNS
            )
        }
        for node, actor in self._actors.items():
            if leases.node_lease(node) not in ours or node not in wanted:
                actor.stop()
            elif actor.settings != connection_settings(wanted[node]):  # if the notification was lost
                actor.notify(CONNECT)
        self._acquire_nodes([node for id_, node in wanted.items() if id_ not in self._actors])
        for nodes, verb in (
            (self._nodes_with_work(), "work"),
            ([*nodes_with_due_operations(), *nodes_with_signals()], OPERATIONS),
            (nodes_with_images_to_pull(), PULL_IMAGE),
        ):
            for node in self._actors.keys() & set(nodes):
                self._actors[node].notify(verb)

    def _acquire_nodes(self, unowned: list[Node]) -> None:
        names = [leases.node_lease(node.public_id) for node in unowned]
        elsewhere = set(
            Lease.objects.filter(name__in=names)
            .exclude(holder=self.holder)
            .extra(where=["expires_at > clock_timestamp()"])
            .values_list("name", flat=True)
        )
        for node in unowned:
            name = leases.node_lease(node.public_id)
            if name in elsewhere:
                continue
            lease = leases.acquire(name, self.holder, leases.NODE_TTL_S)
            if lease is None:
                continue
            if self._stopping.is_set():
                leases.release([name], self.holder)  # so that another process need not wait for its expiry
                return
            actor = NodeActor(node, lease, self._denied)
            self._actors[node.public_id] = actor
            actor.start()

    def _nodes_with_work(self) -> list[str]:
        """Return the nodes with a pending start or stop, in case a notification was lost."""
        rows = Task.objects.filter(
            Q(state=AttemptState.CONFIGURING.value) | Q(attempt__stop_requested_at__isnull=False),
            container_removed=False,
            attempt__state__in=LIVE_ATTEMPT_STATES,
        )
        return list(rows.values_list("node__public_id", flat=True).distinct())


ACTOR_SUPERVISOR = ActorSupervisor()
"""The supervisor of this process; only worker-nodes starts it."""
