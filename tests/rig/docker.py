"""Docker on a rig node: Debian's daemon in the node's own namespaces, with its data on the node's disk."""

from __future__ import annotations

import subprocess
import time

from tests.rig.images import RigImage
from tests.rig.node import CREATE_FLAGS, RigNode

DATA_ROOT = "/var/lib/containers/docker"
SOCKET = "/run/docker.sock"
_UP_WITHIN_S = 20
_LOAD_LIMIT_S = 120
_DAEMON = (
    "dockerd", "--data-root", DATA_ROOT, "--host", f"unix://{SOCKET}", "--bridge", "none",
    "--exec-opt", "native.cgroupdriver=cgroupfs",
)  # fmt: skip


def start_docker(node: RigNode, *images: RigImage) -> None:
    """Starts the daemon, loads the images, and lets the node's agent know this engine from the next enrolment on."""
    node.execute("sh", "-c", f"exec {' '.join(_DAEMON)} > /var/log/dockerd.log 2>&1 < /dev/null &")
    deadline_s = time.monotonic() + _UP_WITHIN_S
    while node.execute("docker", "version", check=False).returncode != 0:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{node.name}: dockerd: {node.execute('tail', '/var/log/dockerd.log').stdout}")
        time.sleep(0.05)
    for image in images:
        with image.archive.open("rb") as archive:
            command = [*node.console(), "docker", "load"]
            subprocess.run(command, stdin=archive, capture_output=True, timeout=_LOAD_LIMIT_S, check=True)
    node.set_local(runtimes=[{"kind": "docker", "create_flags": list(CREATE_FLAGS)}])


def docker(node: RigNode, *arguments: str, check: bool = True) -> str:
    """Runs the node's docker and gives what it printed."""
    return node.execute("docker", *arguments, check=check).stdout
