"""The live connection test: every step is shown, the first fault is named, and what depends on it is skipped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from agents.connection_test import StepOutcome, StepResult, run_connection_test
from agents.keys import read_public_key
from tests.rig.cluster import RigCluster
from tests.rig.node import RigNode
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig

STEPS = [
    *("resolve", "connect", "host_key", "control", "watch", "tunnel"),
    *("agent", "runtime", "gpus", "disk", "clock"),
]


@pytest.fixture
def node(make_rig: Callable[..., Rig], rig_cluster: RigCluster) -> RigNode:
    made = make_rig(1).nodes[0]
    rig_cluster.enrol(made)
    return made


def check(node: RigNode, cluster: RigCluster, **changes: object) -> dict[str, StepResult]:
    target = replace(cluster.target(node), **changes)  # type: ignore[arg-type]
    steps = list(run_connection_test(target, cluster.keys, cluster.id))
    assert [step.name for step in steps] == STEPS
    assert all(step.message for step in steps)
    return {step.name: step for step in steps}


def failed(steps: dict[str, StepResult]) -> list[str]:
    return [name for name, step in steps.items() if step.outcome is StepOutcome.FAILED]


def test_a_healthy_node_passes_every_step(node: RigNode, rig_cluster: RigCluster) -> None:
    steps = check(node, rig_cluster)
    assert not failed(steps)
    assert not [step for step in steps.values() if step.outcome is StepOutcome.SKIPPED]
    assert "4 x Pretend A100 (simulated)" in steps["gpus"].message
    assert "podman" in steps["runtime"].message
    assert steps["clock"].outcome is StepOutcome.OK
    assert all(step.duration_s < 5 for step in steps.values())


def test_another_host_key_stops_everything_after_it(node: RigNode, rig_cluster: RigCluster) -> None:
    steps = check(node, rig_cluster, host_key=read_public_key(rig_cluster.keys["watch"]))
    assert failed(steps) == ["host_key"]
    assert steps["control"].message == "Skipped: host key failed."
    assert all(steps[name].outcome is StepOutcome.SKIPPED for name in STEPS[3:])


def test_an_unknown_name_and_a_closed_port_are_distinguished(node: RigNode, rig_cluster: RigCluster) -> None:
    assert failed(check(node, rig_cluster, host="no-such-node.invalid")) == ["resolve"]
    steps = check(node, rig_cluster, port=2222)
    assert failed(steps) == ["connect"]
    assert "no sshd listens on the port" in steps["connect"].message


def test_a_missing_tunnel_key_is_named_and_the_others_pass(node: RigNode, rig_cluster: RigCluster) -> None:
    keys = "/var/lib/fairway-node/home/.ssh/authorized_keys"
    node.execute("sed", "-i", "/fairway-tunnel/d", keys)
    steps = check(node, rig_cluster)
    assert failed(steps) == ["tunnel"]
    assert steps["watch"].outcome is StepOutcome.OK


def test_a_node_of_another_cluster_and_one_without_agent(node: RigNode, rig_cluster: RigCluster) -> None:
    steps = {
        step.name: step for step in run_connection_test(rig_cluster.target(node), rig_cluster.keys, "other")
    }
    assert failed(steps) == ["agent"]
    assert "belongs to the cluster rig" in steps["agent"].message
    node.execute("rm", "/usr/local/lib/fairway/fairway-node")
    steps = check(node, rig_cluster)
    assert failed(steps) == ["agent"]
    assert "run the enrolment script" in steps["agent"].message


def test_faulty_gpus_are_a_warning_and_a_broken_engine_an_error(
    node: RigNode, rig_cluster: RigCluster
) -> None:
    node.write_gpus(health="lost", health_message="It fell off the bus.")
    steps = check(node, rig_cluster)
    assert not failed(steps)
    assert "Not healthy" in steps["gpus"].message
    assert steps["gpus"].message.endswith(". It fell off the bus.")
    broken = "mkdir -p /usr/local/bin; printf '#!/bin/sh\\nexit 1\\n' > /usr/local/bin/podman"
    node.execute("sh", "-c", f"{broken}; chmod 755 /usr/local/bin/podman")
    steps = check(node, rig_cluster)
    assert failed(steps) in (["agent"], ["runtime"])
    assert any("podman" in steps[name].message for name in failed(steps))


def test_a_clock_that_is_off_is_measured(node: RigNode, rig_cluster: RigCluster) -> None:
    target = rig_cluster.target(node)
    for ahead_s, word in ((90.0, "behind"), (-90.0, "ahead of")):
        steps = list(
            run_connection_test(
                target, rig_cluster.keys, "rig", now=lambda ahead_s=ahead_s: time.time() + ahead_s
            )
        )
        assert steps[-1].outcome is StepOutcome.WARNING
        assert re.search(rf"(8[5-9]|9[0-5]) s {word} the portal's", steps[-1].message)


def test_a_process_without_a_key_skips_its_steps(node: RigNode, rig_cluster: RigCluster) -> None:
    keys = {"watch": rig_cluster.keys["watch"]}
    steps = {step.name: step for step in run_connection_test(rig_cluster.target(node), keys, "rig")}  # type: ignore[arg-type]
    assert steps["control"].outcome is steps["tunnel"].outcome is StepOutcome.SKIPPED
    assert steps["agent"].outcome in (StepOutcome.OK, StepOutcome.WARNING)


def test_steps_are_printed_one_by_one(node: RigNode, rig_cluster: RigCluster) -> None:
    steps = run_connection_test(rig_cluster.target(node), rig_cluster.keys, "rig")
    assert next(steps).name == "resolve"
    node.stop_sshd()
    assert next(steps).outcome is StepOutcome.FAILED
