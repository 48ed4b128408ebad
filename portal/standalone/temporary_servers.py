"""A PostgreSQL and a Valkey for tests, which run until standard input is closed.

`python -m portal.standalone.temporary_servers FOLDER` prints one line of JSON with both addresses once they
answer, and removes everything when its input ends, however its parent died.
"""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from portal.config import data_paths
from portal.standalone.account import service_account
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.processes.exec_child import exec_command
from portal.standalone.servers.postgres import prepare_postgres
from portal.standalone.servers.valkey import prepare_valkey

LOG = "servers.log"
STOP_TIMEOUT_S = 20


def main(root: Path) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the end of the input stops the servers
    folder = DataDir(root, service_account())
    running: list[tuple[subprocess.Popen[bytes], signal.Signals]] = []
    try:
        folder.prepare()
        postgres = prepare_postgres(folder, durable=False)
        valkey = prepare_valkey(folder)
        for command, stop_with in ((postgres.command, signal.SIGINT), (valkey.command, signal.SIGTERM)):
            argv = exec_command(command, account=folder.account, death_signal=stop_with)
            with (root / LOG).open("ab") as log:
                process = subprocess.Popen(
                    argv, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            running.append((process, stop_with))
        postgres.wait_ready(lambda: running[0][0].poll() is None)
        valkey.wait_ready(lambda: running[1][0].poll() is None)
        # tests create databases of their own
        owner_url = data_paths.database_url(root, data_paths.OWNER_ROLE)
        print(json.dumps({"database_url": owner_url, "redis_url": folder.redis_url}), flush=True)
        select.select([sys.stdin], [], [])
        return 0
    except StartError as trouble:
        lines = (root / LOG).read_text(errors="replace") if (root / LOG).exists() else ""
        print(json.dumps({"trouble": f"{lines[-2000:]}{trouble}"}), flush=True)
        return 1
    finally:
        for process, stop_with in running:
            process.send_signal(stop_with)
        for process, _ in running:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder.sockets, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
