"""Archives of small images with something in them, as ``docker save`` writes them; engines load them by the agent."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import tarfile
from typing import Any

from agents.link import Link


def archive(name: str, *, size_kib: int = 4096, variables: tuple[str, ...] = ()) -> bytes:
    """An image ``name`` of about so much, unlike every other."""
    layer = _tar({"noise": os.urandom(size_kib * 1024)})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin", *variables]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    reported = json.dumps(config).encode()
    listed = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    return _tar({"config.json": reported, "layer.tar": layer, "manifest.json": json.dumps(listed).encode()})


def load(link: Link, name: str, **how: Any) -> dict[str, Any]:
    """Has the agent load such an image; gives the row of it that it tells."""
    content, upload = archive(name, **how), f"u{os.urandom(6).hex()}"
    for offset in range(0, len(content), 512 * 1024):
        piece = base64.b64encode(content[offset : offset + 512 * 1024]).decode()
        link.request("load", timeout_s=20, upload=upload, offset=offset, data_b64=piece)
    return link.request("load", timeout_s=60, upload=upload, offset=len(content), last=True)["image"]


def _tar(files: dict[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return whole.getvalue()
