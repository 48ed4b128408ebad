"""Link to an agent on this machine, over pipes to a child process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from agents.link import HELLO_TIMEOUT_S, Link
from agents.wire.fields import clean_text

_EXIT_TIMEOUT_S = 5.0
_INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR")


def open_local(
    pyz: Path | str,
    role: str,
    settings: Path | str,
    *,
    cluster: str,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    hello_timeout_s: float = HELLO_TIMEOUT_S,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
) -> Link:
    """Start the agent and wait for its hello. The child has its own session and a clean environment."""
    clean = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    child = subprocess.Popen(
        [python, "-I", str(pyz), role, "--settings", str(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**clean, **(environment or {})},
    )
    stdin, stdout = cast(IO[bytes], child.stdin), cast(IO[bytes], child.stdout)
    last_words = _StderrTail(cast(IO[bytes], child.stderr))

    def close_streams() -> None:
        with contextlib.suppress(OSError):
            stdin.close()  # the agent exits at the end of its input
        try:
            child.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        stdout.close()

    link = Link(
        stdout,
        stdin,
        role=role,
        cluster=cluster,
        close_streams=close_streams,
        on_event=on_event,
        hello_timeout_s=hello_timeout_s,
        diagnostics=last_words.text,
    )
    link.process_id = child.pid
    return link


class _StderrTail:
    """Keeps the last lines of a child's stderr for error messages."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._lines: deque[str] = deque(maxlen=20)
        self._thread = threading.Thread(target=self._read, args=(stream,), name="link-stderr", daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._lines.append(line.decode(errors="replace").rstrip()[:500])

    def text(self) -> str:
        self._thread.join(timeout=0.5)
        return clean_text(" | ".join(self._lines)[-1000:])
