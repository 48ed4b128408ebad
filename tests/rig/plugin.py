"""Fixtures of the rig for any test that needs real nodes; import them into the conftest beside the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.agent_program import agent_program
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage, rig_image
from tests.rig.needs import missing_for_rig
from tests.rig.node import RigNode
from tests.rig.rig import Rig

MakeRig = Callable[..., Rig]


@pytest.fixture(scope="session")
def tiny_image() -> RigImage:
    """A small image with a shell and Python."""
    _need_rig()
    return rig_image("tiny")


@pytest.fixture(scope="session")
def lab_image() -> RigImage:
    """The JupyterLab image of deploy/images."""
    _need_rig()
    return rig_image("jupyterlab")


@pytest.fixture(scope="session")
def rig_cluster(tmp_path_factory: pytest.TempPathFactory) -> RigCluster:
    """A cluster's keys with the real agent, signed by them."""
    return RigCluster(tmp_path_factory.mktemp("cluster-keys"), agent_program().read_bytes())


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Makes rigs that end with the test; for tests that break their nodes. A node takes about 0.1 s."""
    _need_rig()
    made: list[Rig] = []

    def make(nodes: int = 1, **options: object) -> Rig:
        rig = Rig(nodes, **options)  # type: ignore[arg-type]
        made.append(rig)
        return rig.up()

    yield make
    for rig in made:
        rig.down()


@pytest.fixture(scope="session")
def rig(tiny_image: RigImage) -> Iterator[Rig]:
    """Two nodes with the tiny image, not enrolled; shared, so tests leave them as they found them."""
    with Rig(2, image_stores=[tiny_image.store]) as made:
        yield made


@pytest.fixture(scope="session")
def rig_nodes(rig: Rig, rig_cluster: RigCluster) -> list[RigNode]:
    """Two enrolled nodes with podman, the tiny image and four pretend GPUs each; shared."""
    for node in rig.nodes:
        rig_cluster.enrol(node)
    return rig.nodes


def _need_rig() -> None:
    reason = missing_for_rig()
    if reason is not None:
        pytest.skip(reason)
