"""Files of launchers in the runtime ``process``, for real: placeholders, modes, and their replacement."""

from __future__ import annotations

import contextlib
import os

import pytest

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import StartResult, TaskKey
from agents.link import AgentError
from agents.node import errors as node_errors
from agents.node.spec.environment import LaunchPlaceholders
from tests.agents.node.conftest import CLUSTER, LoneNode, log_with

WATCH = """
stat -c '%a' "$FAIRWAY_SECRETS/hosts"
echo "in $1 and $PLACE"
until grep -q rank-1 "$FAIRWAY_SECRETS/hosts"; do sleep 0.1; done
cat "$FAIRWAY_SECRETS/hosts" "$FAIRWAY_SECRETS/where"
"""


def test_files_are_private_and_can_be_replaced_while_the_task_runs(node: LoneNode) -> None:
    files = {"hosts": "rank-0:1\n", "where": "{fairway:secrets}/hosts\n"}
    spec = node.spec(
        "jhosts", "sh", "-c", WATCH, "sh", "{fairway:secrets}", env={"PLACE": "{fairway:secrets}"},
        launch_files=files,
    )  # fmt: skip
    key = TaskKey("jhosts", 1, 0)
    with contextlib.closing(NodeEngine.local(node.pyz, node.settings_path, cluster=CLUSTER)) as engine:
        container = engine.request(verbs.START, StartResult.from_wire, epoch=1, spec=spec).container
        engine.command(verbs.UPDATE_FILES, **vars(key), files={"hosts": "rank-0:1\nrank-1:1\n"})
        folder = node.folder / "state/tasks" / container / "secrets"
        text = log_with(node.open(), "jhosts", "/hosts\n")
        assert "600\n" in text and f"in {folder} and {folder}\n" in text
        assert text.endswith(f"rank-0:1\nrank-1:1\n{folder}/hosts\n")
        with pytest.raises(AgentError, match=r"has no launch file|is not running"):
            engine.command(verbs.UPDATE_FILES, **vars(key), files={"other": "x"})
        assert "other" not in os.listdir(folder.parent)


def test_addresses_are_those_of_the_jobs_network() -> None:
    filled = LaunchPlaceholders("/run/fairway", "10.89.1.0/29").fill(
        "{fairway:address:0} {fairway:address:3} {x}"
    )
    assert filled == "10.89.1.2 10.89.1.5 {x}"
    with pytest.raises(node_errors.AgentError, match="no free address for rank 5"):
        LaunchPlaceholders("/run/fairway", "10.89.1.0/29").fill("{fairway:address:5}")
    with pytest.raises(node_errors.AgentError, match="its job has no network"):
        LaunchPlaceholders("/run/fairway").fill("{fairway:address:0}")
