"""systemd as the first process of namespaces on this machine, with the shipped units and servers of its own.

Nothing of this machine can be changed from there: the root file system is read-only, `/etc` is an overlay, `/run`,
`/tmp`, `/dev/shm`, `/var` and `/opt` are empty, and no unit of this machine is loaded. (`RemoveIPC=` removes
the shared memory of its account, which is also that of the PostgreSQL of other tests.)
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from portal.bootstrap.frontend import build_frontend
from portal.standalone.servers.binaries import find_postgres, find_valkey
from tests.standalone.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
UNITS = ROOT / "deploy" / "systemd"
CGROUPS = Path("/sys/fs/cgroup")
HIERARCHIES = ("systemd", "unified", "pids", "memory", "cpu", "cpuacct")
PROGRAMS = ("systemctl", "unshare", "nsenter", "ip", "setpriv", "mount")
SYSTEMD = Path("/lib/systemd/systemd")
COPIED = (
    *("manage.py", "requirements.lock", "package.json", "package-lock.json"),
    *("portal", "scheduler", "agents", "templates", "static", "deploy", "docs"),
)

BOOT = """#!/bin/sh
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {cgroups}
mkdir {cgroups}/systemd {cgroups}/unified
mount -t cgroup -o none,name=systemd,xattr cgroup {cgroups}/systemd
mount -t cgroup2 none {cgroups}/unified
for controller in pids memory cpu cpuacct; do
  mkdir {cgroups}/$controller
  mount -t cgroup -o $controller cgroup {cgroups}/$controller || rmdir {cgroups}/$controller
done
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/rig/etc /run/rig/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/rig/etc,workdir=/run/rig/work /etc
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/python
mount --bind {base} /opt/python
mkdir -p /etc/systemd/rig /etc/systemd/system
mount -t tmpfs -o mode=755 tmpfs /etc/systemd/system
cp -a {folder}/opt /run/rig/source
cp -a {folder}/settings {folder}/shipped /run/rig/
cp -r {folder}/units/. /etc/systemd/rig/
cp {folder}/valkey.conf /etc/valkey-rig.conf
mount -t tmpfs -o mode=755 tmpfs /var
mkdir -p /var/lib/rig-postgres /var/log /var/tmp /run/postgresql
chmod 1777 /var/tmp
ln -s /run /var/run
chown postgres /var/lib/rig-postgres /run/postgresql
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -o remount,bind,ro /
mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /sys
mount --make-rshared /
ip link set lo up
{install}
cd /
export container=rig SYSTEMD_UNIT_PATH=/etc/systemd/rig:/etc/systemd/system
export SYSTEMD_GENERATOR_PATH= SYSTEMD_ENVIRONMENT_GENERATOR_PATH=
exec {systemd} --system --unit=rig.target --log-target=null --show-status=false
"""

ENVIRONMENT = """mkdir -p /opt/fairway/.venv/lib/{python}/site-packages
cp -a /run/rig/source/fairway/.venv/. /opt/fairway/.venv/
mount --bind {packages} /opt/fairway/.venv/lib/{python}/site-packages
"""
"""What `manage.py build` would download."""
INSTALL = (
    "cp -a /run/rig/source/. /opt/\n"
    + ENVIRONMENT
    + """mkdir /etc/fairway
