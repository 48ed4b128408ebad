"""The account of the servers: `fairway` when root starts them, since PostgreSQL refuses root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

from portal.standalone.errors import StartError

ACCOUNT = "fairway"


def service_account() -> str | None:
    """Return `fairway`, created if missing, when running as root; None: the current account."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(ACCOUNT)
    except KeyError:
        _create_account()
    return ACCOUNT


def account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def set_owner(path: Path, account: str | None, mode: int) -> None:
    """Set the mode and, if an account is given, the owner of a file or folder. Raise OSError for a link.

    The account may own the folder around it, and could put a link to a file of root there.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if account is not None:
            entry = pwd.getpwnam(account)
            os.fchown(handle, entry.pw_uid, entry.pw_gid)
        os.fchmod(handle, mode)
    finally:
        os.close(handle)


def check_traversable(path: Path, account: str | None) -> None:
    """Raise StartError when a parent of the data folder is not traversable for the account."""
    if account is None:
        return
    entry = pwd.getpwnam(account)
    real = path.resolve()
    for folder in [real, *real.parents]:
        status = folder.stat()
        bit = 0o100 if status.st_uid == entry.pw_uid else 0o010 if status.st_gid == entry.pw_gid else 0o001
        if not status.st_mode & bit:
            raise StartError(
                f"PostgreSQL does not run as root, and its account {account} has no access to {folder}. "
                f"Choose another folder with --data-dir, or grant access: chmod a+x {folder}"
            )


def _create_account() -> None:
    tool = shutil.which("useradd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tool is None:
        raise StartError(
            f"PostgreSQL does not run as root, there is no account {ACCOUNT}, and useradd is not installed. "
            f"Create a system account {ACCOUNT}, or start as an ordinary user."
        )
    shell = "/usr/sbin/nologin" if Path("/usr/sbin/nologin").exists() else "/bin/false"
    command = [tool, "--system", "--user-group", "--no-create-home", "--home-dir", "/var/lib/fairway"]
    done = subprocess.run(
        [*command, "--shell", shell, ACCOUNT], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode not in (0, 9):  # 9: it was created concurrently
        raise StartError(f"The account {ACCOUNT} could not be created: {done.stderr.strip()}")
