"""Upgrade of the agent: received in chunks, verified with the key of the enrolment, installed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import time
from typing import Any, Dict, List, Optional

from agents.node.errors import ENGINE_ERROR, FORBIDDEN, AgentError, invalid_spec
from agents.node.host.atomic_files import disk_full_as_error, fsync_dir, remove_file, write_atomic
from agents.node.settings import Settings
from agents.node.spec.task_spec import parse_base64, parse_integer, parse_seconds

IDENTITY, NAMESPACE = "fairway-upgrade", "fairway-node"
_VERIFY_WITHIN_S = 20.0


def digest_of(path: str) -> Optional[str]:
    """Return the SHA-256 of a file as hexadecimal digits; None when unreadable."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()
    return None


def own_digest(agent_command: List[str]) -> Optional[str]:
    """Return the digest of the running archive, from its command; None when not run from one."""
    return digest_of(agent_command[-1]) if "-I" in agent_command else None


class AgentUpgrader:
    """The verb ``upgrade``. The loader verifies the signature again before it runs a program.

    A program sent with ``confirm_within_s`` is on probation: unless it is confirmed in time, the loader rolls
    back, so that a program that does not work does not cost the node.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def receive(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Store a chunk of the program; with ``last`` and ``signature``, verify and install it.

        With ``confirm`` instead (digest of the installed program), end its probation.
        """
        target, signers = self._settings.agent_path, self._settings.allowed_signers_path
        if target is None or signers is None:
            raise AgentError(
                FORBIDDEN, "This node was enrolled without upgrades: it has no key to verify them."
            )
        if request.get("confirm") is not None:
            return self._confirm(target, request["confirm"])
        part = target + ".new"
        data = parse_base64(request, "data_b64") if request.get("data_b64") else b""
        offset = parse_integer(request, "offset")
        with disk_full_as_error(part), open(part, "r+b" if offset else "wb") as stream:
            os.fchmod(stream.fileno(), 0o644)  # programs of the agent load modules as the accounts of jobs
            stream.seek(offset)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if not request.get("last"):
            return {"size": os.stat(part).st_size}
        signature = request.get("signature")
        if not isinstance(signature, str):
            raise invalid_spec("The last chunk must have a signature.")
        write_atomic(part + ".sig", signature.encode(), mode=0o644)
        self._verify(part, signers)
        confirm_within_s = (
            None
            if request.get("confirm_within_s") is None
            else parse_seconds(request["confirm_within_s"], 0.0)
        )
        self._install(part, target, confirm_within_s)
        return {"upgraded": True}

    @staticmethod
    def _confirm(target: str, wanted: Any) -> Dict[str, Any]:
        if digest_of(target) != wanted:
            raise AgentError(FORBIDDEN, "The installed program is not the one to confirm.")
        remove_file(_trial_path(target))
        return {"confirmed": True}

    @staticmethod
    def _verify(part: str, signers: str) -> None:
        command = [
            "ssh-keygen",
            "-Y",
            "verify",
            "-f",
            signers,
            "-I",
            IDENTITY,
            "-n",
            NAMESPACE,
            "-s",
            part + ".sig",
        ]
        try:
            with open(part, "rb") as program:
                answer = subprocess.run(
                    command, stdin=program, capture_output=True, timeout=_VERIFY_WITHIN_S, check=False
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AgentError(ENGINE_ERROR, f"The signature could not be verified: {error}.") from error
        if answer.returncode != 0:
            os.unlink(part)
            raise AgentError(FORBIDDEN, "The program is not signed with the key of this node's enrolment.")

    @staticmethod
    def _install(part: str, target: str, confirm_within_s: Optional[float]) -> None:
        """Keep the current program as ``.previous`` and install the new one, signature first."""
        for ending in ("", ".sig"):
            if os.path.exists(target + ending):
                previous = target + ".previous" + ending
                if os.path.exists(previous):
                    os.unlink(previous)
                os.link(target + ending, previous)
        if confirm_within_s is None:
            remove_file(_trial_path(target))
        else:
            write_atomic(_trial_path(target), f"{int(time.time() + confirm_within_s)}\n".encode(), mode=0o644)
        # at any moment either the current or the previous program has its matching signature
        for ending in (".sig", ""):
            os.replace(part + ending, target + ending)
        fsync_dir(os.path.dirname(target))


def _trial_path(target: str) -> str:
    """Return the path of the file with the end of the probation (Unix time), which the loader reads."""
    return target + ".trial"
