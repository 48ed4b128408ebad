"""One actor per node: a thread that owns the link to it, every deadline on it, and all work there.

A hint only says "look now"; what there is to do is read from the record each time. A full inbox drops hints,
a dead link keeps the record as it is, and whatever is forgotten is found by the next comparison.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial

from django.db import Error as DatabaseError
from django.db import connection
from django.utils import timezone

from agents.engines.contract import (
    Engine,
    EngineEvent,
    GpuFaultTold,
    GpuHealthChanged,
    MalformedFrames,
    Refused,
    TaskExited,
    TaskKey,
    Unknown,
    Unreadable,
)
from agents.link import TokenBucket
from agents.node.refusals import DISK_FULL
from agents.openings import Openings
from portal.database.turns import give_back
from portal.models import Gpu, Node, Task
from portal.services import nodes, trust
from portal.services.alarms import record_xid
from portal.services.bringing import BRING
from portal.services.gpus import record_gpu_health
from portal.services.node_acts import ORDERS
from portal.services.restored import COMPARE
from portal.words.states import GpuHealth
from portal.words.trust import Trouble
from scheduler import dispatch
from scheduler.dispatch import Door
from scheduler.hands import Hands
from scheduler.images import ImageBringer, note_images
from scheduler.leases import Deposed, Held
from scheduler.node_acts import carry_out
from scheduler.node_work import NodeWork
from scheduler.opening import CannotOpen, open_engine
from scheduler.reconcile import collect_and_remove, reconcile, welcome

log = logging.getLogger(__name__)

INBOX_SIZE = 200
RECONCILE_EVERY_S = 10.0
COMPARE_PAUSE_S = 1.0
HEALTH_CHANGES_PER_S, HEALTH_CHANGES_AT_ONCE = 1.0, 200.0
UNREACHABLE_AFTER_S = 15.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 15.0
STEADY_AFTER_S = 10.0
"""A link that has lived this long is tried again at once when it breaks."""
AGAIN_S = 5.0
IDLE_S = 1.0
TROUBLES_KEPT = 8
"""Of what befell the link while the database was away."""
CERTAIN = frozenset({"host_key_mismatch", "authentication_refused", "protocol_version", "not_allowed"})
"""Refusals to connect that will not pass by themselves: the page says so at once."""

IMAGES = "images"
"""The hint that an environment was changed: which nodes have its image is asked anew."""


_OPENINGS = Openings()


class NodeActor:
    """The only one who speaks to its node, as long as the lease is ours."""

    def __init__(
        self,
        node: Node,
        lease: Held,
        denied_now: Callable[[], list[str]],
        opener: Callable[[Node], Engine] = open_engine,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name=f"node-{node.name}", daemon=True)
        self.node_id = node.pk
        self.node_name = node.name
        self.lease = lease
        self._opener = opener
        self._inbox: queue.Queue[str | EngineEvent] = queue.Queue(INBOX_SIZE)
        self._stopping = threading.Event()
        self._door: Door | None = None
        self._images_asked = False
        self._bring_asked = False
        self._orders_asked = False
        self._reopening: Engine | None = None
        self._faults: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._images = ImageBringer(lambda: self.hint(BRING))
        self._hands = Hands(f"hand-{node.name}", self._faults.put, lambda: self.hint("done"))
        self._work = NodeWork(self._hands, self._images, self._compare_soon)
        self._backoff_s = FIRST_BACKOFF_S
        self._connect_at_s = 0.0
        self._reconcile_at_s = 0.0
        self._look_at_s = 0.0
        self._heard_s: float | None = None
        self._compared_s = 0.0
        self._health_changes = TokenBucket(HEALTH_CHANGES_PER_S, HEALTH_CHANGES_AT_ONCE)
        self._linked_s = 0.0
        self._denied: list[str] = []
        self._denied_now = denied_now
        self._befell: list[tuple[Trouble, str]] = []

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def is_alive(self) -> bool:
        """False once the actor has ended."""
        return self._thread.is_alive()

    def join(self, within_s: float) -> None:
        """Waits for the end."""
        self._thread.join(within_s)

    def hint(self, what: str) -> None:
        """Asks the actor to look at its work now; dropped when the inbox is full."""
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait(what)

    def end(self) -> None:
        """Asks the thread to end; the link is closed, no task is touched."""
        self._stopping.set()
        self.hint("end")

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Turns until it is told to end or the lease is lost. An error costs the link, never the thread."""
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Deposed as moved:
                    log.info("%s: %s", self.node_name, moved)
                    return
                except Unreadable as answer:
                    self._lose_link(f"{answer}", Trouble.MALFORMED)
                except Unknown as silence:
                    open_still = self._door is not None and self._door.engine.is_open
                    self._lose_link(f"{silence}", Trouble.NO_ANSWER if open_still else Trouble.LINK_LOST)
                except Refused as refusal:
                    log.warning("%s refused: %s", self.node_name, refusal)
                    self._look_at_s = self._reconcile_at_s = time.monotonic() + AGAIN_S
                    if refusal.code == "stale_epoch":
                        self._lose_link("The node has heard a higher epoch.")
                except DatabaseError as trouble:
                    log.warning("%s: the database does not answer: %s", self.node_name, trouble)
                    connection.close()
                    self._stopping.wait(random.uniform(0.5, 2.0))  # noqa: S311 - not for secrets
                except Exception:
                    log.exception("%s: the turn failed", self.node_name)
                    self._lose_link("An error on our side; see the log of worker-nodes.")
                finally:
                    connection.close_if_unusable_or_obsolete()
        finally:
            if self._door is not None:
                self._door.engine.close()
            self._hands.end()
            self._images.end()
            connection.close()

    def _turn(self) -> None:
        self._tell_troubles()
        if not self._faults.empty():
            raise self._faults.get()
        if self._door is not None and not self._door.engine.is_open:
            self._lose_link("The node closed the link.", Trouble.LINK_LOST)
        if self._door is None:
            self._connect()
        looked = self._take_inbox()
        if self._door is None:
            return
        now_s = time.monotonic()
        if now_s >= self._reconcile_at_s:
            self._deny(self._door)
            reconcile(self._door)
            self._heard_s = self._compared_s = time.monotonic()
            self._reconcile_at_s = self._heard_s + RECONCILE_EVERY_S * random.uniform(0.9, 1.1)  # noqa: S311
            looked = True
        if self._images_asked:
            self._images_asked = False
            note_images(self._door.node, self._door.engine.images(), self._images.on_their_way())
        if self._bring_asked:
            self._bring_asked = False
            self._images.bring_wanted(self._door.node)
        if self._orders_asked:
            self._orders_asked = False
            self._hands.take("orders", partial(carry_out, self._door, partial(self._reopen, self._door)))
        if looked or now_s >= self._look_at_s:
            self._look_at_s = time.monotonic() + self._work.look(self._door)

    def _take_inbox(self) -> bool:
        """Waits until something comes or something is due; handles events; True when there was a hint."""
        due_s = self._connect_at_s if self._door is None else min(self._look_at_s, self._reconcile_at_s)
        wait_s = min(IDLE_S, max(0.0, due_s - time.monotonic()))
        looked = False
        try:
            give_back()
            item = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while True:
                if isinstance(item, str):
                    looked = True
                    self._images_asked |= item == IMAGES
                    self._orders_asked |= item == ORDERS
                    self._bring_asked |= item == BRING
                    if item == COMPARE:
                        self._compare_soon()
                else:
                    self._on_event(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return looked

    def _compare_soon(self) -> None:
        self._reconcile_at_s = 0.0

    # -- the link ----------------------------------------------------------------------------------

    def _connect(self) -> None:
        if time.monotonic() < self._connect_at_s:
            return
        node = Node.objects.select_related("pool").get(pk=self.node_id)
        give_back()
        try:
            with _OPENINGS.turn(doubtful=self._backoff_s > FIRST_BACKOFF_S):
                engine = self._opener(node)
        except CannotOpen as problem:
            self._note_unreachable(node, str(problem), certain=problem.code in CERTAIN)
            return
        try:
            door = Door(engine, self.lease, node)
            welcome(door, time.time())
            self._denied = []
            self._deny(door)
            node.refresh_from_db()
            note_images(node, engine.hello["images"], self._images.on_their_way())
            engine.watch(self._keep_event)
        except CannotOpen as problem:
            engine.close()
            self._note_unreachable(node, str(problem), certain=True)
            return
        except BaseException:
            engine.close()
            raise
        self._door, self._orders_asked, self._bring_asked = door, True, True
        self._heard_s = time.monotonic()
        self._linked_s, self._reconcile_at_s = self._heard_s, 0.0
        log.info("connected to %s", node.name)

    def _deny(self, door: Door) -> None:
        """Tells the node to which addresses no container may connect, before any start and when they changed."""
        if not door.engine.denies:
            return
        addresses = self._denied_now()
        if addresses == self._denied:
            return
        try:
            door.engine.deny(addresses)
            self._denied = addresses
        except Refused as refusal:
            if refusal.code != DISK_FULL:  # with a full disk it starts nothing, and the comparison records it
                raise

    def _keep_event(self, event: EngineEvent) -> None:
        """Called in the link's reading thread; a lost event is found by the next comparison."""
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait(event)

    def _note_unreachable(self, node: Node, sentence: str, *, certain: bool) -> None:
        self._back_off()
        silent_s = self._silent_for_s(node)
        if certain or silent_s is None or silent_s >= UNREACHABLE_AFTER_S:
            nodes.record_unreachable(node.pk, sentence)

    def _silent_for_s(self, node: Node) -> float | None:
        """How long nobody has heard from the node; None when nobody ever has."""
        if self._heard_s is not None:
            return time.monotonic() - self._heard_s
        if node.last_seen_at is None:
            return None
        return (timezone.now() - node.last_seen_at).total_seconds()

    def _tell_troubles(self) -> None:
        """Writes down what befell the link; what the database does not take now is told in a later turn."""
        while self._befell:
            trouble, why = self._befell[0]
            trust.record_trouble(self.node_id, trouble, sentence=why)
            del self._befell[0]

    def _reopen(self, door: Door) -> None:
        """Called in a hand: another agent is to answer, so the link to this one goes. The node is not to blame."""
        self._reopening = door.engine
        door.engine.close()

    def _lose_link(self, why: str, trouble: Trouble | None = None) -> None:
        """``trouble`` where the node, or the way to it, is the cause."""
        log.warning("lost the link to %s: %s", self.node_name, why)
        if self._door is not None:
            if trouble is not None and self._door.engine is not self._reopening:
                self._befell = [*self._befell, (trouble, why)][-TROUBLES_KEPT:]
            self._door.engine.close()
            self._door = None
            if time.monotonic() - self._linked_s >= STEADY_AFTER_S:
                self._backoff_s = FIRST_BACKOFF_S
                self._connect_at_s = 0.0  # once at once, then with growing pauses
                return
        self._back_off()

    def _back_off(self) -> None:
        self._connect_at_s = time.monotonic() + self._backoff_s * random.uniform(0.5, 1.5)  # noqa: S311
        self._backoff_s = min(self._backoff_s * 2, LAST_BACKOFF_S)

    # -- events ------------------------------------------------------------------------------------

    def _on_event(self, event: EngineEvent) -> None:
        match event:
            case TaskExited(container):
                self._on_exit(container.key, event)
            case GpuHealthChanged(uuid, health, sentence, fatal):
                gpu = Gpu.objects.filter(uuid=uuid, node_id=self.node_id).first()
                if gpu is None or not record_gpu_health(gpu.pk, GpuHealth(health), sentence, fatal=fatal):
                    return
                if self._health_changes.spend(1.0) > 0:  # each leaves an audit row, and wakes the scheduler
                    raise Unreadable("The health of its GPUs changes again and again.")
            case GpuFaultTold(uuid, xid, times):
                record_xid(self.node_id, uuid, xid, times)
            case MalformedFrames(times, problem):
                sentence = f"{times} events that cannot be read. The last: {problem}."
                trust.record_trouble(self.node_id, Trouble.MALFORMED, sentence=sentence)

    def _on_exit(self, key: TaskKey, event: TaskExited) -> None:
        task = Task.objects.filter(
            node_id=self.node_id,
            attempt__job__public_id=key.job,
            attempt__number=key.attempt,
            rank=key.task,
        ).first()
        if task is None:
            # a container that the record does not know has ended: that is settled by a comparison, and however
            # often the node says so there is not one after the other
            soon_s = self._compared_s + COMPARE_PAUSE_S
            self._reconcile_at_s = min(self._reconcile_at_s, soon_s)
            return
        dispatch.record_end(task.pk, event.container)
        if self._door is not None:
            collect_and_remove(self._door, key.job, key.attempt)
