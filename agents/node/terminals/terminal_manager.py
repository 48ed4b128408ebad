"""Opens terminals: a shell in a running task, on a pseudo terminal of its own process.

The process accepts one peer that knows the secret, on the node's loopback address, and ends with it. It is
independent of the agent process that opened it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
from typing import Any, Dict, Iterator, List

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.host.atomic_files import file_lock, make_folder
from agents.node.ledger.ledger import RUNNING
from agents.node.spec.task_spec import container_name, parse_integer, parse_public_id
from agents.node.tasks.task_manager import TaskManager

MAX_PER_NODE, MAX_PER_TASK = 32, 4
MAX_IDLE_S = 86_400
MAX_ROWS_OR_COLUMNS = 1000
_START_TIMEOUT_S = 15.0
_SECRET = re.compile(r"[A-Za-z0-9_-]{32,128}\Z")


class TerminalManager:
    """The terminals of this node. Each holds a file lock, by which they are counted."""

    def __init__(self, tasks: TaskManager, agent: List[str]) -> None:
        self._tasks = tasks
        self._agent = agent
        self._folder = os.path.join(tasks.settings.state_dir, "terminals")

    def open(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Open a terminal in a running task; return its ``port`` on the node's loopback address.

        ``secret``: authenticates its peer. ``idle_s``: maximum time without input. ``cols``, ``rows``:
        initial size.
        """
        order = {
            "cols": _parse_bounded(request, "cols", MAX_ROWS_OR_COLUMNS),
            "rows": _parse_bounded(request, "rows", MAX_ROWS_OR_COLUMNS),
            "idle_s": _parse_bounded(request, "idle_s", MAX_IDLE_S),
        }
        return self._start("terminal", request, order)

    def open_streams(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Likewise for the streams of one SSH connection (``agents.node.terminals.streams``)."""
        return self._start("streams", request, {})

    def _start(self, program: str, request: Dict[str, Any], order: Dict[str, Any]) -> Dict[str, Any]:
        job, attempt = parse_public_id(request, "job"), parse_integer(request, "attempt")
        name = container_name(self._tasks.settings.cluster, job, attempt, parse_integer(request, "task"))
        secret = request.get("secret")
        if not isinstance(secret, str) or not _SECRET.match(secret):
            raise invalid_spec("secret is not 32 to 128 letters, digits, hyphens and underscores.")
        record = self._tasks.ledger.tasks().get(name)
        if record is None or record["phase"] != RUNNING or record["pid"] is None:
            raise AgentError(errors.NO_SUCH_CONTAINER, f"{name} is not running on this node.")
        runtime = self._tasks.runtimes[record["runtime"]]
        order.update(secret=secret, loopback=self._tasks.settings.loopback, shell=runtime.shell(name))
        order.update(pid=record["pid"], pid_start=record["pid_start"])
        with self._acquire_slot(name) as slot_fd:
            return {"port": self._start_process(program, order, slot_fd)}

    @contextlib.contextmanager
    def _acquire_slot(self, name: str) -> Iterator[int]:
        """Yield a lock to pass to the process; refuse beyond the limits per node and task."""
        make_folder(self._folder, 0o700)
        with file_lock(os.path.join(self._tasks.directories.locks_dir, "terminals")):
            taken = self._open_terminals()
            if len(taken) >= MAX_PER_NODE:
                raise AgentError(errors.FORBIDDEN, f"This node already has {len(taken)} open terminals.")
            if taken.count(name) >= MAX_PER_TASK:
                message = f"A task can have at most {MAX_PER_TASK} open terminals. Close another first."
                raise AgentError(errors.FORBIDDEN, message)
            with file_lock(os.path.join(self._folder, f"{name}.{secrets.token_hex(6)}")) as slot_fd:
                if slot_fd is None:
                    raise AgentError(errors.ENGINE_ERROR, "A new file was locked already.")
                yield slot_fd

    def _open_terminals(self) -> List[str]:
        """Return the task of each open terminal; remove files of ended ones."""
        taken = []
        for file in os.listdir(self._folder):
            path = os.path.join(self._folder, file)
            with file_lock(path, wait=False) as free:
                if free is None:
                    taken.append(file.rpartition(".")[0])
                else:
                    os.unlink(path)
        return taken

    def _start_process(self, program: str, order: Dict[str, Any], slot_fd: int) -> int:
        """Start the process of a terminal; return its port. The secret is passed through a pipe."""
        try:
            answer = subprocess.run(
                [*self._agent, program],
                input=json.dumps(order).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(slot_fd,),
                timeout=_START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AgentError(errors.ENGINE_ERROR, "The terminal did not start in time.") from error
        if answer.returncode != 0 or not answer.stdout.isdigit():
            raise AgentError(errors.ENGINE_ERROR, "The terminal could not listen on its port.")
        return int(answer.stdout)


def _parse_bounded(fields: Dict[str, Any], key: str, maximum: int) -> int:
    number = parse_integer(fields, key)
    if not 1 <= number <= maximum:
        raise invalid_spec(f"{key} is not a number from 1 to {maximum}.")
    return number
