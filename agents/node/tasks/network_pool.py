"""Keeps a network ready for the next job, so that a start does not wait until one is made.

In the order of everything here: promise (the ledger sets a piece of the address range aside), act (the
engine makes the network), record (the ledger says that it is ready). A kill between any two leaves a promise
that the next turn keeps: making a network that exists is success. A job takes a spare for itself alone, and
it goes with the job's last task like a network that was made for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
import traceback

from agents.node.errors import AgentError
from agents.node.host.atomic_files import file_lock
from agents.node.runtimes import Runtime
from agents.node.tasks.manager import TaskManager

IDLE_DELAY_S = 1.0
"""A spare is made when no start has been under way for so long, and so takes nothing from a burst of them."""
_RETRY_DELAY_S = 30.0


class NetworkPool:
    """A thread of a control session. One agent process at a time makes spares; the others leave it to that one."""

    def __init__(self, tasks: TaskManager) -> None:
        self._tasks = tasks
        self._lock_path = os.path.join(tasks.settings.state_dir, "network_pool.lock")
        self._wakeup = threading.Event()
        self._stopped = threading.Event()
        self._idle_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="network_pool", daemon=True)

    def start(self) -> None:
        self._tasks.on_start = self.schedule
        self.schedule()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._wakeup.set()
        self._thread.join(timeout=5.0)

    def schedule(self) -> None:
        """Asks for a turn once the node has been quiet for a while."""
        self._idle_at_s = time.monotonic() + IDLE_DELAY_S
        self._wakeup.set()

    def _run(self) -> None:
        first = True
        while True:
            self._wakeup.wait()
            if self._wait_until_idle():
                return
            self._wakeup.clear()
            try:
                if first:
                    for runtime in self._tasks.runtimes.values():
                        runtime.warm_up()
                    self.remove_orphans()
                    first = False
                done = self.refill()
            except (AgentError, OSError):
                traceback.print_exc(file=sys.stderr)
                done = False
            if not done:
                self._wakeup.wait(_RETRY_DELAY_S)
                self._wakeup.set()

    def _wait_until_idle(self) -> bool:
        """True when the session ends instead."""
        while not self._stopped.is_set():
            rest_s = self._idle_at_s - time.monotonic()
            if rest_s <= 0:
                return False
            self._stopped.wait(rest_s)
        return True

    def refill(self) -> bool:
        """Makes what was promised, and a spare for each runtime without one; False when to be tried again."""
        with file_lock(self._lock_path, wait=False) as hold_fd:
            if hold_fd is None:
                return False
            here = [runtime for runtime in self._tasks.runtimes.values() if runtime.pools_networks]
            made = [self._refill_runtime(runtime, hold_fd) for runtime in here]
            return all(made)

    def _refill_runtime(self, runtime: Runtime, hold_fd: int) -> bool:
        ledger = self._tasks.ledger
        mine = {
            name: spare
            for name, spare in ledger.pooled_networks().items()
            if spare["runtime"] == runtime.kind
        }
        if not mine:
            name = f"fw-{self._tasks.settings.cluster}-spare-{secrets.token_hex(4)}"
            subnet = ledger.reserve_pooled_network(name, runtime.kind)
            if subnet is None:
                return True  # every piece is in use; jobs come first
            mine = {name: {"subnet": subnet, "ready": False}}
        made = True
        for name, spare in mine.items():
            if not spare["ready"]:
                made &= self._make(runtime, name, spare["subnet"], hold_fd)
        return made

    def _make(self, runtime: Runtime, name: str, subnet: str, hold_fd: int) -> bool:
        try:
            runtime.create_network(name, subnet, lock_fd=hold_fd)
        except AgentError as refusal:
            sys.stderr.write(f"No network could be made ahead: {refusal.message}\n")
            runtime.remove_network(name)  # a command that was cut short may have got that far
            self._tasks.ledger.remove_pooled_network(name)
            return False
        self._tasks.ledger.mark_pooled_network_ready(name)
        return True

    def remove_orphans(self) -> int:
        """Removes networks of ours that no task and no spare is known to have; gives how many.

        The engine is asked before the ledger is read: what stands there then was promised before it was made.
        """
        removed = 0
        for runtime in self._tasks.runtimes.values():
            with contextlib.suppress(AgentError):
                here = runtime.networks(self._tasks.settings.cluster)
                for name in sorted(set(here) - self._tasks.ledger.networks()):
                    runtime.remove_network(name)
                    removed += 1
        return removed
