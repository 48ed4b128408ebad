"""Runs a supervisor over small real processes, as a program that tests start, signal and kill.

`python supervised_processes.py FOLDER NAME=BEHAVIOUR...` prints the supervisor's lines.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from portal.standalone.processes.log_prefix import PrefixedWriter
from portal.standalone.processes.orphan_processes import SUPERVISED_VARIABLE, terminate_orphans
from portal.standalone.processes.supervisor import Process, StopRequested, Supervisor

SCRIPTS = {
    "steady": "import time; print('here', flush=True); time.sleep(600)",
    "dies": "print('dying', flush=True); raise SystemExit(3)",
    "deaf": (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('here', flush=True); time.sleep(600)"
    ),
    "family": (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print('child', p.pid, flush=True); time.sleep(600)"
    ),
    "chatty": "import sys\nfor i in range(20000): print('x' * 50)\nimport time; time.sleep(600)",
}


def main(folder: Path, rows: list[str]) -> None:
    records = folder / "children.json"
    lines = PrefixedWriter(sys.stdout)
    for name in terminate_orphans(records, str(folder)):
        lines.supervisor_line(f"ended {name}")
    environment = {**os.environ, SUPERVISED_VARIABLE: str(folder)}
    with Supervisor(records, lines) as supervisor:
        try:
            for row in rows:
                name, _, behaviour = row.partition("=")
                command = (sys.executable, "-c", SCRIPTS[behaviour])
                supervisor.start(Process(name, command, environment, grace_s=1.0))
            lines.raw("READY")
            supervisor.run()
        except StopRequested:
            lines.supervisor_line("stopped while starting")
    lines.raw("GONE")


if __name__ == "__main__":
    signal.alarm(120)
    main(Path(sys.argv[1]), sys.argv[2:])