cp /run/rig/settings/* /etc/fairway/
chmod 600 /etc/fairway/*
cp /run/rig/shipped/* /etc/systemd/system/
systemd-sysusers /run/rig/shipped/fairway.sysusers.conf
cd /opt/fairway
env -i PATH=$PATH LD_LIBRARY_PATH=/opt/python/lib FAIRWAY_NO_DEV=1 FAIRWAY_DATA_DIR=/run/rig/none \\
  .venv/bin/python manage.py build
"""
)

RIG_UNITS = {
    "rig.target": "[Unit]\nAllowIsolate=yes\nWants=rig-postgres.service rig-valkey.service dbus.socket\n",
    **{
        name: f"[Unit]\nDescription={name}\nDefaultDependencies=no\n"
        for name in ("sysinit.target", "basic.target", "shutdown.target", "network-online.target")
    },
    "multi-user.target": "[Unit]\nDescription=multi-user\n",
    "service.d/log.conf": "[Service]\nStandardOutput=append:/run/rig/%N.log\nStandardError=inherit\n"
    "Environment=LD_LIBRARY_PATH=/opt/python/lib\n",
    "rig-postgres.service": "[Service]\nUser=postgres\nType=exec\n"
    "ExecStartPre={bin}/initdb --no-sync --auth-local=trust --auth-host=scram-sha-256 -D /var/lib/rig-postgres/data\n"
    "ExecStart={bin}/postgres -D /var/lib/rig-postgres/data -c unix_socket_directories=/run/postgresql\n",
    "rig-valkey.service": "[Service]\nType=exec\nUser=nobody\nExecStart={valkey} /etc/valkey-rig.conf\n",
}


def missing_requirement() -> str:
    """Return why systemd cannot be booted here; blank if it can."""
    if os.geteuid() != 0:
        return "systemd is started by root only"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent or not SYSTEMD.exists():
        return f"{', '.join(absent) or 'systemd'} is missing (apt-get install systemd iproute2 util-linux)"
    if not all((CGROUPS / name).is_dir() for name in HIERARCHIES[:2]):
        return "there is no hierarchy of cgroups for systemd here"
    return ""


def _python() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


class SystemdMachine(contextlib.AbstractContextManager["SystemdMachine"]):
    """A running systemd. `folder` keeps what it copies. A ``bare`` one has Fairway only as a repository."""

    def __init__(self, folder: Path, *, bare: bool = False) -> None:
        self._folder = folder
        self._bare = bare
        self.passwords = {name: secrets.token_hex(16) for name in ("owner", "services", "valkey")}

    def __enter__(self) -> SystemdMachine:
        self._write_files()
        self._groups = [
            CGROUPS / name / f"rig-{os.getpid()}" for name in HIERARCHIES if (CGROUPS / name).is_dir()
        ]
        for group in self._groups:
            group.mkdir()
        try:
            self._process = subprocess.Popen(
                ["unshare", "--fork", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--kill-child",
                 "sh", self._folder / "boot.sh"],
                preexec_fn=self._enter_groups, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=(self._folder / "boot.log").open("wb"),
            )  # fmt: skip
            assert eventually(self._answers, 60), (self._folder / "boot.log").read_text()
            if not self._bare:
                self._create_roles()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, AttributeError):
            os.kill(self._init, signal.SIGKILL)
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait(30)

        def removed() -> bool:
            for group in self._groups:
                for below in sorted(group.rglob("*/"), reverse=True):
                    with contextlib.suppress(OSError):
                        below.rmdir()
                with contextlib.suppress(OSError):
                    group.rmdir()
            return not any(group.exists() for group in self._groups)

        eventually(removed, 20)

    def run(
        self,
        *words: str,
        check: bool = True,
        within_s: float = 60,
        account: str = "",
        text: str | None = None,
    ) -> str:
        """Run a command there, with ``text`` as its input; return what it prints."""
        as_account = (
            ("setpriv", f"--reuid={account}", f"--regid={account}", "--clear-groups") if account else ()
        )
        done = subprocess.run(
            ["nsenter", "--target", str(self._init), "--all", *as_account, *words],
            capture_output=True, text=True, timeout=within_s, check=False, **({"input": text} if text else {}),
        )  # fmt: skip
        assert not check or done.returncode == 0, (
            words,
            done.stdout[-2000:],
            done.stderr[-2000:],
            self.log(),
        )
        return done.stdout

    def log(self) -> str:
        """Return the last lines of every unit."""
        return self.run("sh", "-c", "tail -n 15 /run/rig/*.log", check=False)

    def active(self, unit: str) -> str:
        return self.run("systemctl", "is-active", unit, check=False).strip()

    def main_pid(self, unit: str) -> int:
        """Return the pid there of the main process of a unit."""
        return int(self.run("systemctl", "show", "--property=MainPID", "--value", unit))

    def is_ready(self) -> bool:
        """Return whether /readyz answers 200 through the gateway."""
        answer = self.run(
            "curl", "--silent", "--max-time", "3", "--output", "/dev/null", "--write-out", "%{http_code}",
            "--header", "Host: portal.example.org", "--header", "X-Forwarded-Proto: https",
            "http://127.0.0.1:8000/readyz", check=False,
        )  # fmt: skip
        return answer == "200"

    @property
    def _init(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def _answers(self) -> bool:
        """Return whether systemd and its PostgreSQL answer."""
        if self._process.poll() is not None:
            return True
        with contextlib.suppress(IndexError, OSError):
            return "accepting" in self.run(
                find_postgres().program("pg_isready"), "-h", "/run/postgresql", check=False
            )
        return False

    def _enter_groups(self) -> None:
        for group in self._groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def _create_roles(self) -> None:
        statements = (
            f"CREATE ROLE fairway LOGIN CREATEROLE PASSWORD '{self.passwords['owner']}'",
            "CREATE DATABASE fairway OWNER fairway",
        )
        psql = (find_postgres().program("psql"), "-h", "/run/postgresql", "-U", "postgres", "-c")
        for statement in statements:
            self.run(*psql, statement, account="postgres")

    def with_passwords(self, text: str) -> str:
        """Return a shipped file of settings with the passwords of the servers."""
        values = {
            "postgres://fairway:PASSWORD": f"postgres://fairway:{self.passwords['owner']}",
            "postgres://fairway_app:PASSWORD": f"postgres://fairway_app:{self.passwords['services']}",
            "redis://:PASSWORD": f"redis://:{self.passwords['valkey']}",
        }
        for old, new in values.items():
            text = text.replace(old, new)
        return text

    def _write_files(self) -> None:
        checkout = self._folder / "opt" / "fairway"
        checkout.mkdir(parents=True)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
                )
            else:
                shutil.copy2(ROOT / name, checkout / name)
        environment = checkout / ".venv"
        (environment / "bin").mkdir(parents=True)
        (environment / "bin" / "python").symlink_to(f"/opt/python/bin/{_python()}")
        (environment / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
        shutil.copy(ROOT / ".venv" / "fairway-locks.txt", environment)
        if self._bare:
            identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
            for words in ("init --quiet", "add --all -- :!.venv", "commit --quiet -m source"):
                subprocess.run(["git", *identity, *words.split()], cwd=checkout, check=True)
        units = self._folder / "units"
        shutil.copytree(UNITS, self._folder / "shipped")
        units.mkdir()
        packages = (ROOT / ".venv" / "lib" / _python() / "site-packages").resolve()
        valkey = str(find_valkey().program.resolve()).replace(
            str(packages), f"/opt/fairway/.venv/lib/{_python()}/site-packages"
        )
        for name in ("dbus.socket", "dbus.service"):  # systemd-run needs it
            shutil.copy(SYSTEMD.parent / "system" / name, units)
        for name, text in RIG_UNITS.items():
            (units / name).parent.mkdir(exist_ok=True)
            (units / name).write_text(
                text.replace("{bin}", str(find_postgres().folder)).replace("{valkey}", valkey)
            )
        settings = self._folder / "settings"
        settings.mkdir()
        for name in ("fairway.env", "owner.env"):
            text = self.with_passwords((UNITS / name).read_text())
            assert not re.search(r"^[^#]*PASSWORD", text, re.MULTILINE)
            (settings / name).write_text(text)
        (self._folder / "valkey.conf").write_text(
            f'port 6379\nbind 127.0.0.1\nsave ""\nrequirepass {self.passwords["valkey"]}\n'
        )
        places = {
            "cgroups": CGROUPS,
            "folder": self._folder,
            "python": _python(),
            "packages": packages,
            "systemd": SYSTEMD,
            "base": sys.base_prefix,
        }
        self.environment_script = ENVIRONMENT.format(**places)
        install = "" if self._bare else INSTALL.format(**places)
        (self._folder / "boot.sh").write_text(BOOT.format(**places, install=install))


@contextlib.contextmanager
def running_machine(*, bare: bool = False) -> Iterator[SystemdMachine]:
    """A running machine in a folder of its own; `SystemdMachine` says what ``bare`` means."""
    build_frontend(ROOT)
    folder = Path(tempfile.mkdtemp(prefix="fairway-systemd-"))
    folder.chmod(0o755)
    try:
        with SystemdMachine(folder, bare=bare) as running:
            yield running
    finally:
        shutil.rmtree(folder)
