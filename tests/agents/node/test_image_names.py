"""Names of images: what the portal and the agent accept, and what names the same image."""

from __future__ import annotations

import pytest

from agents.node.errors import AgentError
from agents.node.spec.image_names import (
    InvalidImageError,
    is_image_name,
    normalize_image_name,
    parse_image_reference,
)
from agents.node.spec.task_spec import parse_spec

DIGEST = "sha256:" + "a" * 64
UNSAFE_IMAGES = [
    "docker-archive:/etc/passwd",
    "docker-archive:/srv/image.tar:name:1",
    "oci-archive:/srv/image.tar",
    "oci:/srv/layout",
    "oci:latest",
    "dir:/etc",
    "dir:etc",
    "dir:5000/x",
    "Dir:/etc",
    "containers-storage:x",
    "containers-storage:[overlay@/var/lib/containers/storage]x",
    "docker-daemon:x:latest",
    "docker://registry.example/x",
    "ostree:x@/srv",
    "sif:/srv/x.sif",
    "tarball:/srv/x.tar",
    "atomic:x",
    "/etc/passwd",
    "./image.tar",
    "../image.tar",
    "a/../b",
    "a//b",
    "-x",
    "--all-tags",
    "registry.example/--x",
    "registry.example:/x",
    "registry.example:port/x",
    "https://registry.example/x",
    "user@registry.example/x",
    "x y",
    "x\n",
    "x\x00",
    "x\u202e",
    "x:",
    "x:-1",
    "x@",
    "x@sha256:abc",
    "x@md5:" + "a" * 32,
    "Registry/x",
    "deadbeefcafe",
    "a" * 64,
    DIGEST,
    "x" * 600,
    "",
]


@pytest.mark.parametrize("image", UNSAFE_IMAGES)
def test_a_text_that_engines_read_otherwise_is_no_reference(image: str) -> None:
    with pytest.raises(InvalidImageError):
        parse_image_reference(image)


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("debian", (None, "debian", None, None)),
        ("debian:12", (None, "debian", "12", None)),
        ("pytorch/pytorch:2.4.0-cuda12.4", (None, "pytorch/pytorch", "2.4.0-cuda12.4", None)),
        ("localhost/fairway/jupyterlab:latest", ("localhost", "fairway/jupyterlab", "latest", None)),
        ("registry.example:5000/a_b/c-d.e:1", ("registry.example:5000", "a_b/c-d.e", "1", None)),
        ("[fd00::1]:5000/x", ("[fd00::1]:5000", "x", None, None)),
        (f"nvcr.io/nvidia/pytorch@{DIGEST}", ("nvcr.io", "nvidia/pytorch", None, DIGEST)),
        (f"x/y:1@{DIGEST}", (None, "x/y", "1", DIGEST)),
        ("dir/x", (None, "dir/x", None, None)),
        ("registry.example/fairway-saved/x", ("registry.example", "fairway-saved/x", None, None)),
    ],
)
def test_a_reference_is_split_into_its_parts(image: str, parts: tuple[str | None, ...]) -> None:
    reference = parse_image_reference(image)
    assert (tuple(reference), reference.is_saved_image) == (parts, False)


@pytest.mark.parametrize("image", [each for each in UNSAFE_IMAGES if each not in ("a" * 64, DIGEST)])
def test_the_agent_refuses_it_too(image: str) -> None:
    spec = {
        "cluster": "t1", "job": "ja", "attempt": 1, "task": 0, "digest": "d", "runtime": "podman", "uid": 2001,
        "gid": 2001, "user": "ada", "command": ["true"], "env": {}, "gpus": [],
    }  # fmt: skip
    assert parse_spec({**spec, "image": DIGEST}).image == DIGEST
    with pytest.raises(AgentError, match="image is not the name"):
        parse_spec({**spec, "image": image})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("docker.io/library/debian:12", "debian:12"),
        ("docker.io/library/debian", "debian:latest"),
        ("docker.io/lab/tool", "lab/tool:latest"),
        ("localhost/tiny:1", "tiny:1"),
        (DIGEST, "a" * 64),
        ("reg.example:5000/a/b", "reg.example:5000/a/b:latest"),
        ("reg.example/a:1@sha256:" + "b" * 64, "reg.example/a@sha256:" + "b" * 64),
    ],
)
def test_names_of_one_image_are_one_name(one: str, other: str) -> None:
    assert is_image_name(one) and is_image_name(other)
    assert normalize_image_name(one) == normalize_image_name(other)
    assert normalize_image_name(one) == normalize_image_name(normalize_image_name(one))
