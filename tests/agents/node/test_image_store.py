"""What an image store tells of itself without being asked: when its list of images is another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.node.runtimes.podman_store import PodmanImageStore, find_store_files, is_fully_qualified


def info(root: Path, **options: object) -> str:
    return json.dumps(
        {
            "store": {
                "graphDriverName": "overlay",
                "graphRoot": str(root),
                "graphOptions": options,
                "configFile": str(root / "storage.conf"),
            }
        }
    )


def write_images(root: Path, *ids: str) -> None:
    folder = root / "overlay-images"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "images.json.new").write_text(json.dumps([{"id": each, "names": ["x"]} for each in ids]))
    (folder / "images.json.new").replace(folder / "images.json")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "own", tmp_path / "shared"


@pytest.fixture
def store(places: tuple[Path, Path]) -> PodmanImageStore:
    own, shared = places
    own.mkdir()
    write_images(shared, "bb" * 32)
    made = PodmanImageStore(lambda: info(own, **{"overlay.imagestore": str(shared)}))
    made.locate()
    return made


def test_an_unchanged_store_has_one_stamp(store: PodmanImageStore) -> None:
    assert store.fingerprint() is not None
    assert store.fingerprint() == store.fingerprint()


@pytest.mark.parametrize("change", ["own list", "shared list"])
def test_each_change_makes_another_stamp(
    store: PodmanImageStore, places: tuple[Path, Path], change: str
) -> None:
    own, shared = places
    before = store.fingerprint()
    write_images(own if change == "own list" else shared, "aa" * 32)
    assert store.fingerprint() not in (None, before)


def test_another_configuration_may_mean_other_stores(
    store: PodmanImageStore, places: tuple[Path, Path]
) -> None:
    (places[0] / "storage.conf").write_text("[storage]\n")
    assert store.fingerprint() is None
    store.locate()
    assert store.fingerprint() is not None


def test_only_listed_images_are_present(store: PodmanImageStore, places: tuple[Path, Path]) -> None:
    assert store.lists_image("bb" * 32) and store.lists_image("sha256:" + "bb" * 32)
    assert not store.lists_image("aa" * 32)
    (places[1] / "overlay-images/images.json").write_text("[{")
    assert not store.lists_image("bb" * 32)


@pytest.mark.parametrize(
    "said", ["", "no", "[]", "{}", '{"store": {"graphRoot": 1, "graphDriverName": "x"}}']
)
def test_output_that_cannot_be_parsed_is_ignored(said: str) -> None:
    store = PodmanImageStore(lambda: said)
    store.locate()
    assert store.fingerprint() is None


def test_newer_podman_lists_its_shared_stores(tmp_path: Path) -> None:
    lists = find_store_files(info(tmp_path, **{"overlay.imagestore": ["/a", "/b,/c"]}))
    assert lists is not None
    assert lists.root == json.loads(info(tmp_path))["store"]["graphRoot"]
    assert lists.images[1:] == tuple(f"/{each}/overlay-images/images.json" for each in "abc")


def test_the_configuration_names_every_shared_store(tmp_path: Path) -> None:
    (tmp_path / "storage.conf").write_text("[storage.options]\nadditionalimagestores = [\n \"/a\",\n '/b']\n")
    lists = find_store_files(info(tmp_path, **{"overlay.imagestore": "/c"}))
    assert lists is not None
    assert set(lists.images[1:]) == {f"/{each}/overlay-images/images.json" for each in "abc"}


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("localhost/fairway/tiny:latest", True),
        ("registry.example.org/team/torch@sha256:1", True),
        ("host:5000/torch", True),
        ("team/torch:2", False),
        ("torch", False),
        ("torch:2.1", False),
    ],
)
def test_short_names_resolve_by_the_registries_configuration(name: str, whole: bool) -> None:
    assert is_fully_qualified(name) is whole
