"""What the tests of the agents share: keys, an sshd on the loopback address, rig nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.keys import PURPOSES, Purpose, make_keys, read_public_key
from agents.ssh import SshTarget
from tests.rig.fake_agent import echo_agent
from tests.rig.loopback import LoopbackSshd, loopback_sshd
from tests.rig.needs import missing_for_loopback
from tests.rig.plugin import lab_image, make_rig, rig, rig_cluster, rig_nodes, tiny_image

__all__ = ["lab_image", "make_rig", "rig", "rig_cluster", "rig_nodes", "tiny_image"]


@pytest.fixture(scope="session")
def key_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[Purpose, Path]:
    return make_keys(tmp_path_factory.mktemp("keys"), "rig")


@pytest.fixture
def sshd(tmp_path: Path, key_pairs: dict[Purpose, Path]) -> Iterator[LoopbackSshd]:
    """An sshd that runs the echo agent."""
    reason = missing_for_loopback()
    if reason is not None:
        pytest.skip(reason)
    public = {purpose: read_public_key(key_pairs[purpose]) for purpose in PURPOSES}
    with loopback_sshd(tmp_path, echo_agent(), public) as running:
        yield running


@pytest.fixture
def target(sshd: LoopbackSshd) -> SshTarget:
    return SshTarget(sshd.host, sshd.account, sshd.host_key, sshd.port)
