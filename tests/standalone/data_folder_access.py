"""Who may access what in the data folder of a running installation, entry by entry."""

from __future__ import annotations

import os
import pwd
import re
import stat
from pathlib import Path

OURS, SERVERS, JOB = "ours", "servers", "job"
TABLE = (
    # path below the data folder; owner; modes of folders, and of files and sockets (None: there is none)
    (r"", OURS, {0o711}, None),
    (r"secret_key", OURS, None, {0o400}),
    (r"original", OURS, None, {0o600}),
    (r"keys", OURS, {0o700}, None),
    (r"keys/(control|watch|tunnel|signing)_ed25519", OURS, None, {0o600}),
    (r"keys/(control|watch|tunnel|signing)_ed25519\.pub", OURS, None, {0o644}),
    (r"run", OURS, {0o711}, None),
    (r"run/sockets", SERVERS, {0o700}, None),
    (r"run/sockets/(web|tracking)\.sock", OURS, None, {0o600}),
    (r"run/sockets/(valkey\.sock|\.s\.PGSQL\.5432(\.lock)?)", SERVERS, None, {0o700, 0o600}),
    (r"run/(?!sockets/).+", OURS, {0o700}, {0o600}),
    (r"(logs|artifacts)(/.+)?", OURS, {0o700}, {0o600}),
    (r"(postgres|valkey)(/.+)?", SERVERS, {0o700}, {0o600}),
    (r"(servers|environments)(/.+)?", OURS, {0o755}, {0o644, 0o755}),
    (r"agent", OURS, {0o711}, None),
    (r"agent/agent\.pyz(\.sig)?", OURS, None, {0o644}),
    (r"agent/[a-z0-9]+\.json", OURS, None, {0o600}),
    (r"demo/data(/.+)?", OURS, {0o755}, {0o644}),
    (r"homes|node|demo(/[a-z0-9-]+(/homes)?)?", OURS, {0o711}, None),
    (r"(node|demo/[a-z0-9-]+)/[a-z_]+\.json", OURS, None, {0o600}),
    (r"(homes|demo/[a-z0-9-]+/homes)/[a-z0-9-]+", JOB, {0o700}, None),
    (r"STATE|STATE/tasks(/[^/]+)?|STATE/scratch", OURS, {0o711}, None),
    (r"STATE/tasks/[^/]+/(secrets|tmp)", JOB, {0o700}, None),
    (r"STATE/tasks/[^/]+/secrets/.+", JOB, None, {0o600}),
    (r"STATE/tasks/[^/]+/(passwd|hosts)", OURS, None, {0o644}),
    (r"STATE/tasks/[^/]+/(checkpoint|progress|metric|code)", JOB, None, {0o600}),
    (r"STATE/tasks/[^/]+/[^/]+", OURS, None, {0o600}),
    (r"STATE/(locks|uploads)", OURS, {0o700}, None),
    (r"STATE/(locks|uploads)/.+|STATE/[^/]+", OURS, {0o700}, {0o600}),
)  # fmt: skip
"""The first row that matches the whole path counts. Jobs choose the modes inside their own private folders."""
ROWS = [(re.compile(path.replace("STATE", "(node|demo/[a-z0-9-]+)/state")), *rest) for path, *rest in TABLE]
JOBS_OWN = re.compile(r"(homes|demo/[a-z0-9-]+/homes)/[^/]+|.+/state/tasks/[^/]+/tmp")


def wrong_access(data: Path, account: str | None) -> list[str]:
    """Return a line for each entry whose owner or mode differs from the table. ``account``: of the servers."""
    servers = pwd.getpwnam(account).pw_uid if account else os.geteuid()
    owners = {OURS: {os.geteuid()}, SERVERS: {servers}}
    wrong = []
    paths = [data]
    while paths:
        path = paths.pop()
        name = "" if path == data else str(path.relative_to(data))
        try:
            facts = path.lstat()
            inside = (
                list(path.iterdir()) if stat.S_ISDIR(facts.st_mode) and not JOBS_OWN.fullmatch(name) else []
            )
        except FileNotFoundError:
            continue  # written by a running process
        paths += inside
        if stat.S_ISLNK(facts.st_mode):
            continue
        row = next((rest for pattern, *rest in ROWS if pattern.fullmatch(name)), None)
        if row is None:
            wrong.append(f"{name} is not in the table")
            continue
        owner, folders, files = row
        modes = folders if stat.S_ISDIR(facts.st_mode) else files
        if name in ("", "run") and account is None:
            modes = {0o700}  # no other account needs to pass
        allowed = owners.get(owner, {facts.st_uid} - {0} if account else owners[OURS])
        if facts.st_uid not in allowed or modes is None or stat.S_IMODE(facts.st_mode) not in modes:
            wrong.append(f"{stat.filemode(facts.st_mode)} {facts.st_uid} {name}")
    return wrong


def make_as_before(data: Path) -> None:
    """Give the folder the modes that it got from the umasks 022 and 077 before every mode was explicit."""
    for name, mode in (("homes", 0o700), ("environments", 0o700), ("artifacts", 0o755), ("demo", 0o700)):
        if (data / name).exists():
            (data / name).chmod(mode)
    for path in [*(data / "artifacts").rglob("*"), *(data / "logs").rglob("*"), *(data / "run").glob("*.d*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    for path in (data / "demo").glob("*/*"):
        if path.is_dir():
            path.chmod(0o700)
    (data / "keys").chmod(0o755)
