"""A cluster's keys and signed agent, and how they make rig nodes into nodes of it."""

from __future__ import annotations

from pathlib import Path

from agents.enrolment import EnrolmentOptions, PublicKeys, SignedAgent, enrolment_script
from agents.keys import PURPOSES, Purpose, make_keys, read_public_key, sign_agent
from agents.link import Link
from agents.ssh import Role, SshStream, SshTarget, open_ssh, open_stream
from tests.rig.node import RigNode


class RigCluster:
    """Keys in a folder, and an agent that carries their signature."""

    def __init__(self, folder: Path, agent: bytes, cluster: str = "rig") -> None:
        self.id = cluster
        self.keys: dict[Purpose, Path] = make_keys(folder, cluster)
        self.public_keys = PublicKeys(
            **{purpose: read_public_key(self.keys[purpose]) for purpose in PURPOSES}
        )
        self.agent = SignedAgent(agent, sign_agent(agent, self.keys["signing"]))

    def script(self, choices: EnrolmentOptions | None = None) -> str:
        """Gives the enrolment script, as a page would."""
        return enrolment_script(self.id, self.public_keys, self.agent, choices)

    def enrol(self, node: RigNode, choices: EnrolmentOptions | None = None) -> str:
        """Runs the real enrolment script in a root shell of the node and gives what it printed."""
        return node.execute("sh", "-s", text_in=self.script(choices)).stdout

    def target(self, node: RigNode) -> SshTarget:
        return SshTarget(node.address, "fairway", node.host_key(), node.port)

    def open(self, node: RigNode, role: Role = "control") -> Link:
        """Opens a link to the node's agent."""
        return open_ssh(self.target(node), self.key_for(role), role, cluster=self.id)

    def open_bare(self, node: RigNode, role: Role = "control") -> SshStream:
        """Opens the stream under a link, before any word was said."""
        return open_stream(self.target(node), self.key_for(role), role)

    def key_for(self, role: Role) -> Path:
        return self.keys["watch" if role == "watch" else "control"]
