"""The runtime podman: rootful, or rootless with the person mapped onto the node's account."""

from __future__ import annotations

import contextlib
import os
from typing import Optional, Tuple

from agents.node.machine import read_text
from agents.node.places import BEGINNING
from agents.node.refusals import Refusal
from agents.node.runtimes.engine import EngineRuntime, ImageFacts
from agents.node.runtimes.firewall import Firewall
from agents.node.runtimes.image_store import ImageStore, Stamp, is_whole_name
from agents.node.settings import RuntimeSettings, Settings

_INITIALIZED = ("already been created in runtime",)


class PodmanRuntime(EngineRuntime):
    """Podman writes the task's log and process number into the task's own folder."""

    kind = "podman"
    log_format = "k8s"
    keeps_spares = True

    def __init__(self, settings: Settings, own: RuntimeSettings) -> None:
        super().__init__(settings, own)
        self._store = ImageStore(self._info)
        if self.rootless and settings.firewall:
            self._firewall = Firewall(settings, self.command(["unshare", "--rootless-netns"]))

    def warm_up(self) -> None:
        self._store.learn()

    def start(self, name: str) -> None:
        """Without root podman's network namespace goes with the last container in it, and the rules go with it.

        So the container joins its network first, which keeps the namespace, and runs once the rules are in force.
        """
        if self.rootless and self._firewall is not None:
            answer = self.call(["init", name])
            if answer.code != 0 and not answer.says(_INITIALIZED):
                raise self.refusal("init", answer)
            self._firewall.refresh()
        super().start(name)

    def begun(self, name: str) -> Tuple[Optional[int], Optional[float]]:
        path = os.path.join(self.settings.state_dir, "tasks", name, "pid")
        text = (read_text(path) or "").strip()
        if text.isdigit():
            return int(text), os.stat(path).st_mtime
        return super().begun(name)

    def gather_log(self, name: str, path: str) -> None:
        """Holds on to the first file of a log: at its size limit podman begins a new one in its place.

        So a task takes twice the limit on the disk at most, and what was read of its log never changes.
        """
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(path, path + BEGINNING)

    def _info(self) -> Optional[str]:
        with contextlib.suppress(Refusal):
            answer = self.call(["info", "--format", "json"])
            return answer.out if answer.code == 0 else None
        return None

    def _stamp_of_images(self) -> Optional[Stamp]:
        return self._store.stamp()

    def _may_be_kept(self, image: str, facts: ImageFacts) -> bool:
        return is_whole_name(image) and self._store.holds(facts.image_id)
