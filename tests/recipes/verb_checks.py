"""The caller of the recipe for a verb: asks a real agent of the edited sources, and one that lacks the verb.

python verb_checks.py FOLDER PROGRAM_WITHOUT_IT
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from agents.bundle import build_archive
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import LoadAverage
from agents.link import AgentError
from agents.verbs import LOAD_AVERAGE

folder = Path(sys.argv[1])
build_archive(folder / "agent.pyz")
(folder / "gpus.json").write_text('{"gpus": []}')
settings = {
    "cluster": "t",
    "gpu_provider": f"file:{folder / 'gpus.json'}",
    "home_root": str(folder / "homes"),
}
settings |= {"state_dir": str(folder / "state"), "ledgers_dir": str(folder / "ledgers")}
(folder / "node.json").write_text(json.dumps(settings))


def request(program: Path) -> LoadAverage:
    with closing(NodeEngine.local(program, folder / "node.json", cluster="t")) as engine:
        assert engine.supports(LOAD_AVERAGE) == (program.parent == folder)
        return engine.request(LOAD_AVERAGE, LoadAverage.from_wire, minutes=5)


assert request(folder / "agent.pyz").load >= 0.0
try:
    request(Path(sys.argv[2]))
except AgentError as error:
    assert error.code == "unknown_verb"
else:
    raise AssertionError("an agent without the verb answered")
