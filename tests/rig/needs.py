"""What this machine lacks for the rig, as sentences a person can act on."""

from __future__ import annotations

import functools
import shutil
import subprocess

from portal.standalone.testing_requirements import SYSTEM_PATH, missing_requirements, skip_reason


def find_tool(name: str) -> str | None:
    """Gives the path of a tool, looking in the administrator's folders too."""
    return shutil.which(name, path=SYSTEM_PATH)


@functools.cache
def missing_for_rig() -> str | None:
    """Says why rig nodes cannot be made here and how to change that, or gives None when they can."""
    lacking = missing_requirements("rig")
    if lacking:
        return skip_reason("rig", lacking)
    trial = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "true"],
        capture_output=True,
        text=True,
        timeout=10,
    )
    if trial.returncode != 0:
        return f"rig tests: this kernel or container refuses namespaces ({trial.stderr.strip()})"
    return None


def missing_for_loopback() -> str | None:
    """Says why an sshd of our own on the loopback address cannot run, or gives None when it can."""
    if all(map(find_tool, ("sshd", "ssh", "ssh-keygen"))):
        return None
    return "tests over SSH: sshd, ssh or ssh-keygen is missing; apt-get install openssh-server openssh-client"
