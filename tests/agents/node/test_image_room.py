"""Images make room on a full store, with real podman on a file system of its own: which go, and which never do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from agents.node.runtimes.image_cuda import required_cuda_version
from agents.node.settings import read_settings
from agents.node.storage.directories import NodeDirectories
from tests.agents.node.conftest import LoneNode
from tests.agents.node.loadable import archive, load

STORE_MIB = 64


@pytest.fixture
def small_store(podman_node: LoneNode) -> Iterator[LoneNode]:
    """A podman whose store is a file system of 64 MiB."""
    store = podman_node.folder / "store"
    store.mkdir()
    size = f"size={STORE_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(store)], check=True, timeout=10)
    clean_up = podman_node.clean_up.pop()
    yield podman_node

    def unmount() -> None:
        clean_up()
        subprocess.run(["umount", "--lazy", str(store)], capture_output=True, timeout=10)

    podman_node.clean_up.append(unmount)


def wish(**more: Any) -> dict[str, Any]:
    return {"high_threshold_percent": 1, "low_threshold_percent": 0, "min_age_s": 0, **more}


@pytest.mark.rig
@pytest.mark.long
def test_unused_images_are_removed_oldest_first(small_store: LoneNode) -> None:
    node = small_store
    by_hand = node.folder / "by-hand.tar"
    by_hand.write_bytes(archive("localhost/by-hand:1"))
    with node.open() as link:
        names = {word: f"localhost/{word}:1" for word in ("runs", "ahead", "ended", "idle", "needed")}
        rows = {word: load(link, name) for word, name in names.items()}
        node.podman("load", "--input", str(by_hand))

        def spec(job: str, image: str) -> dict[str, Any]:
            more = {"runtime": "podman", "image": image, "memory_mib": 128}
            return node.spec(job, "/nothing-there", **more)

        # what it runs is not in these images: a container of them is made all the same, and stays until it goes
        link.request("prepare", timeout_s=60, epoch=1, spec=spec("runs1", names["runs"]))
        link.request("prepare", timeout_s=60, epoch=1, spec=spec("ended1", rows["ended"]["image_id"]))
        assert link.request("stop", timeout_s=30, epoch=1, job="ended1", attempt=1, grace_s=0)["gone"]

        def tidied(**more: Any) -> list[str]:
            answer = link.request("gc", timeout_s=60, images=wish(protected=[names["ahead"]], **more))
            assert all(row["size_mib"] >= 3 for row in answer["images"])
            return [name for row in answer["images"] for name in row["names"]]

        def here() -> set[str]:
            listed = node.podman("images", "--format", "{{.Repository}}").stdout.split()
            return {each.removeprefix("localhost/") for each in listed if each.startswith("localhost/")}

        everything = here()
        assert everything >= {*names, "by-hand"}
        used = link.request("images", timeout_s=20)["store_used_percent"]
        assert used > 30
        assert tidied(high_threshold_percent=99) == tidied(high_threshold_percent=used + 10) == [], (
            "there is room"
        )
        assert tidied(min_age_s=3600) == [], "all of them were used of late"
        assert link.request("gc", timeout_s=60)["images"] == [], "an earlier portal says nothing of images"
        lock = NodeDirectories(read_settings(str(node.settings_path)))
        with lock.hold_image("needed:1"):  # as a start or a pull does, by another name of it
            assert tidied(high_threshold_percent=used, low_threshold_percent=used - 2) == [names["idle"]], (
                "one is enough"
            )
            assert tidied() == [names["ended"]], "then what was used last, and nothing that somebody needs"
        assert everything - here() == {"idle", "ended"}
        assert tidied() == [names["needed"]]
        assert tidied(include_unmanaged=True) == ["localhost/by-hand:1"]
        assert {"runs", "ahead"} <= here()
        link.request("stop", timeout_s=30, epoch=1, job="runs1", attempt=1, grace_s=0)
        assert tidied() == [names["runs"]]
        assert load(link, names["idle"])["image_id"], "and it comes again"


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        (("CUDA_VERSION=12.4.1",), "12.4"),
        (
            ("CUDA_VERSION=12.4.1", "NVIDIA_REQUIRE_CUDA=cuda>=11.0 brand=tesla,driver>=450,driver<451"),
            "11.0",
        ),
        (("NVIDIA_REQUIRE_CUDA=cuda>=12.10 brand=tesla cuda>=12.9",), "12.9"),
        (("CUDA_VERSION=12.4.1", "NVIDIA_REQUIRE_CUDA="), None),
        (("CUDA_VERSION=nonsense",), None),
        (("PATH=/bin", "odd"), None),
    ],
)
def test_an_image_reports_the_cuda_version_it_needs(variables: tuple[str, ...], wanted: str | None) -> None:
    assert required_cuda_version(variables) == wanted
