"""Live test and enrolment of a node, run by the process with the control key; steps are shown on the page."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from django.conf import settings
from django.db import connection

from agents.connection_test import StepOutcome, run_connection_test
from agents.enrolment import EnrolmentScriptError, enrol_with_sudo
from agents.keys import PURPOSES, Purpose
from agents.ssh import SshError, SshTarget
from portal.database.pool_middleware import release_connection
from portal.domain.states import NodeState, NodeTransport
from portal.errors import FairwayError
from portal.models import ClusterSettings, Node, NodeOperation
from portal.selectors.nodes.host_keys import ssh_target
from portal.selectors.nodes.network_policy import addresses_of
from portal.services.nodes.enrolment import get_script, pop_sudo_login
from portal.services.nodes.identity import record_move_tested
from portal.services.nodes.operations import record_connection_test_finished, record_operation_step
from scheduler.nodes.engine_connect import EngineConnectError, control_key_path, open_engine

log = logging.getLogger(__name__)


def run_check(operation_id: str) -> None:
    """Run a test in its own thread; does nothing when it has already begun."""
    _run(operation_id, _check_node)


def run_enrolment(operation_id: str) -> None:
    """Enrol a node through one sudo login, then test it."""
    _run(operation_id, lambda id_, node: _enrol(id_, node) and _check_node(id_, node))


def run_move(operation_id: str) -> None:
    """Test the connection to a node at another address with its pinned key, and save the address if it works.

    While the node still answers at its old address, the machine at the new one must be the same. It must never be
    the machine of another node: one made from the same disk image has the same host key, and its boot id would
    end the tasks of a node that is only unreachable.
    """
    operation = _get_unstarted(operation_id)
    if operation is None:
        return
    try:
        node = operation.node
        target = replace(ssh_target(node), host=operation.new_host, port=operation.new_port or 22)
        if (other := _node_at_the_same_address(node, target)) is not None:
            message = (
                f"{target.host} leads to the same address as {other.host}, which is the node {other.name}."
            )
            _timed_step(operation_id, "Address")(False, message)
            record_move_tested(operation_id, False, target)
            return
        good = _test_connection(operation_id, target, node.boot_id if node.reachable else None)
        record_move_tested(operation_id, good, target)
    finally:
        connection.close()


def _node_at_the_same_address(node: Node, target: SshTarget) -> Node | None:
    """Return another node whose host name or address leads to the target's."""
    others = Node.objects.exclude(pk=node.pk).exclude(state=NodeState.RETIRED.value).exclude(host="")
    rows = list(others.filter(port=target.port).order_by("pk"))
    release_connection()  # names are resolved
    wanted = addresses_of(target.host)
    return next((row for row in rows if wanted & addresses_of(row.host)), None)


def _run(operation_id: str, steps: Callable[[str, Node], bool]) -> None:
    check = _get_unstarted(operation_id)
    if check is None:
        return
    try:
        record_connection_test_finished(operation_id, steps(operation_id, check.node))
    finally:
        connection.close()


def _get_unstarted(operation_id: str) -> NodeOperation | None:
    return (
        NodeOperation.objects.select_related("node")
        .filter(public_id=operation_id, finished_at__isnull=True, steps=[])
        .first()
    )


def _timed_step(operation_id: str, name: str) -> Callable[[bool, str], bool]:
    """Return a function that records the step with the time since now, and returns whether it succeeded."""
    began_s = time.monotonic()

    def step(ok: bool, message: str) -> bool:
        seconds = time.monotonic() - began_s
        record_operation_step(operation_id, name=name, ok=ok, message=message, seconds=seconds)
        return ok

    return step


def _enrol(operation_id: str, node: Node) -> bool:
    step = _timed_step(operation_id, "Enrolment")
    login = pop_sudo_login(operation_id)
    if login is None:
        return step(
            False, "The credentials were not used within a minute and have expired; enter them again."
        )
    try:
        script = get_script(node.host, engine=login.engine, runtime=node.runtime, account=node.ssh_user)
        target = SshTarget(node.host, login.username, node.host_key, node.port)
        enrol_with_sudo(target, login.password, script)
    except (SshError, EnrolmentScriptError) as error:
        return step(False, str(error))
    except FairwayError as error:
        return step(False, error.message)
    return step(
        True, "The account, the three keys and the agent are installed; the credentials were not stored."
    )


def _check_node(operation_id: str, node: Node) -> bool:
    if node.transport == NodeTransport.LOCAL.value:
        return _check_local_node(operation_id, node)
    return _test_connection(operation_id, ssh_target(node))


def _test_connection(operation_id: str, target: SshTarget, boot_id: str | None = None) -> bool:
    cluster = ClusterSettings.objects.get(id=1).cluster_id
    good, keys = True, _keys()
    for step in run_connection_test(target, keys, cluster, boot_id=boot_id):
        if step.name in PURPOSES and step.name not in keys:  # another process has it
            continue
        failed, skipped = step.outcome is StepOutcome.FAILED, step.outcome is StepOutcome.SKIPPED
        good = good and not failed
        record_operation_step(
            operation_id,
            name=step.title,
            ok=not failed and not skipped,
            message=step.message,
            seconds=step.duration_s,
            skipped=skipped,
        )
    return good


def _keys() -> dict[Purpose, Path]:
    """Return the key files this process can read; in production only control."""
    found: dict[Purpose, Path] = {"control": control_key_path()}
    others: tuple[Purpose, ...] = ("watch", "tunnel")
    for name in others:
        path = Path(settings.KEY_FILES[name]) if settings.KEY_FILES[name] else None
        if path is not None and path.is_file():
            found[name] = path
    return found


def _check_local_node(operation_id: str, node: Node) -> bool:
    step = _timed_step(operation_id, "Agent")
    try:
        engine = open_engine(node)
    except EngineConnectError as error:
        return step(False, str(error))
    hello = engine.hello
    engine.close()
    return step(True, f"Version {hello['agent_version']} responds, with {len(hello['gpus'])} GPUs.")
