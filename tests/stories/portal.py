"""A whole Fairway started by its own command, as a newcomer starts it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from portal.standalone.processes.orphan_processes import read_records
from tests.process_environment import without_servers
from tests.standalone.waiting import READY_LINE

CHECKOUT = Path(__file__).parents[2]
START_LIMIT_S = 150
STOP_LIMIT_S = 40


class StoryPortal:
    """``manage.py up`` in a folder of its own; a context manager that leaves nothing behind.

    `checkout` may change between a stop and the next start, as in an upgrade. An `account` has no privileges.
    """

    def __init__(
        self,
        *options: str,
        checkout: Path = CHECKOUT,
        account: str | None = None,
        **environment: str,
    ) -> None:
        # PostgreSQL's account and the jobs' accounts must pass through it, which pytest's folders forbid
        self.folder = Path(tempfile.mkdtemp(prefix="fairway-story-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.port = free_port()
        self.url = f"http://localhost:{self.port}"
        self.data = self.folder / "data"
        self.checkout, self.account = checkout, account
        if account is not None:
            self.data.mkdir(mode=0o700)
            shutil.chown(self.data, account, account)
        self.options, self.environment = options, environment
        self.lines: list[str] = []
        self.took_s = 0.0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Stops it and removes its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Starts it and returns when it has printed its address."""
        began, printed = time.monotonic(), len(self.lines)
        self._process = subprocess.Popen(
            [*self._command("up"), "--data-dir", str(self.data), "--port", str(self.port), *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **self._place(),
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        while time.monotonic() - began < START_LIMIT_S:
            if any(READY_LINE.search(line) for line in self.lines[printed:]):
                self.took_s = time.monotonic() - began
                time.sleep(0.2)
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError("it did not start:\n" + self.tail())

    def stop(self) -> None:
        """One Ctrl-C."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise

    def kill(self) -> None:
        """Kills every process, as when the machine fails."""
        assert self._process is not None
        children = read_records(self.data / "run" / "children.json")
        os.kill(self._process.pid, signal.SIGKILL)  # first, since it starts its children again
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        self._process.wait(STOP_LIMIT_S)

    def manage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs another command of the same installation."""
        return subprocess.run(
            self._command(*arguments),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            **self._place(),
        )

    def _command(self, *arguments: str) -> list[str]:
        own = self.checkout / ".venv" / "bin" / "python"
        python = sys.executable if self.checkout == CHECKOUT else str(own)
        return [python, "manage.py", *arguments]

    def _place(self) -> dict[str, Any]:
        """Where, with which variables and under which account a command runs."""
        environment = {
            name: value for name, value in without_servers().items() if not name.startswith("FAIRWAY_")
        } | {"FAIRWAY_DATA_DIR": str(self.data), **self.environment}
        place: dict[str, Any] = {"cwd": self.checkout}
        if self.account is not None:
            place |= {"user": self.account, "group": self.account, "extra_groups": [], "umask": 0o077}
            inherited = ("LANG", "TZ", "FAIRWAY_DATA_DIR", *self.environment)
            environment = {name: environment[name] for name in inherited if name in environment}
            environment |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.folder)}
            libraries = (self.checkout / ".venv" / "bin" / "python").resolve().parent.parent / "lib"
            environment |= {"LD_LIBRARY_PATH": str(libraries)}  # of a copied Python
        return place | {"env": environment}

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def sign_in_link(self) -> str:
        """The newest one-time link that was printed."""
        links = re.findall(re.escape(self.url) + r"/sign-in/link/#[\w-]+", "\n".join(self.lines))
        return str(links[-1])

    @property
    def database_url(self) -> str:
        """For looking into the record."""
        from portal.config import data_paths

        return data_paths.database_url(self.data)

    def tail(self, count: int = 60) -> str:
        """The end of what its processes said."""
        return "\n".join(self.lines[-count:])

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
