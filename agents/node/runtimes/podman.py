"""Podman runtime: rootful, or rootless with the user mapped to the node's account."""

from __future__ import annotations

import contextlib
import os
from typing import Optional, Sequence, Tuple

from agents.node.errors import ENGINE_ERROR, AgentError, RecreateContainerError
from agents.node.host.procfs import read_text
from agents.node.host.versions import parse_version
from agents.node.runtimes.container import CommandResult, ContainerRuntime, ImageConfig
from agents.node.runtimes.firewall import Firewall
from agents.node.runtimes.podman_store import PodmanImageStore, StoreFingerprint, is_fully_qualified
from agents.node.runtimes.rootless_bridges import (
    BRIDGE_TAKEN_MESSAGES,
    SINCE,
    WITHIN_NAMESPACE,
    RootlessBridges,
    namespace_exists,
)
from agents.node.settings import RuntimeSettings, Settings
from agents.node.storage.directories import FIRST_LOG_SUFFIX

_INITIALIZED = ("already been created in runtime",)


class PodmanRuntime(ContainerRuntime):
    """Podman writes the task's log and process id into the task's folder."""

    kind = "podman"
    log_format = "k8s"
    pools_networks = True

    def __init__(self, settings: Settings, own: RuntimeSettings) -> None:
        super().__init__(settings, own)
        self._store = PodmanImageStore(self._info)
        self._network_backend: Optional[str] = None
        bridges_lock = os.path.join(settings.state_dir, "bridges.lock")
        self._bridges = RootlessBridges(bridges_lock, self.run_checked)
        if self.rootless and settings.firewall:
            self._firewall = Firewall(settings, self.command(WITHIN_NAMESPACE))

    def warm_up(self) -> None:
        self._store.locate()

    def unsupported_reason(self) -> Optional[str]:
        version = parse_version(self.version() or "")
        if not self.rootless or version is None or version >= SINCE:
            return None
        return (
            f"podman {self.version()} without root does not remove the networks of ended jobs: install "
            f"podman {'.'.join(map(str, SINCE))} or newer, or enrol this node with root access to the engine."
        )

    def edit_networks(self, words: Sequence[str], lock_fd: Optional[int] = None) -> CommandResult:
        if not self._keeps_bridges():
            return super().edit_networks(words, lock_fd)
        with self._bridges.lock():
            within = [*WITHIN_NAMESPACE, *self.command(words)] if namespace_exists() else words
            return self.run(within, lock_fd=lock_fd)

    def remove_stale_bridges(self) -> int:
        return self._bridges.remove_stale() if self._keeps_bridges() and namespace_exists() else 0

    def _keeps_bridges(self) -> bool:
        """Return True where podman uses CNI in a network namespace of the account."""
        if self.rootless and self._network_backend is None:
            answer = self.run(["info", "--format", "{{.Host.NetworkBackend}}"])
            self._network_backend = answer.stdout.strip() if answer.code == 0 else None
        return self.rootless and self._network_backend != "netavark"

    def start(self, name: str) -> None:
        """Start a task. Rootless podman removes its network namespace, and the rules in it, with the last
        container.

        The container therefore joins its network first, which keeps the namespace, and runs once the rules
        are in force.
        """
        if self.rootless:
            answer = self.run(["init", name])
            if answer.mentions(BRIDGE_TAKEN_MESSAGES) and self.remove_stale_bridges():
                # a second init of the same container would succeed and leave it without a network
                raise RecreateContainerError(ENGINE_ERROR, self.error("init", answer).message)
            if answer.code != 0 and not answer.mentions(_INITIALIZED):
                raise self.error("init", answer)
            if self._firewall is not None:
                self._firewall.refresh()
        super().start(name)

    def start_info(self, name: str) -> Tuple[Optional[int], Optional[float]]:
        path = os.path.join(self.settings.state_dir, "tasks", name, "pid")
        text = (read_text(path) or "").strip()
        if text.isdigit():
            return int(text), os.stat(path).st_mtime
        return super().start_info(name)

    def collect_log(self, name: str, path: str) -> None:
        """Link the first file of a log: at the size limit podman replaces it by a new one.

        A task therefore uses at most twice the limit on disk, and bytes once read never change.
        """
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(path, path + FIRST_LOG_SUFFIX)

    def _info(self) -> Optional[str]:
        with contextlib.suppress(AgentError):
            answer = self.run(["info", "--format", "json"])
            return answer.stdout if answer.code == 0 else None
        return None

    def store_path(self) -> Optional[str]:
        return self._store.root or super().store_path()  # a call of podman info takes 0.3 s of a core

    def _store_fingerprint(self) -> Optional[StoreFingerprint]:
        return self._store.fingerprint()

    def _is_cacheable(self, image: str, facts: ImageConfig) -> bool:
        return is_fully_qualified(image) and self._store.lists_image(facts.image_id)
