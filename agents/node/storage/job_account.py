"""Access to the volumes of a job with the rights of its account, following no symbolic link."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from typing import Any, Dict, List, Optional, Sequence, Union

from agents.node.errors import ENGINE_ERROR, AgentError, invalid_spec
from agents.node.spec.task_spec import Mount, parse_integer

NO_FOLLOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
TIMEOUT_S = 12.0
_NICE = 10
_MEMORY_BYTES = 512 * 1024 * 1024


def account_fields(mount: Mount, owner: Optional[os.stat_result], fields: Dict[str, Any]) -> Dict[str, int]:
    """Return uid and gid for a separate process; empty where the agent owns everything.

    ``owner``: of the mount's folder; None where root cannot see it.
    """
    if os.geteuid() != 0:
        return {}
    uid = owner.st_uid if mount.kind == "home" and owner is not None else parse_integer(fields, "uid")
    if uid == 0:
        raise invalid_spec(f"{mount.source} belongs to root.")
    return {"uid": uid, "gid": mount.gid if mount.gid is not None else parse_integer(fields, "gid")}


def become_account(fields: Dict[str, Any], cpu_s: int) -> None:
    """Limit this process, and take the account of ``account_fields``."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    if "uid" in fields:
        os.setgroups([fields["gid"]])
        os.setgid(fields["gid"])
        os.setuid(fields["uid"])


def run_program(command: List[str], subject: str) -> Dict[str, Any]:
    """Return the JSON that the program prints; ``subject`` begins the message of an error."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()  # not waited for: a process that waits for a file server does not end
        message = f"{subject} could not be listed within {TIMEOUT_S:g} s."
        raise AgentError(ENGINE_ERROR, message) from error
    if process.returncode != 0:
        said = err.decode(errors="replace").strip()[-300:]
        raise AgentError(ENGINE_ERROR, f"{subject} could not be listed: {said}")
    answer: Dict[str, Any] = json.loads(out)
    return answer


def open_beneath(folder: str, parts: Sequence[Union[str, bytes]], flags: int = 0) -> int:
    """Open a path below ``folder``; all parts but the last are directories, and none is a link."""
    descriptor = os.open(folder, NO_FOLLOW | os.O_DIRECTORY)
    for number, part in enumerate(parts, 1):
        try:
            inner = os.open(
                part, NO_FOLLOW | (flags if number == len(parts) else os.O_DIRECTORY), dir_fd=descriptor
            )
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor
