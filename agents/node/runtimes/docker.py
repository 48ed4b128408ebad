"""The runtime docker: as podman, but its daemon writes the logs, so they are taken over while a task runs."""

from __future__ import annotations

import contextlib
import os
from typing import Dict, Optional

from agents.node.refusals import Refusal
from agents.node.runtimes.engine import EngineRuntime, found_in
from agents.node.runtimes.json_log import gather
from agents.node.settings import RuntimeSettings, Settings


class DockerRuntime(EngineRuntime):
    """Docker keeps logs beside its containers, where they are turned over and go with the container."""

    kind = "docker"
    log_format = "k8s"

    def __init__(self, settings: Settings, own: RuntimeSettings) -> None:
        super().__init__(settings, own)
        self._log_paths: Dict[str, str] = {}

    def gather_log(self, name: str, path: str) -> None:
        source = self._log_paths.get(name)
        if source is None or not os.path.exists(source):
            source = self._log_path_of(name)
        if source is not None and os.path.isdir(os.path.dirname(path)):
            self._log_paths[name] = source
            gather(source, path, self.settings.log_mib)

    def remove(self, name: str) -> None:
        with contextlib.suppress(Refusal, OSError):  # a full disk must not keep what ended from going
            self.gather_log(name, os.path.join(self.settings.state_dir, "tasks", name, "log"))
        super().remove(name)
        self._log_paths.pop(name, None)

    def _log_path_of(self, name: str) -> Optional[str]:
        """Where the daemon writes the log of a container of ours; None before its first start."""
        for row in self._rows([name]):
            found = found_in(row)
            if found is not None and found.cluster == self.settings.cluster:
                return row.get("LogPath") or None
        return None
