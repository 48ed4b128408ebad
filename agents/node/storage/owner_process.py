"""Runs a program of the agent on the files of a user: a separate process with that account's rights and limits."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from typing import Any, Dict, List

from agents.node.errors import ENGINE_ERROR, AgentError, invalid_spec
from agents.node.spec.task_spec import Mount, parse_integer

TIMEOUT_S = 12.0
_NICE = 10
_MEMORY_BYTES, _CPU_S = 512 * 1024 * 1024, 10


def account_fields(mount: Mount, folder: str, fields: Dict[str, Any]) -> Dict[str, int]:
    """Return the account that owns the files of a mount; empty where the agent does not run as root."""
    if os.geteuid() != 0:
        return {}
    uid = parse_integer(fields, "uid")
    if mount.kind == "home":
        try:
            uid = os.stat(folder).st_uid
        except OSError:  # such as a share that hides folders from root
            pass
    if uid == 0:
        raise invalid_spec(f"{mount.source} belongs to root.")
    return {"uid": uid, "gid": mount.gid if mount.gid is not None else parse_integer(fields, "gid")}


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


def limit_process(fields: Dict[str, Any]) -> None:
    """Apply the limits to this process, then change to the account of ``fields``."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    if "uid" in fields:
        os.setgroups([fields["gid"]])
        os.setgid(fields["gid"])
        os.setuid(fields["uid"])
