"""Reads the image digest of an archive: the digest of its configuration, as engines name loaded images.

Archives are those of ``docker save`` and ``podman save``, and OCI image layouts in a tar file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tarfile
from typing import Any

from agents.node.spec.image_names import normalize_image_name

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 8 * 2**20


def archive_config_digest(path: str, image: str) -> str:
    """Return the configuration digest of ``image`` in an archive; blank if unknown.

    Reads headers and small files only, so compressed archives are not supported.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            if "manifest.json" in archive.getnames():
                config = _read(
                    archive, _manifest_entry(json.loads(_read(archive, "manifest.json")), image)["Config"]
                )
                return "sha256:" + hashlib.sha256(config).hexdigest()
            (manifest,) = json.loads(_read(archive, "index.json"))["manifests"]
            blob = "blobs/" + manifest["digest"].replace(":", "/")
            return str(json.loads(_read(archive, blob))["config"]["digest"])
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.info("the image in %s is not known: %s", path, error)
        return ""


def _manifest_entry(entries: list[dict[str, Any]], image: str) -> dict[str, Any]:
    """Return the manifest entry with this name, else the only one. Raise ValueError if ambiguous."""
    named = [
        row
        for row in entries
        if normalize_image_name(image) in map(normalize_image_name, row.get("RepoTags") or ())
    ]
    (row,) = named or entries
    return row


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    stream = archive.extractfile(name)
    if stream is None:
        raise ValueError(f"{name} is not a file")
    with stream:
        content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{name} is larger than {MAX_JSON_BYTES // 2**20} MiB")
    return content
