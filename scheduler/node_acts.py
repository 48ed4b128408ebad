"""Carries out what was asked of a node beside starts and stops: signals, another agent, a look, tidying up.

Each act is a row that stays until it is over, so it may be carried out again after a crash. An upgrade is two
visits: the first sends the program and drops the link, the second meets what answers then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from agents.engines.contract import Refused
from portal.errors import FairwayError
from portal.killpoints import killpoint
from portal.models import NodeCheck, NodePool
from portal.selectors.agent_program import our_agent
from portal.selectors.policy import knobs_of
from portal.services import nodes
from portal.services.bringing import images_kept_on
from portal.services.node_acts import (
    due_orders,
    record_check_step,
    record_images_removed,
    record_order_finished,
    record_sent,
)
from portal.services.node_return import record_checked
from portal.services.sent_signals import record_signal, take_signals
from portal.words.fabric import Fabric
from portal.words.knobs import KnobValue
from portal.words.node_acts import FREED, IMAGES, SENT, STORE, TRIAL_S, WARNS, NodeAct, images_sentence
from portal.words.states import LinkKind
from scheduler.dispatch import Door


def carry_out(door: Door, reopen: Callable[[], None]) -> None:
    """Everything that is due on a node: signals, then one act after the other.

    ``reopen`` drops the link, so that a new one meets another agent. Raises Unknown when the node does not answer:
    what was not finished is due again.
    """
    _send_signals(door)
    for check in due_orders(door.node.pk):
        if not door.engine.is_open:
            return  # what this link said of the node's agent may be out of date
        act = _Act(door, check)
        try:
            match NodeAct(check.kind):
                case NodeAct.UPGRADE:
                    if not _upgrade(act):
                        reopen()
                        return
                case NodeAct.PREFLIGHT:
                    _preflight(act)
                case NodeAct.GC:
                    _tidy(act)
        except Refused as refusal:
            act.step(check.title, False, refusal.message)
            act.finish(False)
        except FairwayError as problem:
            act.step(check.title, False, problem.sentence)
            act.finish(False)


def _send_signals(door: Door) -> None:
    for row in take_signals(door.node.pk):
        attempt = row.attempt
        killpoint("signal.taken")
        try:
            signal = row.signal.removeprefix("SIG")
            door.engine.signal(door.epoch(), attempt.job.public_id, attempt.number, signal)
        except Refused as refusal:
            record_signal(row, refusal.message)
        else:
            record_signal(row)


class _Act:
    """One act under way: where its steps go, and how long each took."""

    def __init__(self, door: Door, check: NodeCheck) -> None:
        self.door = door
        self.check = check
        self._since_s = time.monotonic()

    def step(self, name: str, ok: bool, sentence: str) -> None:
        """One more step, which took the time since the one before."""
        now_s = time.monotonic()
        seconds, self._since_s = now_s - self._since_s, now_s
        record_check_step(self.check.public_id, name=name, ok=ok, sentence=sentence, seconds=seconds)

    def finish(self, ok: bool) -> None:
        """The act is over."""
        record_order_finished(self.check.pk, ok)


# -- upgrade ---------------------------------------------------------------------------------------


def _upgrade(act: _Act) -> bool:
    """One visit of an upgrade; False when the link is to be opened anew to meet the new program."""
    door, check, ours = act.door, act.check, our_agent()
    running = door.engine.hello.get("program")
    if running == ours.digest:
        if door.node.link == LinkKind.SSH.value:
            door.engine.confirm_upgrade(ours.digest)
        act.step(
            "New agent",
            True,
            f"It answers: version {door.engine.hello['agent_version']}, {ours.digest[:12]}.",
        )
        act.finish(True)
        return True
    if check.program == ours.digest:
        act.step(
            "New agent",
            False,
            f"It did not answer within {TRIAL_S:.0f} s; the node runs the one before again.",
        )
        act.finish(False)
        return True
    if door.node.link == LinkKind.SSH.value:
        door.engine.upgrade(ours.signed.program, ours.signed.signature, trial_s=TRIAL_S)
        sentence = f"{len(ours.signed.program) // 1024} KiB are in place and their signature is good."
    else:
        sentence = "This machine reads it from the portal's own folder."
    record_sent(check.pk, ours.digest)
    act.step(SENT, True, sentence)
    return False


# -- the machine -----------------------------------------------------------------------------------


def _preflight(act: _Act) -> None:
    pool = NodePool.objects.get(pk=act.door.node.pool_id)
    checks = act.door.engine.preflight(_named(pool.fabric, act.door.node.runtime))
    nodes.record_network_facts(act.door.node.pk, act.door.engine.network_facts())
    for check in checks:
        act.step(check.name.capitalize(), check.ok, check.sentence)
    record_checked(act.check.pk, all(check.ok or check.name in WARNS for check in checks))


def _named(fabric: Fabric, runtime: str) -> dict[str, Any] | None:
    """What a pool names, as a node is asked for it; None for nothing."""
    if fabric in (Fabric(), Fabric(adapters=fabric.adapters)):
        return None
    devices = list(fabric.devices)
    return {
        "runtime": runtime,
        "interface": fabric.interface,
        "network": fabric.network,
        "devices": devices,
    }


def _tidy(act: _Act) -> None:
    node = act.door.node
    knobs = knobs_of([node.pool])[node.pool_id]
    freed = act.door.engine.gc(keep_s=int(knobs["tidy_keep_s"]), images=_images_wish(knobs, node.pk))
    for key, (name, words) in FREED.items():
        if freed.get(key) is not None:  # an agent of an earlier version does not look at all of these
            act.step(name, True, f"{freed[key]} {words}.")
    if freed.get("images") is not None:
        act.step(IMAGES, True, images_sentence(freed["images"]))
        record_images_removed(act.check, freed["images"])
    if freed.get("store_used_percent") is not None:
        act.step(STORE, True, f"{freed['store_used_percent']:.0f} % of its file system is used.")
    act.finish(True)


def _images_wish(knobs: Mapping[str, KnobValue], node_id: int) -> dict[str, Any] | None:
    """Which images a node may remove, as the verb ``gc`` takes it; None: none."""
    if knobs["images_removed"] == "none":
        return None
    return {
        "high_percent": knobs["image_high_percent"],
        "low_percent": knobs["image_low_percent"],
        "keep_s": knobs["image_keep_s"],
        "others": knobs["images_removed"] == "all",
        "keep": images_kept_on(node_id),
    }
