"""Which image an archive holds, as the portal reads it from the archive itself."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from portal.services.environments.archives import archive_config_digest

CONFIGS = {"a.json": b'{"config": "a"}', "b.json": b'{"config": "b"}'}


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def packed(path: Path, files: Mapping[str, object], mode: str = "w") -> str:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return str(path)


def saved(*images: tuple[str, list[str]]) -> dict[str, object]:
    return CONFIGS | {"manifest.json": [{"Config": config, "RepoTags": tags} for config, tags in images]}


@pytest.mark.parametrize(
    ("files", "config"),
    [
        (saved(("a.json", ["localhost/lab/x:1"])), "a.json"),
        (saved(("a.json", [])), "a.json"),
        (saved(("a.json", ["other:1"]), ("b.json", ["lab/x:1"])), "b.json"),
        (saved(("a.json", ["other:1"]), ("b.json", ["other:2"])), None),
        (saved(("gone.json", [])), None),
        (saved(), None),
        ({"manifest.json": b"not json"}, None),
        ({"manifest.json": ["x"]}, None),
        ({"index.json": {"manifests": []}}, None),
        ({"etc/passwd": b""}, None),
    ],
)
def test_an_archive_of_docker_save_names_its_image_where_it_is_clear(tmp_path, files, config) -> None:
    expected = digest(CONFIGS[config]) if config else ""
    assert archive_config_digest(packed(tmp_path / "image.tar", files), "localhost/lab/x:1") == expected


def test_a_packed_oci_layout_names_the_configuration_of_its_image(tmp_path) -> None:
    manifest = json.dumps({"config": {"digest": digest(CONFIGS["a.json"])}}).encode()
    files = {
        "index.json": {"manifests": [{"digest": digest(manifest)}]},
        "blobs/" + digest(manifest).replace(":", "/"): manifest,
    }
    assert archive_config_digest(packed(tmp_path / "image.tar", files), "x:1") == digest(CONFIGS["a.json"])


def test_an_unreadable_archive_names_no_image(tmp_path) -> None:
    (tmp_path / "noise").write_bytes(b"noise" * 1000)
    compressed = packed(tmp_path / "image.tar.gz", saved(("a.json", [])), "w:gz")
    for path in (tmp_path / "noise", tmp_path / "gone", tmp_path, compressed):
        assert archive_config_digest(str(path), "x:1") == ""
