"""A PostgreSQL and a Valkey for tests, which run until standard input is closed.

`python -m portal.standalone.temporary_servers FOLDER` prints one line of JSON with their addresses once they
answer, and removes everything when its input ends, however its parent died.
"""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from portal.config import data_paths
from portal.standalone.account import service_account
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.processes.exec_child import exec_command
from portal.standalone.servers.postgres import prepare_postgres
from portal.standalone.servers.server import Server
from portal.standalone.servers.valkey import prepare_valkey

LOG = "servers.log"
STOP_TIMEOUT_S = 20


def main(root: Path) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the end of the input stops the servers
    folder = DataDir(root, service_account())
    running: list[tuple[subprocess.Popen[bytes], Server]] = []
    try:
        folder.prepare()
        servers: list[Server] = [prepare_postgres(folder, durable=False), prepare_valkey(folder)]
        for server in servers:
            argv = exec_command(server.command, account=folder.account, death_signal=server.stop_signal)
            with (root / LOG).open("ab") as log:
                process = subprocess.Popen(
                    argv, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            running.append((process, server))
        for process, server in running:
            server.wait_ready(partial(_is_running, process))
        addresses = {
            "database_url": folder.database_url,
            "database_owner_url": data_paths.database_url(root, data_paths.OWNER_ROLE),
            "redis_url": folder.redis_url,
        }
        print(json.dumps(addresses), flush=True)
        select.select([sys.stdin], [], [])
        return 0
    except StartError as error:
        lines = (root / LOG).read_text(errors="replace") if (root / LOG).exists() else ""
        print(json.dumps({"trouble": f"{lines[-2000:]}{error}"}), flush=True)
        return 1
    finally:
        for process, server in running:
            process.send_signal(server.stop_signal)
        for process, _ in running:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder.sockets, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
