"""pg_dump and pg_restore: the installed versions, and how they run as streams, without a file of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from portal.bootstrap.environment import major_version
from portal.database.libpq import libpq_environment
from portal.standalone.errors import StartError
from portal.standalone.processes.exec_child import exec_command
from portal.standalone.servers.binaries import POSTGRES_VERSIONS, wheel_postgres, wheels_forced

TIMEOUT_S = 3_600
CHUNK_BYTES = 1024 * 1024
SETS_TRANSACTION_TIMEOUT = 17
"""From this version, pg_restore sets a parameter that older servers do not know."""


@dataclass(frozen=True)
class PostgresTool:
    path: str
    major: int


def find_tools(name: str, at_least: int) -> list[PostgresTool]:
    """Return the installed versions of pg_dump or pg_restore from this major version on, lowest first.

    The client packages suffice; a server is not needed.
    """
    folders = (
        []
        if wheels_forced()
        else [
            Path(pattern.format(major))
            for major in POSTGRES_VERSIONS
            for pattern in ("/usr/lib/postgresql/{}/bin", "/usr/pgsql-{}/bin")
        ]
    )
    paths = [str(folder / name) for folder in folders if (folder / name).is_file()]
    if not wheels_forced() and (on_path := shutil.which(name)):
        paths.append(on_path)
    if wheel := wheel_postgres():
        paths.append(wheel.program(name))
    tools = {tool.major: tool for tool in (PostgresTool(p, major_version(p)) for p in reversed(paths))}
    return [tools[major] for major in sorted(tools) if major >= at_least]


def find_tool(name: str, at_least: int) -> PostgresTool:
    """Return the lowest version that fits: its archives can be restored by most others. Raise StartError."""
    tools = find_tools(name, at_least)
    if not tools:
        raise StartError(
            f"There is no {name} for PostgreSQL {at_least} on this machine. "
            f"Install one (Debian: apt-get install postgresql-client-{at_least})."
        )
    return tools[0]


class ToolProcess:
    """A running pg_dump or pg_restore. Use as a context manager; it is killed if its block raises."""

    def __init__(
        self,
        tool: PostgresTool,
        arguments: Sequence[str],
        *,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = subprocess.DEVNULL,
        files: Sequence[int] = (),
        application: str = "fairway",
    ) -> None:
        self._name = Path(tool.path).name
        self._errors = os.memfd_create("errors")
        self.process = subprocess.Popen(
            exec_command([tool.path, *arguments]),
            env={**os.environ, **libpq_environment(), "PGAPPNAME": application},
            stdin=stdin,
            stdout=stdout,
            stderr=self._errors,
            pass_fds=files,
        )
        self._timed_out = False
        self._timer = threading.Timer(TIMEOUT_S, self._stop)
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        self._timed_out = True
        self.process.kill()

    def __enter__(self) -> ToolProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if kind is not None:
            self.process.kill()
        self.process.wait()
        os.close(self._errors)

    def feed(self, file: IO[bytes]) -> None:
        """Write a file to the program's input, as far as it reads it, and close the input."""
        pipe: IO[bytes] = self.process.stdin  # type: ignore[assignment]  # a pipe
        with contextlib.suppress(BrokenPipeError):
            while chunk := file.read(CHUNK_BYTES):
                pipe.write(chunk)
        with contextlib.suppress(BrokenPipeError):
            pipe.close()

    def output(self) -> Iterator[bytes]:
        """Yield the pieces of the program's output as they arrive."""
        pipe: IO[bytes] = self.process.stdout  # type: ignore[assignment]  # a pipe
        while chunk := pipe.read(CHUNK_BYTES):
            yield chunk

    def finish(self) -> None:
        """Wait for the end. Raise StartError with the first error of the program."""
        code = self.process.wait()
        self._timer.cancel()
        if self._timed_out:
            raise StartError(f"{self._name} took longer than {TIMEOUT_S // 60} minutes.")
        if code:
            raise StartError(f"{self._name} failed: {self.error()}")

    def error(self) -> str:
        """Return the first error that the program has printed, without its prefixes, as a sentence."""
        text = os.pread(self._errors, 65_536, 0).decode(errors="replace").strip()
        lines = [line for line in text.splitlines() if re.search("error:|FATAL:", line)] or text.splitlines()
        if not lines:
            return "it was interrupted." if self.process.returncode < 0 else "it gave no reason."
        bare = re.sub(r"^.*?(error|FATAL): +", "", lines[0])
        bare = re.sub(r"^(query failed|could not execute query): +", "", bare)
        return re.sub(r"^(ERROR|FATAL): +", "", bare).rstrip(".") + "."


@contextlib.contextmanager
def memory_file(content: bytes = b"") -> Iterator[int]:
    """Yield the descriptor of a file in memory."""
    descriptor = os.memfd_create("fairway")
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def read_contents(tool: PostgresTool, archive: IO[bytes]) -> list[str]:
    """Return the lines of an archive's table of contents. Raise StartError if this version cannot read it."""
    with memory_file() as output:
        with ToolProcess(tool, ["--list"], stdin=subprocess.PIPE, stdout=output) as stream:
            stream.feed(archive)
            stream.finish()
        size = os.fstat(output).st_size
        return os.pread(output, size, 0).decode().splitlines()
