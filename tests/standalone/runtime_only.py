"""Imports what each service of docker-compose.yml imports, as if only the packages of requirements.lock were there.

Run as a program of its own: it says nothing and ends well, or ends with the error of the first import that fails.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==", re.MULTILINE)


def packages_of(lock: str) -> set[str]:
    """The names of the packages in a lock file, in the spelling by which they are compared."""
    return {re.sub(r"[-_.]+", "-", name).lower() for name in _PINNED.findall((ROOT / lock).read_text())}


class MissingPackageFinder:
    """Finds nothing of packages that the image does not have."""

    def __init__(self) -> None:
        more = packages_of("requirements-dev.lock") - packages_of("requirements.lock")
        owners = importlib.metadata.packages_distributions()
        spelled = {
            module: {re.sub(r"[-_.]+", "-", owner).lower() for owner in of} for module, of in owners.items()
        }
        self.modules = {module for module, of in spelled.items() if of <= more}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".", 1)[0] in self.modules:
            raise ModuleNotFoundError(f"{name} is not in requirements.lock", name=name)
        return None


def main() -> None:
    kept_out = MissingPackageFinder()
    assert "pytest" in kept_out.modules
    sys.meta_path.insert(0, kept_out)
    importlib.import_module("uvicorn").Config("portal.asgi:application", uds="unused", lifespan="off").load()
    importlib.import_module("portal.gateway.__main__")
    worker = importlib.import_module("scheduler.worker")
    application = next(each for each in vars(worker).values() if type(each).__name__ == "Celery")
    application.loader.import_default_modules()
    transport = application.connection_for_read("redis://unused:6379/0").transport
    assert transport.driver_type == "redis"
    for name in ("solo", "threads", "prefork"):
        importlib.import_module("celery.concurrency").get_implementation(name)
    for name in (
        "celery.apps.worker",
        "celery.apps.beat",
        "celery.bin.celery",
        "celery.worker.consumer.tasks",
    ):
        importlib.import_module(name)
    for name in ("collect", "prepare", "backup", "restore", "node_setup", "migrate"):
        importlib.import_module("django.core.management").load_command_class("portal", name)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
