"""The agent is killed at steps of starting and stopping containers, and of making networks ahead."""

from __future__ import annotations

import pytest

from tests.agents.node.conftest import LoneNode
from tests.agents.node.sweeps import (
    sweep_abandoned_start,
    sweep_full_disk,
    sweep_spare,
    sweep_start,
    sweep_stop,
)

pytestmark = [pytest.mark.rig, pytest.mark.early, pytest.mark.timeout(600)]

every_fourteenth = pytest.mark.parametrize("stride", [14, pytest.param(1, marks=pytest.mark.long)])
every_28th = pytest.mark.parametrize("stride", [28, pytest.param(1, marks=pytest.mark.long)])
at_length = pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long)])


@every_fourteenth
def test_a_disk_that_fills_during_a_podman_start(podman_node: LoneNode, stride: int) -> None:
    assert sweep_full_disk(podman_node, "podman", stride) >= 2


@every_28th
def test_steps_of_a_podman_start(podman_node: LoneNode, stride: int) -> None:
    assert sweep_start(podman_node, "podman", stride) * stride >= 15
    assert podman_node.podman("ps", "--all", "--quiet").stdout == ""  # type: ignore[attr-defined]


@every_28th
def test_steps_of_a_start_on_a_prepared_network(podman_node: LoneNode, stride: int) -> None:
    assert sweep_start(podman_node, "podman", stride, spare=True) * stride >= 12
    assert podman_node.networks() <= set(podman_node.ledger()["network_pool"])


@at_length
def test_steps_of_making_a_network_ahead(podman_node: LoneNode, stride: int) -> None:
    assert sweep_spare(podman_node, stride) * stride >= 12


@at_length
def test_steps_of_an_abandoned_podman_start_and_of_a_stop(podman_node: LoneNode, stride: int) -> None:
    sweep_abandoned_start(podman_node, "podman", stride)
    sweep_stop(podman_node, "podman", stride)
    assert podman_node.networks() <= set(podman_node.ledger()["network_pool"])
