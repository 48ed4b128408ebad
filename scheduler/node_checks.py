"""The live test of a node and the one-time enrolment, run where the control key is; steps go to the page."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from django.conf import settings
from django.db import connection

from agents.check_node import Outcome, check_node
from agents.enrol import EnrolmentFailed, enrol_with_sudo
from agents.keys import Purpose
from agents.ssh import SshError, SshTarget
from portal.errors import FairwayError
from portal.models import ClusterSettings, Node, NodeCheck
from portal.services.enrolment import get_script, take_sudo_login
from portal.services.node_acts import record_check_finished, record_check_step
from portal.words.states import LinkKind
from scheduler.opening import CannotOpen, control_key, open_engine

log = logging.getLogger(__name__)


def run_check(check_id: str) -> None:
    """Runs a test to its end; called in a thread of its own. A repeat of one that has begun does nothing."""
    check = _unstarted(check_id)
    if check is None:
        return
    try:
        ok = _test(check_id, check.node)
        record_check_finished(check_id, ok)
    finally:
        connection.close()


def run_enrolment(check_id: str) -> None:
    """Enrols a node through one sudo login that waits for this check, then tests it."""
    check = _unstarted(check_id)
    if check is None:
        return
    try:
        ok = _enrol(check_id, check.node) and _test(check_id, check.node)
        record_check_finished(check_id, ok)
    finally:
        connection.close()


def _unstarted(check_id: str) -> NodeCheck | None:
    return (
        NodeCheck.objects.select_related("node")
        .filter(public_id=check_id, finished_at__isnull=True, steps=[])
        .first()
    )


def _enrol(check_id: str, node: Node) -> bool:
    began_s = time.monotonic()

    def step(ok: bool, sentence: str) -> bool:
        record_check_step(
            check_id, name="Enrolment", ok=ok, sentence=sentence, seconds=time.monotonic() - began_s
        )
        return ok

    login = take_sudo_login(check_id)
    if login is None:
        return step(False, "The login was not used within a minute and is gone; give it again.")
    try:
        script = get_script(node.host, engine=login.engine, runtime=node.runtime, account=node.account)
        target = SshTarget(node.host, login.account, node.host_key, node.port)
        enrol_with_sudo(target, login.password, script)
    except (SshError, EnrolmentFailed) as problem:
        return step(False, str(problem))
    except FairwayError as problem:
        return step(False, problem.sentence)
    return step(True, "The account, the three keys and the agent are in place; the login was not kept.")


def _test(check_id: str, node: Node) -> bool:
    if node.link == LinkKind.LOCAL.value:
        return _test_local(check_id, node)
    cluster = ClusterSettings.objects.get(id=1).cluster_id
    target = SshTarget(node.host, node.account, node.host_key, node.port)
    good = True
    for step in check_node(target, _keys(), cluster):
        if step.outcome is Outcome.SKIPPED and "key" in step.name:
            continue
        ok = step.outcome is not Outcome.FAILED and step.outcome is not Outcome.SKIPPED
        good = good and step.outcome is not Outcome.FAILED
        record_check_step(check_id, name=step.title, ok=ok, sentence=step.sentence, seconds=step.duration_s)
    return good


def _keys() -> dict[Purpose, Path]:
    """The keys this process holds: control alone, in production."""
    found: dict[Purpose, Path] = {"control": control_key()}
    others: tuple[Purpose, ...] = ("watch", "tunnel")
    for name in others:
        path = Path(settings.KEY_FILES[name]) if settings.KEY_FILES[name] else None
        if path is not None and path.is_file():
            found[name] = path
    return found


def _test_local(check_id: str, node: Node) -> bool:
    began_s = time.monotonic()
    try:
        engine = open_engine(node)
    except CannotOpen as problem:
        record_check_step(
            check_id, name="Agent", ok=False, sentence=str(problem), seconds=time.monotonic() - began_s
        )
        return False
    hello = engine.hello
    engine.close()
    sentence = f"Version {hello['agent_version']} answers, with {len(hello['gpus'])} GPUs."
    record_check_step(check_id, name="Agent", ok=True, sentence=sentence, seconds=time.monotonic() - began_s)
    return True
