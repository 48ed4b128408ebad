"""The recipe for a verb holds: three edits and a caller suffice, applied to a copy of the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.agent_program import agent_program

ROOT = Path(__file__).parent.parent.parent
EDITS = {
    "verbs.py": (
        "\ndef announced()",
        '\nLOAD_AVERAGE = _verb("load_average", {"minutes": "1, 5 or 15"})\n',
    ),
    "node/server.py": (
        '            "upgrade":',
        '            "load_average": lambda f: {"load": os.getloadavg()[(1, 5, 15).index(f["minutes"])]},\n',
    ),
    "engines/replies.py": (
        "\n@dataclass(frozen=True)\nclass TaskExited",
        "\n@dataclass(frozen=True)\nclass LoadAverage(Message):\n    load: AnyNumber\n\n",
    ),
}


def test_a_verb_is_a_row_a_handler_a_reply_and_its_caller(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "agents", tmp_path / "agents", ignore=shutil.ignore_patterns("__pycache__"))
    for file, (line, text) in EDITS.items():
        path = tmp_path / "agents" / file
        before = path.read_text()
        assert before.count(line) == 1, file
        path.write_text(before.replace(line, text + line))
    shutil.copy(Path(__file__).parent / "verb_checks.py", tmp_path)
    command = [sys.executable, "verb_checks.py", str(tmp_path), str(agent_program())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
