"""The runtime podman: rootful, or rootless with the person mapped onto the node's account."""

from __future__ import annotations

import os
from typing import Optional, Tuple

from agents.node.machine import read_text
from agents.node.runtimes.engine import EngineRuntime


class PodmanRuntime(EngineRuntime):
    """Podman writes the task's log and process number into the task's own folder."""

    kind = "podman"
    log_format = "k8s"

    def begun(self, name: str) -> Tuple[Optional[int], Optional[float]]:
        path = os.path.join(self.settings.state_dir, "tasks", name, "pid")
        text = (read_text(path) or "").strip()
        if text.isdigit():
            return int(text), os.stat(path).st_mtime
        return super().begun(name)
