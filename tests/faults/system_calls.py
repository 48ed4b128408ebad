"""A child that is killed as it makes its K-th system call of a name, counted by strace from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from django.db import connections

KINDS = "%network,%file,write,writev,close,fsync,fdatasync,ftruncate,clone,clone3,vfork,execve,fork,pipe2,exit_group"
"""The calls by which a process has an effect, or hears of one."""
ENDED = 7


Call = tuple[str, int]
"""A name, and which of the calls of this name."""


def dies_at_call(call: Call, act: Callable[[], object]) -> bool:
    """Runs ``act`` in a child that is killed on its way into that call; False when it made fewer and ended."""
    name, number = call
    child = _child(act, ["-o", "/dev/null", "-e", f"inject={name}:signal=SIGKILL:when={number}"])
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    assert os.WEXITSTATUS(status) == ENDED, "the act failed; its words are above"
    return False


def calls_of(act: Callable[[], object]) -> list[Call]:
    """The calls that ``act`` makes, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls"
        child = _child(act, ["-o", str(path)])
        _, status = os.waitpid(child, 0)
        assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == ENDED, "the act failed"
        deadline_s = time.monotonic() + 5
        while "exited with" not in path.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        names = [line.split("(", 1)[0] for line in path.read_text().splitlines() if "(" in line]
    seen: Counter[str] = Counter()
    calls = []
    for name in filter(str.isidentifier, names):
        seen[name] += 1
        calls.append((name, seen[name]))
    return calls


def _child(act: Callable[[], object], words: list[str]) -> int:
    """A child that does ``act`` once it is traced; its threads and children are not."""
    connections.close_all()
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(ENDED)
    os.close(ready)
    tracer = subprocess.Popen(
        ["strace", "-qq", "-p", str(child), "-e", f"trace={KINDS}", *words], stderr=subprocess.DEVNULL
    )
    while "TracerPid:\t0" in Path(f"/proc/{child}/status").read_text():
        assert tracer.poll() is None, "strace may not trace here"
        time.sleep(0.001)
    os.write(go, b"g")
    os.close(go)
    _forget(tracer)
    return child


def _forget(tracer: subprocess.Popen[bytes]) -> None:
    """It ends with the child; its entry in the table of processes is collected with the next one."""
    _tracers.append(tracer)
    _tracers[:] = [each for each in _tracers if each.poll() is None]


_tracers: list[subprocess.Popen[bytes]] = []
