"""Acts on nodes: connection tests, and over the control channel upgrades, checks of the machine and tidying up.

Of the latter the row is the order: the actor of the node finds it, with its hint or without, and may carry it out
twice. ``do_`` is what admins ask for, ``record_`` what the engine writes down.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import OuterRef, Q, Subquery
from django.db.models.functions import Now
from django.utils import timezone

from portal.access import Verb, require, require_admin
from portal.errors import Conflict
from portal.events import announce
from portal.models import Node, NodeCheck, NodePool, Rollout, User
from portal.selectors.agent_program import our_agent, runs_ours
from portal.selectors.policy import knobs_of
from portal.services.audit import record_act
from portal.wake import hint_node, hint_nodes, leave_hint
from portal.words.node_acts import ACT_TITLES, BY_ACTOR, FULL_AGAIN_S, WITHIN_S, NodeAct, Turn, may_begin
from portal.words.states import FULL_DISK, NodeState

ORDERS = "orders"
"""The hint that there is such an act to carry out."""


# -- admins ----------------------------------------------------------------------------------------


def do_order(actor: User, node: Node, act: NodeAct) -> NodeCheck:
    """Asks for an act on a node; one of the kind that is under way is given instead of another.

    Raises Conflict while the node does not answer, Unavailable for an upgrade without a signed agent here.
    """
    require(actor, Verb.CHANGE, node)
    if act is NodeAct.UPGRADE:
        our_agent()
    with transaction.atomic():
        row = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
        under_way = NodeCheck.objects.filter(node=row, kind=act.value, finished_at__isnull=True).first()
        if under_way is not None:
            return under_way
        if not row.reachable:
            raise Conflict(
                f"{row.name} does not answer, so nothing can be asked of it.", code="node_unreachable"
            )
        check = order(row, act, actor)
        record_act(actor, f"node.{act.value}", row)
    return check


def do_upgrade_all(actor: User) -> Rollout:
    """Upgrades every node whose agent is not ours, one first, then some side by side, up to the first failure.

    Nodes that do not answer are left out. Raises Conflict while another such upgrade runs, or where none is needed.
    """
    require_admin(actor, "upgrade nodes")
    our_agent()
    with transaction.atomic():
        if Rollout.objects.select_for_update().filter(finished_at__isnull=True).exists():
            raise Conflict("The nodes are being upgraded already.", code="rollout_runs")
        nodes = [node for node in Node.objects.order_by("name") if _is_behind(node)]
        if not nodes:
            raise Conflict("Every node that answers runs this agent already.", code="nothing_to_upgrade")
        rollout = Rollout.objects.create(actor=actor)
        NodeCheck.objects.bulk_create(
            NodeCheck(node=node, kind=NodeAct.UPGRADE.value, actor=actor, rollout=rollout) for node in nodes
        )
        record_act(actor, "nodes.upgrade", rollout, after={"nodes": [node.name for node in nodes]})
        _advance(rollout)
    return rollout


def _is_behind(node: Node) -> bool:
    answers = node.reachable and node.state not in (NodeState.RETIRED.value, NodeState.ENROLLING.value)
    return answers and not runs_ours(node)


def do_start_check(actor: User, node: Node, kind: NodeAct = NodeAct.TEST) -> NodeCheck:
    """Asks the process that holds the node key to test the connection; steps appear on the row."""
    require(actor, Verb.CHANGE, node)
    with transaction.atomic():
        check = NodeCheck.objects.create(node=node, kind=kind.value, actor=actor)
        leave_hint("scheduler.check_node", [check.public_id], "nodes")
    return check


# -- the engine ------------------------------------------------------------------------------------


def order(node: Node, act: NodeAct, actor: User | None = None) -> NodeCheck:
    """Leaves an order for the actor of a node, within the caller's transaction; nobody asks for the right."""
    check = NodeCheck.objects.create(node=node, kind=act.value, actor=actor, begun_at=timezone.now())
    hint_node(node.public_id, ORDERS)
    return check


