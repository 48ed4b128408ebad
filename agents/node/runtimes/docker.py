"""The runtime docker: as podman, but logs and process numbers are the daemon's, so they are asked for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import Optional

from agents.node.refusals import Refusal
from agents.node.runtimes import arguments
from agents.node.runtimes.engine import EngineRuntime


class DockerRuntime(EngineRuntime):
    """Docker keeps logs beside the container; they are copied before the container goes."""

    kind = "docker"
    log_format = "json"

    def log_path(self, name: str, folder_path: str) -> str:
        if os.path.exists(folder_path):
            return folder_path
        return self._daemon_path(name) or folder_path

    def remove(self, name: str) -> None:
        kept = os.path.join(self.settings.state_dir, "tasks", name)
        path = self._daemon_path(name)
        if path is not None and os.path.isdir(kept) and not os.path.exists(os.path.join(kept, "log")):
            with contextlib.suppress(OSError):
                shutil.copyfile(path, os.path.join(kept, "log.part"))
                os.replace(os.path.join(kept, "log.part"), os.path.join(kept, "log"))
        super().remove(name)

    def _daemon_path(self, name: str) -> Optional[str]:
        with contextlib.suppress(Refusal, ValueError):
            rows = json.loads(self.call(arguments.inspect([name])).out or "[]")
            if rows and rows[0].get("LogPath"):
                return str(rows[0]["LogPath"])
        return None
