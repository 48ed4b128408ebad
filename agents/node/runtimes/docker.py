"""Docker runtime: the daemon writes the logs, so they are copied while a task runs."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from typing import Dict, Optional

from agents.node.errors import AgentError
from agents.node.host.procfs import read_text
from agents.node.host.versions import parse_version
from agents.node.runtimes import arguments
from agents.node.runtimes.container import ContainerRuntime, parse_container
from agents.node.runtimes.docker_log import copy_log
from agents.node.runtimes.seccomp import DOCKER_SINCE
from agents.node.settings import RuntimeSettings, Settings


class DockerRuntime(ContainerRuntime):
    """Docker keeps logs with its containers, where they are rotated and removed with the container."""

    kind = "docker"
    log_format = "k8s"
    _version_arguments = (
        "version",
        "--format",
        "{{.Server.Version}}",
    )  # that of the daemon; the client may differ

    def __init__(self, settings: Settings, own: RuntimeSettings) -> None:
        super().__init__(settings, own)
        self._log_paths: Dict[str, str] = {}
        self._chosen_gpu_mode: Optional[str] = None
        self._strict_seccomp: Optional[bool] = None

    def collect_log(self, name: str, path: str) -> None:
        source = self._log_paths.get(name)
        if source is None or not os.path.exists(source):
            source = self._log_path_of(name)
        if source is not None and os.path.isdir(os.path.dirname(path)):
            self._log_paths[name] = source
            copy_log(source, path, self.settings.max_log_mib)

    def remove(self, name: str) -> None:
        with contextlib.suppress(AgentError, OSError):  # a full disk must not prevent the removal
            self.collect_log(name, os.path.join(self.settings.state_dir, "tasks", name, "log"))
        super().remove(name)
        self._log_paths.pop(name, None)

    def _gpu_mode(self) -> str:
        if self._chosen_gpu_mode is None:
            version = parse_version(self.run_checked(self._version_arguments)) or ()
            has_cdi = version >= arguments.CDI_SINCE and self._has_cdi()
            self._chosen_gpu_mode = arguments.choose_gpu_mode(
                self.kind, version, self._runtime_settings.gpus, daemon_has_cdi=has_cdi
            )
        return self._chosen_gpu_mode

    def _default_seccomp_is_strict(self) -> bool:
        if self._strict_seccomp is None:
            options = self.run_checked(["info", "--format", "{{json .SecurityOptions}}"])
            version = parse_version(self.run_checked(self._version_arguments)) or ()
            self._strict_seccomp = version >= DOCKER_SINCE and "name=seccomp,profile=builtin" in options
        return self._strict_seccomp

    def _has_cdi(self) -> bool:
        """Return True when the daemon has CDI enabled and its folders contain a GPU specification."""
        with contextlib.suppress(ValueError, TypeError):
            folders = json.loads(self.run_checked(["info", "--format", "{{json .CDISpecDirs}}"]))
            files = (
                path for folder in folders for path in glob.iglob(os.path.join(glob.escape(folder), "*"))
            )
            return any("nvidia.com/gpu" in (read_text(path) or "") for path in files)
        return False

    def _log_path_of(self, name: str) -> Optional[str]:
        """Return the path of a container's log; None before its first start."""
        for row in self._inspect_rows([name]):
            found = parse_container(row)
            if found is not None and found.cluster == self.settings.cluster:
                return row.get("LogPath") or None
        return None
