"""A whole Fairway started by its own command, as a newcomer starts it."""

from __future__ import annotations

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
from typing import Self

from tests.process_environment import without_servers
from tests.standalone.waiting import READY_LINE

CHECKOUT = Path(__file__).parents[2]
START_LIMIT_S = 150
STOP_LIMIT_S = 40


class StoryPortal:
    """``manage.py up`` in a folder of its own; a context manager that leaves nothing behind."""

    def __init__(self, *options: str, **environment: str) -> None:
        # PostgreSQL's account and the jobs' accounts must pass through it, which pytest's folders forbid
        self.folder = Path(tempfile.mkdtemp(prefix="fairway-story-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.port = _free_port()
        self.url = f"http://localhost:{self.port}"
        self.options, self.environment = options, environment
        self.lines: list[str] = []
        self.took_s = 0.0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Starts it and returns when it has printed its address."""
        environment = {
            name: value for name, value in without_servers().items() if not name.startswith("FAIRWAY_")
        } | self.environment
        began = time.monotonic()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "manage.py",
                "up",
                "--data-dir",
                str(self.folder / "data"),
                "--port",
                str(self.port),
                *self.options,
            ],
            cwd=CHECKOUT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        while time.monotonic() - began < START_LIMIT_S:
            if any(READY_LINE.search(line) for line in self.lines):
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

        return data_paths.database_url(self.folder / "data")

    def tail(self, count: int = 60) -> str:
        """The end of what its processes said."""
        return "\n".join(self.lines[-count:])

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
