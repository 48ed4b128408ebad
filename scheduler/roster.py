"""Keeps one actor for each node that this worker has the lease of, and hints those that have work."""

from __future__ import annotations

import logging
import threading
import time

from django.db import Error as DatabaseError
from django.db import close_old_connections, connection
from django.db.models import Q

from portal.models import Lease, Node, Task
from portal.selectors.egress import DeniedAddresses
from portal.services.bringing import BRING, nodes_with_wanted
from portal.services.node_acts import ORDERS, nodes_with_orders
from portal.services.sent_signals import nodes_with_signals
from portal.words.states import ATTEMPT_LIVE, AttemptState, NodeState
from scheduler import leases
from scheduler.actors import NodeActor

log = logging.getLogger(__name__)

TURN_EVERY_S = 2.0


class Roster:
    """The actors of this process and the thread that looks after them."""

    def __init__(self) -> None:
        self.holder = leases.new_holder()
        self._actors: dict[str, NodeActor] = {}
        self._denied = DeniedAddresses()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to look after nodes. Repeatable."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="roster", daemon=True)
                self._thread.start()

    def stop(self, within_s: float = 10.0) -> None:
        """Ends all actors and gives the leases back; tasks on the nodes go on."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(within_s)
        actors = dict(self._actors)
        for actor in actors.values():
            actor.end()
        deadline_s = time.monotonic() + within_s
        for actor in actors.values():
            actor.join(max(0.0, deadline_s - time.monotonic()))
        ended = [leases.node_lease(node) for node, actor in actors.items() if not actor.is_alive()]
        try:
            leases.let_go(ended, self.holder)
        except DatabaseError as trouble:
            log.warning("the node leases run out by themselves: %s", trouble)

    def hint(self, node: str, verb: str) -> None:
        """Passes a hint to the node's actor; without one here, looks at once whether the node is to be ours."""
        actor = self._actors.get(node)
        if actor is not None and actor.is_alive():
            actor.hint(verb)
        else:
            self._wake.set()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.turn()
            except DatabaseError as trouble:
                log.warning("the roster waits for the database: %s", trouble)
                connection.close()
            except Exception:
                log.exception("a turn of the roster failed")
            finally:
                close_old_connections()
            self._wake.wait(TURN_EVERY_S)
            self._wake.clear()
        connection.close()

    def turn(self) -> None:
        """Renews leases, ends actors whose node is another's, takes free nodes, hints those with work."""
        for node in [node for node, actor in self._actors.items() if not actor.is_alive()]:
            del self._actors[node]
        held = leases.renew(list(map(leases.node_lease, self._actors)), self.holder, leases.NODE_TTL_S)
        ours = {lease.name for lease in held}
        wanted = {
            node.public_id: node
            for node in Node.objects.exclude(state=NodeState.RETIRED.value).only("public_id", "name")
        }
        for node, actor in self._actors.items():
            if leases.node_lease(node) not in ours or node not in wanted:
                actor.end()
        self._take([node for id_, node in wanted.items() if id_ not in self._actors])
        for node in self._with_work():
            if node in self._actors:
                self._actors[node].hint("work")
        for node in {*nodes_with_orders(), *nodes_with_signals()}:
            if node in self._actors:
                self._actors[node].hint(ORDERS)
        for node in nodes_with_wanted():
            if node in self._actors:
                self._actors[node].hint(BRING)

    def _take(self, free: list[Node]) -> None:
        names = [leases.node_lease(node.public_id) for node in free]
        elsewhere = set(
            Lease.objects.filter(name__in=names)
            .exclude(holder=self.holder)
            .extra(where=["expires_at > clock_timestamp()"])
            .values_list("name", flat=True)
        )
        for node in free:
            name = leases.node_lease(node.public_id)
            if name in elsewhere:
                continue
            lease = leases.claim(name, self.holder, leases.NODE_TTL_S)
            if lease is None:
                continue
            if self._stopping.is_set():
                leases.let_go([name], self.holder)  # nobody has to wait until it runs out
                return
            actor = NodeActor(node, lease, self._denied)
            self._actors[node.public_id] = actor
            actor.start()

    def _with_work(self) -> list[str]:
        """Nodes with a start or a stop to send, whatever became of its hint."""
        rows = Task.objects.filter(
            Q(state=AttemptState.CONFIGURING.value) | Q(attempt__stop_wanted_at__isnull=False),
            gone=False,
            attempt__state__in=ATTEMPT_LIVE,
        )
        return list(rows.values_list("node__public_id", flat=True).distinct())


ROSTER = Roster()
"""The roster of this process; only worker-nodes starts it."""
