"""Records the code and the packages of a running task, with a program that runs beside it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any, Dict, List, cast

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.ledger.ledger import RUNNING
from agents.node.tasks.task_manager import TaskManager
from agents.node.terminals.shell import exec_beside_task

TIMEOUT_S = 25.0
MAX_BYTES = 600 * 1024
MAX_AT_ONCE = 2
_NOT_FOUND_CODES = (126, 127)
_slots = threading.BoundedSemaphore(MAX_AT_ONCE)
"""Records at the same time; the other requests of the portal need threads, too."""


def record_environment(tasks: TaskManager, agent: List[str], request: Dict[str, Any]) -> Dict[str, Any]:
    """Return what the program wrote, in base64. ``interpreters``: commands tried in their order."""
    name, interpreters = tasks.task_name(request), request.get("interpreters")
    if not isinstance(interpreters, list) or not 1 <= len(interpreters) <= 4:
        raise invalid_spec("interpreters is not a list of 1 to 4 commands.")
    if not all(isinstance(each, str) and each and not each.startswith("-") for each in interpreters):
        raise invalid_spec("interpreters contains a value that is not a command.")
    record = tasks.ledger.tasks().get(name)
    if record is None or record["phase"] != RUNNING or record["pid"] is None:
        raise AgentError(errors.NO_SUCH_CONTAINER, f"{name} is not running on this node.")
    shell = tasks.runtimes[record["runtime"]].shell(name)
    source = (pkgutil.get_data("agents.node.inspection", "environment_program.py") or b"").decode()
    if not _slots.acquire(timeout=TIMEOUT_S):
        return {"data_b64": ""}
    try:
        until_s, output = time.monotonic() + TIMEOUT_S, b""
        for interpreter in interpreters:
            command = [interpreter, "-c", source]
            if "exec" in shell:
                code, output = _run([*shell["exec"], *command], b"", until_s)
            else:
                order = {"shell": shell, "pid": record["pid"], "pid_start": record["pid_start"]}
                order["command"] = command
                code, output = _run([*agent, "beside-task"], json.dumps(order).encode(), until_s)
            if output or code not in _NOT_FOUND_CODES:
                break
    finally:
        _slots.release()
    return {"data_b64": base64.b64encode(output).decode()}


def _run(command: List[str], given: bytes, until_s: float) -> "tuple[int, bytes]":
    """Return exit code and output until a time of the monotonic clock; what still runs then is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    found = bytearray()
    try:
        with contextlib.suppress(BrokenPipeError):
            stdin.write(given)
            stdin.close()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while len(found) < MAX_BYTES and selector.select(max(0.0, until_s - time.monotonic())):
                part = os.read(stdout.fileno(), 65536)
                if not part:
                    break
                found += part
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(1.0, until_s - time.monotonic())))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        stdout.close()
    return process.returncode, bytes(found[:MAX_BYTES])


def main() -> int:
    """Become the program of the order on standard input, beside its task."""
    order = json.load(sys.stdin)
    try:
        exec_beside_task(order["shell"], order["pid"], order["pid_start"], order["command"])
    except OSError:
        return 127
    return 0
