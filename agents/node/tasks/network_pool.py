"""Creates a network ahead for the next job, so that a start need not wait for it.

Steps as everywhere in the agent: record the intent (the ledger reserves a subnet), act (the engine creates
the network), record the result (the ledger marks it ready). After a crash the next run completes it: creating
an existing network succeeds. A job that takes a pooled network owns it; it is removed with the job's last
task.
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
from agents.node.tasks.task_manager import TaskManager

IDLE_DELAY_S = 1.0
"""A network is created only after this time without a start, so that bursts of starts are not slowed down."""
_RETRY_DELAY_S = 30.0


class NetworkPool:
    """A thread of a control session. Only one agent process at a time refills the pool."""

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
        """Refill the pool once no start has run for ``IDLE_DELAY_S``."""
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
        """Wait; return True when the session ends first."""
        while not self._stopped.is_set():
            rest_s = self._idle_at_s - time.monotonic()
            if rest_s <= 0:
                return False
            self._stopped.wait(rest_s)
        return True

    def refill(self) -> bool:
        """Create reserved networks, and one for each runtime without; return False to retry later."""
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
                return True  # no free subnet; jobs have priority
            mine = {name: {"subnet": subnet, "ready": False}}
        made = True
        for name, spare in mine.items():
            if not spare["ready"]:
                made &= self._make(runtime, name, spare["subnet"], hold_fd)
        return made

    def _make(self, runtime: Runtime, name: str, subnet: str, hold_fd: int) -> bool:
        try:
            runtime.create_network(name, subnet, lock_fd=hold_fd)
        except AgentError as error:
            sys.stderr.write(f"No network could be created in advance: {error.message}\n")
            runtime.remove_network(name)  # an interrupted command may have created it
            self._tasks.ledger.remove_pooled_network(name)
            return False
        self._tasks.ledger.mark_pooled_network_ready(name)
        return True

    def remove_orphans(self) -> int:
        """Remove networks of this cluster that neither a task nor the pool has; return their number.

        The engine is queried before the ledger is read, because networks are recorded before they are
        created.
        """
        removed = 0
        for runtime in self._tasks.runtimes.values():
            with contextlib.suppress(AgentError):
                here = runtime.networks(self._tasks.settings.cluster)
                for name in sorted(set(here) - self._tasks.ledger.networks()):
                    runtime.remove_network(name)
                    removed += 1
                runtime.remove_stale_bridges()
        return removed
