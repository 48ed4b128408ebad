"""Rootless podman on a rig node: what systemd and an administrator give the account, and commands run as it."""

from __future__ import annotations

import subprocess

from agents.enrolment import EnrolmentOptions
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.rig.node import SEARCH_PATH, RigNode

ACCOUNT = "fairway"
HOME = "/var/lib/fairway-node/home"
_LOAD_LIMIT_S = 120


def enrol_rootless(
    cluster: RigCluster, node: RigNode, image: RigImage, choices: EnrolmentOptions | None = None
) -> None:
    """Enrols the node with rootless podman and loads an image into the account's own store."""
    cluster.enrol(node, choices or EnrolmentOptions("rootless"))
    node.execute("install", "-d", "-o", ACCOUNT, "-m", "700", _runtime_folder(node))  # as logind makes it
    with image.archive.open("rb") as archive:
        command = [*node.console(), *_account(node), "podman", "load", "--quiet"]
        subprocess.run(command, stdin=archive, capture_output=True, timeout=_LOAD_LIMIT_S, check=True)


def as_account(node: RigNode, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command as the agent's account, with the variables that the agent has."""
    return node.execute(*_account(node), *command, check=check)


def _account(node: RigNode) -> list[str]:
    variables = (f"HOME={HOME}", f"XDG_RUNTIME_DIR={_runtime_folder(node)}", f"PATH={SEARCH_PATH}")
    words = ("setpriv", "--reuid", ACCOUNT, "--regid", ACCOUNT, "--init-groups", "env", "-i", "-C", HOME)
    return [*words, *variables]


def in_namespace(node: RigNode, *command: str, check: bool = True) -> str:
    """Runs a command in the network namespace through which podman routes the account's containers."""
    return as_account(node, "podman", "unshare", "--rootless-netns", *command, check=check).stdout


def namespaces(node: RigNode) -> list[str]:
    """The namespaces of that kind which are there: one at most."""
    listed = node.execute("ls", f"{_runtime_folder(node)}/netns", check=False).stdout.split()
    return [name for name in listed if name.startswith("rootless-netns")]


def _runtime_folder(node: RigNode) -> str:
    uid = node.execute("id", "--user", ACCOUNT).stdout.strip()
    return f"/run/user/{uid}"
