"""An sshd of our own on the loopback address: needs no root, and serves the tests of links alone."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.ssh import SshError, scan_host_key
from tests.rig.needs import find_tool


@dataclass(frozen=True)
class LoopbackSshd:
    """A running sshd: where it listens, as whom to come, and its pinned key."""

    host: str
    port: int
    account: str
    host_key: str
    folder: Path
    pid: int

    def freeze(self) -> None:
        """Stops listener and sessions in their tracks: the kernel still takes packets, nobody answers."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def kill_sessions(self) -> None:
        """Kills the processes of all sessions; the listener lives."""
        for pid in _descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def change_host_key(self) -> str:
        """Gives it another host key at the same address, as a reinstalled machine has, and returns the key."""
        path = self.folder / "host_key"
        for old in (path, path.with_name("host_key.pub")):
            old.unlink()
        key = make_host_key(path)
        log, listening = self.folder / "sshd.log", "Server listening on"
        before = log.read_text().count(listening)
        os.kill(self.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:
            with contextlib.suppress(SshError):
                if log.read_text().count(listening) == before:
                    time.sleep(0.02)  # sessions of the old listener present the new key, too
                    continue
                if scan_host_key(self.host, self.port).line == key:
                    return key
            time.sleep(0.02)
        raise RuntimeError("sshd does not present its new host key")

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in (self.pid, *_descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def loopback_sshd(
    folder: Path,
    agent: bytes,
    public_keys: Mapping[str, str],
    *,
    options: str = "",
    listens_at: str = "127.0.0.1",
) -> Iterator[LoopbackSshd]:
    """Runs an sshd for the present account, whose keys may run the agent (control, watch) or tunnel.

    ``options`` are further lines of its configuration; ``listens_at`` 0.0.0.0 gives it all of 127.x.x.x.
    """
    program = folder / "agent.pyz"
    program.write_bytes(agent)
    settings = folder / "node.json"
    settings.write_text("{}")
    lines = []
    for role in ("control", "watch"):
        command = f"{sys.executable} -I {program} {role} --settings {settings}"
        lines.append(f'restrict,command="{command}" {public_keys[role]}')
    lines.append(
        f'restrict,port-forwarding,permitopen="127.77.0.1:*",command="/bin/false" {public_keys["tunnel"]}'
    )
    (folder / "authorized_keys").write_text("\n".join(lines) + "\n")
    key = folder / "host_key"
    host_key = make_host_key(key)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    port = _free_port()
    # bash reads ~/.bashrc below sshd unless it takes itself for an inner shell; what people put there may take
    # long, and a killed session leaves its lock behind (pyenv's makes the next ones wait for a minute).
    quiet = "SetEnv SHLVL=9\n"
    (folder / "sshd_config").write_text(
        f"ListenAddress {listens_at}:{port}\nHostKey {key}\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"PidFile {folder}/sshd.pid\nStrictModes no\nPasswordAuthentication no\nUsePAM no\n"
        f"PermitRootLogin prohibit-password\nMaxStartups 100\n{quiet}{options}"
    )
    process = subprocess.Popen(
        [str(find_tool("sshd")), "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    )
    try:
        _wait_for("127.0.0.1", port)
        yield LoopbackSshd("127.0.0.1", port, getpass.getuser(), host_key, folder, process.pid)
    finally:
        for pid in _descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait(10)


def make_host_key(path: Path) -> str:
    """Makes a host key and gives the public one: type and base64."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=10)
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [found for child in children for found in (child, *_descendants(child))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(host: str, port: int) -> None:
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.5):
            return
        time.sleep(0.02)
    raise RuntimeError(f"sshd does not listen on {host}:{port}")
