"""The code of a task: an uploaded archive, which the portal sent before the start."""

from __future__ import annotations

import os
from typing import Any, List, Tuple

from agents.node.errors import CODE_MISSING, CODE_REFUSED, AgentError
from agents.node.host.atomic_files import file_sha256, make_folder, remove_file
from agents.node.runtimes import ContainerConfig
from agents.node.storage.archives import ArchiveError, run_unpacker
from agents.node.storage.directories import NodeDirectories


def unpack_code(
    command: List[str], directories: NodeDirectories, order: ContainerConfig, ids: Tuple[Any, Any]
) -> None:
    """Unpack the archive of a task, if it has one, as its account. Raise ``code_missing`` or ``code_refused``.

    ``ids``: uid and gid; None where the agent owns everything.
    """
    code, (uid, gid) = order.spec.code_archive, ids
    if code is None:
        return
    path = os.path.join(directories.uploads_dir, code.sha256)
    folder = order.mount_sources[code.target] if code.target else os.path.join(order.task_dir, "tmp", "code")
    account = {} if uid is None else {"uid": uid, "gid": gid}
    make_folder(folder, 0o700)
    if account:
        os.chown(folder, uid, gid, follow_symlinks=False)
    try:
        if file_sha256(path) != code.sha256:
            remove_file(path)
            raise AgentError(CODE_MISSING, "The archive of its code is incomplete on this node.")
        with open(path, "rb") as archive:
            run_unpacker(command, archive, code.limit_mib, folder, **account)
    except FileNotFoundError as error:
        raise AgentError(CODE_MISSING, "The archive of its code is not on this node.") from error
    except ArchiveError as error:
        raise AgentError(CODE_REFUSED, f"The code was not unpacked: {error}") from error