def order_all(nodes: Sequence[Node], act: NodeAct, actor: User) -> None:
    """``order`` for several nodes."""
    now = timezone.now()
    NodeCheck.objects.bulk_create(
        NodeCheck(node=node, kind=act.value, actor=actor, begun_at=now) for node in nodes
    )
    hint_nodes({node.public_id: (ORDERS, "") for node in nodes})


def due_orders(node_id: int) -> list[NodeCheck]:
    """What is to be carried out on a node now, in the order in which it was asked for."""
    rows = NodeCheck.objects.filter(_due(), node_id=node_id).order_by("id")
    return list(rows.select_related("node"))


def nodes_with_orders() -> list[str]:
    """Public ids of the nodes that have something to carry out, whatever became of its hint."""
    return list(NodeCheck.objects.filter(_due()).values_list("node__public_id", flat=True).distinct())


def record_sent(check_id: int, program: str) -> None:
    """The new program is in place on the node; what answers next shows whether it runs."""
    NodeCheck.objects.filter(pk=check_id).update(program=program)


def record_order_finished(check_id: int, ok: bool) -> None:
    """The act is over. After a good upgrade the node is checked, and the next nodes of a rollout may begin."""
    with transaction.atomic():
        check = NodeCheck.objects.select_for_update(no_key=True).select_related("node").get(pk=check_id)
        if check.finished_at is not None:
            return
        check.ok, check.finished_at = ok, timezone.now()
        check.save(update_fields=["ok", "finished_at"])
        if ok and check.kind == NodeAct.UPGRADE.value:
            order(check.node, NodeAct.PREFLIGHT, check.actor)
        if check.rollout_id is not None:
            _advance(Rollout.objects.select_for_update().get(pk=check.rollout_id))
        announce("cluster", {"kind": "node", "node": check.node.public_id, "state": check.node.state})


def record_images_removed(check: NodeCheck, removed: Sequence[Mapping[str, Any]]) -> None:
    """Images are gone from a node: that is audited, and which environments are still there is asked anew."""
    if not removed:
        return
    with transaction.atomic():
        images = [{"names": row["names"], "mib": row["size_mib"], "idle_s": row["idle_s"]} for row in removed]
        record_act(check.actor, "node.images_removed", check.node, after={"images": images})
        hint_node(check.node.public_id, "images")


def tidy_if_full(node: Node, used_percent: float | None) -> None:
    """Orders tidying once an image made the store of a node too full; not twice within a quarter of an hour."""
    high = float(knobs_of([node.pool])[node.pool_id]["image_high_percent"])
    since = timezone.now() - dt.timedelta(seconds=FULL_AGAIN_S)
    if used_percent is None or used_percent < high:
        return
    if not NodeCheck.objects.filter(node=node, kind=NodeAct.GC.value, started_at__gt=since).exists():
        with transaction.atomic():
            order(node, NodeAct.GC)


def tidy_nodes() -> None:
    """Orders the tidying that is due by itself: once in a while, and sooner where the disk is full."""
    newest = NodeCheck.objects.filter(node=OuterRef("pk"), kind=NodeAct.GC.value).order_by("-id")
    nodes = Node.objects.filter(reachable=True, state__in=[NodeState.READY.value, NodeState.CORDONED.value])
    columns = ("pk", "pool_id", "state_reason", "created_at", "tidied_at")
    tidied_at = Subquery(newest.values("started_at")[:1])
    rows = list(nodes.annotate(tidied_at=tidied_at).values_list(*columns, named=True))
    knobs, now = (
        knobs_of(NodePool.objects.all()),
        timezone.now(),
    )  # after the rows: none is of a pool not read
    due = []
    for row in rows:
        every_s = float(knobs[row.pool_id]["tidy_every_s"])
        if every_s and row.state_reason.startswith(FULL_DISK):
            every_s = min(every_s, FULL_AGAIN_S)
        last = row.tidied_at or row.created_at
        if every_s and now - last >= dt.timedelta(seconds=every_s):
            due.append(row.pk)
    for node in Node.objects.filter(pk__in=due) if due else ():
        with transaction.atomic():
            order(node, NodeAct.GC)


