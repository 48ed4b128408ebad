"""What the stories need: real nodes, a whole portal, and a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.chromium import chromium
from tests.rig.cluster import RigCluster  # noqa: F401 - part of the rig's fixtures
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.rig.plugin import lab_image, tiny_image  # noqa: F401
from tests.rig.rig import Rig
from tests.stories.operator_client import Operator
from tests.stories.portal import StoryPortal


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A person's browser."""
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def portal() -> Iterator[StoryPortal]:
    """A fresh Fairway without a node."""
    with StoryPortal("--no-local-node") as started:
        yield started


@pytest.fixture(scope="module")
def lab_rig(lab_image: RigImage) -> Iterator[Rig]:  # noqa: F811
    """Two machines with sshd, podman and the JupyterLab image, not yet nodes of anything."""
    with Rig(2, image_stores=[lab_image.store]) as made:
        yield made


@pytest.fixture(scope="module")
def operator(tiny_image: RigImage) -> Iterator[tuple[Operator, RigNode]]:  # noqa: F811
    """The administrator of a fresh Fairway with one machine over SSH."""
    with Rig(1, image_stores=[tiny_image.store]) as rig, StoryPortal("--no-local-node") as portal:
        made = Operator(portal)
        made.add_node(rig.nodes[0], "node1")
        made.add_environment(tiny_image.name)
        yield made, rig.nodes[0]
