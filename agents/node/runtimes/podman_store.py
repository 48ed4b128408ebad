"""Whether podman's images may have changed since it was last asked, by facts that cost nothing to look at.

Podman lists the images of a store in one file, ``<driver>-images/images.json``, and replaces that file by
another whenever an image comes, goes or gets another name. While that file stays the same, so does the answer
to a question about an image; the question to podman takes 30 ms. When the configuration of the store becomes
another, nothing is known until the next session.
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
    """The files that say which images there are, and those that say where these files are."""

    images: Tuple[str, ...]
    configuration: Tuple[str, ...]


class PodmanImageStore:
    """The store of one engine. It has to :meth:`learn` first where its files are; until then it has no stamp."""

    def __init__(self, read_info: Callable[[], Optional[str]]) -> None:
        self._read_info = read_info
        self._files: Optional[StoreFiles] = None
        self._configuration_fingerprint: Optional[StoreFingerprint] = None

    def locate(self) -> None:
        """Asks podman where its images are listed; what it says is believed only if it is complete."""
        lists = find_store_files(self._read_info() or "")
        self._configuration_fingerprint = _fingerprint(lists.configuration) if lists else None
        self._files = lists

    def fingerprint(self) -> Optional[StoreFingerprint]:
        """Changes whenever the images may have; None when nobody can say."""
        lists = self._files
        if (
            lists is None
            or self._configuration_fingerprint is None
            or self._configuration_fingerprint != _fingerprint(lists.configuration)
        ):
            return None
        return _fingerprint(lists.images)

    def lists_image(self, image_id: str) -> bool:
        """Says whether an image stands in one of the lists, for only then they tell when it changes."""
        wanted = image_id.split(":", 1)[-1]
        return any(wanted in _ids(path) for path in (self._files.images if self._files else ()))


def find_store_files(info: str) -> Optional[StoreFiles]:
    """The files that matter, from ``podman info``; None when a store of another form is seen."""
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
    # Podman 4 tells the last of several shared stores only; its configuration names them all.
    named = _ADDITIONAL_STORES.findall(read_text(configured) or "")
    shared = [*shared, *(path for each in named for path in re.findall(r"[\"']([^\"']+)[\"']", each))]
    roots = dict.fromkeys([root, *(path for each in shared for path in each.split(",") if path)])
    return StoreFiles(
        images=tuple(os.path.join(each, f"{driver}-images", "images.json") for each in roots),
        configuration=tuple(configuration),
    )


def is_fully_qualified(image: str) -> bool:
    """Says whether a name begins with its registry; what a short one means depends on more than the store."""
    first, slash, _ = image.partition("/")
    return bool(slash) and (first == "localhost" or "." in first or ":" in first)


def _fingerprint(paths: Sequence[str]) -> Optional[StoreFingerprint]:
    """What tells one state of these files from another; None when we may not look."""
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
    except ValueError:  # caught while it was replaced: ask again next time
        return []
    return [str(row.get("id")) for row in rows if isinstance(row, dict)]
