"""Podman runtime: rootful, or rootless with the user mapped to the node's account."""

from __future__ import annotations

import contextlib
import os
from typing import Optional, Tuple

from agents.node.errors import AgentError
from agents.node.host.procfs import read_text
from agents.node.runtimes.container import ContainerRuntime, ImageConfig
from agents.node.runtimes.firewall import Firewall
from agents.node.runtimes.podman_store import PodmanImageStore, StoreFingerprint, is_fully_qualified
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
        if self.rootless and settings.firewall:
            self._firewall = Firewall(settings, self.command(["unshare", "--rootless-netns"]))

    def warm_up(self) -> None:
        self._store.locate()

    def start(self, name: str) -> None:
        """Start a task. Rootless podman removes its network namespace, and the rules in it, with the last
        container.

        The container therefore joins its network first, which keeps the namespace, and runs once the rules
        are in force.
        """
        if self.rootless and self._firewall is not None:
            answer = self.run(["init", name])
            if answer.code != 0 and not answer.mentions(_INITIALIZED):
                raise self.error("init", answer)
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
