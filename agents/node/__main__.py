"""Command line of the agent: ``control``, ``watch`` and ``bulk`` serve a link, ``preflight`` runs checks."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import List

from agents.node.host.atomic_files import PRIVATE_UMASK

DEFAULT_SETTINGS = "/etc/fairway/node.json"
_OWN_PROGRAMS = {
    "shim": "agents.node.shim",
    "mps": "agents.node.gpus.mps_daemons",
    "disk-usage": "agents.node.storage.disk_usage",
    "checkpoints": "agents.node.storage.checkpoints",
    "archive": "agents.node.storage.archives",
    "files": "agents.node.storage.files",
    "folder-size": "agents.node.storage.folder_size",
    "notebooks": "agents.node.storage.notebooks",
    "storage-usage": "agents.node.storage.storage_usage",
    "terminal": "agents.node.terminals.terminal",
    "streams": "agents.node.terminals.streams",
    "beside-task": "agents.node.inspection.environment_record",
}
"""Programs that the agent starts as its own processes; each loads only the modules it needs."""


def main() -> int:
    os.umask(PRIVATE_UMASK)  # an account whose own umask is 000 or 022 must not make the node's files public
    if sys.argv[1:2] and sys.argv[1] in _OWN_PROGRAMS:
        program = importlib.import_module(_OWN_PROGRAMS[sys.argv[1]])
        return int(program.main(*sys.argv[2:]))
    parser = argparse.ArgumentParser(prog="fairway-node", description="The Fairway agent of a node.")
    parser.add_argument("role", choices=("control", "watch", "bulk", "preflight"))
    parser.add_argument("--settings", default=os.environ.get("FAIRWAY_NODE_SETTINGS", DEFAULT_SETTINGS))
    arguments = parser.parse_args()
    from agents.node.settings import SettingsError, read_settings

    try:
        settings = read_settings(arguments.settings)
    except SettingsError as error:
        refusal = {"ok": False, "code": "engine_error", "message": str(error)}
        sys.stdout.write(json.dumps(refusal) + "\n")
        return 2
    if arguments.role == "preflight":
        from agents.node.maintenance.preflight import run_preflight_command

        sys.stdout.write(json.dumps(run_preflight_command(settings, _own_command()), indent=2) + "\n")
        return 0
    from agents.node.server import serve

    own = _own_command()
    if own[1] == "-I" and os.path.isdir(settings.state_dir):
        os.chdir(settings.state_dir)  # container monitors write a note into their working directory on OOM
    return serve(settings, arguments.role, own)


def _own_command() -> List[str]:
    """Return the command that runs this program again: its archive, or the module."""
    program = os.path.abspath(sys.argv[0])
    if os.path.isfile(program) and not program.endswith("__main__.py"):
        return [sys.executable, "-I", program]
    return [sys.executable, "-m", "agents.node"]


if __name__ == "__main__":
    sys.exit(main())