def forget_old_acts() -> None:
    """Drops checks and tidyings of a month ago; tests and upgrades are kept with their node."""
    old = NodeCheck.objects.filter(
        kind__in=[NodeAct.PREFLIGHT.value, NodeAct.GC.value], finished_at__lt=Now() - dt.timedelta(days=30)
    )
    old.delete()


def give_up_overdue() -> None:
    """Acts that were not over in time have failed: their node fell silent, or nobody carried them out."""
    late = NodeCheck.objects.filter(_due(), begun_at__lt=Now() - dt.timedelta(seconds=WITHIN_S))
    for check in late.select_related("node"):
        sentence = f"{check.node.name} has not answered within {WITHIN_S:.0f} s."
        if check.program:
            sentence += (
                " The new agent may be in place; unless confirmed, the node goes back to the one before."
            )
        record_check_step(
            check.public_id,
            name=ACT_TITLES[NodeAct(check.kind)],
            ok=False,
            sentence=sentence,
            seconds=WITHIN_S,
        )
        record_order_finished(check.pk, ok=False)


def record_check_step(check_id: str, *, name: str, ok: bool, sentence: str, seconds: float) -> None:
    """One more step of a connection test, for the page that waits."""
    with transaction.atomic():
        check = NodeCheck.objects.select_for_update(no_key=True).get(public_id=check_id)
        check.steps = [
            *check.steps,
            {"name": name, "ok": ok, "sentence": sentence[:1000], "seconds": round(seconds, 3)},
        ]
        check.save(update_fields=["steps"])


def record_check_finished(check_id: str, ok: bool) -> None:
    """The test has ended; a good one hints the node's actor to connect now."""
    with transaction.atomic():
        check = (
            NodeCheck.objects.select_for_update(no_key=True).select_related("node").get(public_id=check_id)
        )
        check.ok, check.finished_at = ok, timezone.now()
        check.save(update_fields=["ok", "finished_at"])
        if ok:
            hint_node(check.node.public_id, "connect")


# -- inside ----------------------------------------------------------------------------------------


def _due() -> Q:
    acts = [act.value for act in BY_ACTOR]
    return Q(kind__in=acts, begun_at__isnull=False, finished_at__isnull=True)


def _advance(rollout: Rollout) -> None:
    """Lets the next nodes begin, or ends it. The rollout's row is locked."""
    checks = list(rollout.checks.select_related("node").order_by("node__name"))
    turns = [check.turn for check in checks]
    begin = may_begin(turns)
    for check in [check for check, turn in zip(checks, turns, strict=True) if turn is Turn.WAITS][:begin]:
        check.begun_at = timezone.now()
        check.save(update_fields=["begun_at"])
        hint_node(check.node.public_id, ORDERS)
    if begin == 0 and Turn.BEGUN not in turns:
        _finish(rollout, checks, turns)


def _finish(rollout: Rollout, checks: list[NodeCheck], turns: list[Turn]) -> None:
    failed = [check.node.name for check, turn in zip(checks, turns, strict=True) if turn is Turn.FAILED]
    left = [check.pk for check, turn in zip(checks, turns, strict=True) if turn is Turn.WAITS]
    NodeCheck.objects.filter(pk__in=left).delete()  # nothing was done there
    rollout.ok, rollout.finished_at = not failed, timezone.now()
    worked = turns.count(Turn.WORKED)
    rollout.sentence = f"{worked} of {len(turns)} nodes run the new agent."
    if failed:
        rollout.sentence += f" It stopped at {', '.join(failed)}; {len(left)} were left as they are."
    rollout.sentence = rollout.sentence[:500]
    rollout.save(update_fields=["ok", "finished_at", "sentence"])
