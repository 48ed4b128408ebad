"""The agent is killed at steps of starting and stopping tasks without a container."""

from __future__ import annotations

import pytest

from tests.agents.node.conftest import LoneNode
from tests.agents.node.sweeps import sweep_abandoned_start, sweep_full_disk, sweep_start, sweep_stop

pytestmark = [pytest.mark.rig, pytest.mark.early]

every_fifth = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
every_ninth = pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.long)])
every_tenth = pytest.mark.parametrize("stride", [10, pytest.param(1, marks=pytest.mark.long)])


@every_ninth
def test_steps_of_a_process_start(node: LoneNode, stride: int) -> None:
    assert sweep_start(node, "process", stride) * stride >= 12


@every_tenth
def test_steps_of_an_abandoned_process_start(node: LoneNode, stride: int) -> None:
    sweep_abandoned_start(node, "process", stride)


@every_ninth
def test_steps_of_a_process_stop(node: LoneNode, stride: int) -> None:
    assert sweep_stop(node, "process", stride) * stride >= 6


@every_fifth
def test_a_disk_that_fills_during_a_start(node: LoneNode, stride: int) -> None:
    assert sweep_full_disk(node, "process", stride) >= 4
