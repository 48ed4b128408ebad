"""Detects changes of podman's images from file metadata.

Podman lists the images of a store in ``<driver>-images/images.json`` and replaces the file whenever an image
is added, removed or renamed. While the file is unchanged, cached inspections are valid; an inspection takes
30 ms. After a change of the store's configuration the cache is off until the next session.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from agents.node.host.procfs import read_text

_File = Optional[Tuple[int, int, int, int]]
StoreFingerprint = Tuple[_File, ...]
_ADDITIONAL_STORES = re.compile(r"additionalimagestores\s*=\s*\[(.*?)\]", re.DOTALL)
_CONFIGURATION_FILES = (
    "/etc/containers/storage.conf",
    "/usr/share/containers/storage.conf",
    "~/.config/containers/storage.conf",
)


class StoreFiles(NamedTuple):
    """Files that list the images, and files that configure where these are."""

    images: Tuple[str, ...]
    configuration: Tuple[str, ...]
    root: str


class PodmanImageStore:
    """The image store of one engine; :meth:`locate` must find its files before :meth:`fingerprint` works."""

    def __init__(self, read_info: Callable[[], Optional[str]]) -> None:
        self._read_info = read_info
        self._files: Optional[StoreFiles] = None
        self._configuration_fingerprint: Optional[StoreFingerprint] = None

    def locate(self) -> None:
        """Ask podman for the location of its image lists; incomplete answers are ignored."""
        lists = find_store_files(self._read_info() or "")
        self._configuration_fingerprint = _fingerprint(lists.configuration) if lists else None
        self._files = lists

    @property
    def root(self) -> Optional[str]:
        """The folder of the store; None before :meth:`locate`, and when unknown."""
        return self._files.root if self._files else None

    def fingerprint(self) -> Optional[StoreFingerprint]:
        """Return a value that changes whenever the images may have changed; None when unknown."""
        lists = self._files
        if (
            lists is None
            or self._configuration_fingerprint is None
            or self._configuration_fingerprint != _fingerprint(lists.configuration)
        ):
            return None
        return _fingerprint(lists.images)

    def lists_image(self, image_id: str) -> bool:
        """Return True when an image is in one of the lists, so that they reveal its changes."""
        wanted = image_id.split(":", 1)[-1]
        return any(wanted in _ids(path) for path in (self._files.images if self._files else ()))


def find_store_files(info: str) -> Optional[StoreFiles]:
    """Return the relevant files from ``podman info``; None for an unknown form of store."""
    try:
        store = json.loads(info)["store"]
        driver, root = store["graphDriverName"], store["graphRoot"]
        more: Any = store.get("graphOptions", {}).get(f"{driver}.imagestore", [])
        configured = store.get("configFile") or _CONFIGURATION_FILES[0]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    shared = [more] if isinstance(more, str) else more
    if not isinstance(shared, list) or not all(isinstance(each, str) for each in (root, driver, *shared)):
        return None
    configuration = dict.fromkeys([configured, *(os.path.expanduser(path) for path in _CONFIGURATION_FILES)])
    # podman 4 reports only the last of several additional stores; its configuration names all
    named = _ADDITIONAL_STORES.findall(read_text(configured) or "")
    shared = [*shared, *(path for each in named for path in re.findall(r"[\"']([^\"']+)[\"']", each))]
    roots = dict.fromkeys([root, *(path for each in shared for path in each.split(",") if path)])
    return StoreFiles(
        images=tuple(os.path.join(each, f"{driver}-images", "images.json") for each in roots),
        configuration=tuple(configuration),
        root=root,
    )


def is_fully_qualified(image: str) -> bool:
    """Return True when a name includes its registry; short names depend on more than the store."""
    first, slash, _ = image.partition("/")
    return bool(slash) and (first == "localhost" or "." in first or ":" in first)


def _fingerprint(paths: Sequence[str]) -> Optional[StoreFingerprint]:
    """Return a fingerprint of these files; None when unreadable."""
    try:
        return tuple(_file_fingerprint(path) for path in paths)
    except OSError:
        return None


def _file_fingerprint(path: str) -> _File:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _ids(path: str) -> List[str]:
    try:
        rows = json.loads(read_text(path) or "[]")
    except ValueError:  # read during a replacement; the next call reads it again
        return []
    return [str(row.get("id")) for row in rows if isinstance(row, dict)]
