"""One OpenSSH client process for one node: started, asked for streams, listened to, ended.

It is `ssh` with an argument list and no configuration but ours. What it says goes to no person: it is turned into
our sentences.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from agents import leash
from agents.mux import NotOpened, ProcessGone, Request, ask_for_stream, is_alive
from agents.ssh import (
    KEEPALIVE_S,
    SILENCE_LIMIT_S,
    STEP_LIMIT_S,
    AuthenticationRefused,
    HostKeyMismatch,
    NodeUnreachable,
    SshError,
    SshStep,
    SshTarget,
    host_key_algorithms,
    other_host_key,
)
from agents.tunnel_stream import TunnelStream

log = logging.getLogger(__name__)

PROGRAM = "ssh"
CONNECT_LIMIT_S = 8.0
END_WITHIN_S = 2.0
ALIVE_WITHIN_S = 2.0
LOOK_EVERY_S = 0.01
OPENING_AT_ONCE = 32
LIFE_PORT = 1
"""No job has it; whatever a node answers about it, the node lives."""
CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
_ALIAS, _KNOWN_HOSTS, _CONTROL = "node", "known_hosts", "c"
_KEPT_LINES = 40
_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


class NoProgram(SshError):
    """This machine cannot run the OpenSSH client."""

    code = "no_ssh_program"


class KeyUnusable(SshError):
    """The file of our key is not as ssh wants it."""

    code = "key_unusable"


class NoWord(TimeoutError):
    """A stream was neither opened nor refused in time; ``silent`` tells whether the node answers anything."""

    def __init__(self, silent: bool) -> None:
        super().__init__("no answer in time")
        self.silent = silent


class NotAllowed(NotOpened):
    """The node lets our key go to no such address."""


def check_program() -> None:
    """Raises NoProgram, with a sentence for the admin, when this machine has no OpenSSH client."""
    if shutil.which(PROGRAM) is None:
        raise NoProgram(
            "The portal's machine has no program ssh, which carries the streams to jobs: install OpenSSH's client "
            "there (Debian: apt-get install openssh-client).",
            SshStep.CONNECT,
        )


def check_key(path: Path) -> None:
    """Raises KeyUnusable when ssh would refuse the key's file."""
    try:
        found = path.stat()
    except OSError as problem:
        sentence = f"The portal cannot read its tunnel key: {problem.strerror}."
        raise KeyUnusable(sentence, SshStep.LOGIN) from problem
    if found.st_uid != os.geteuid():
        raise KeyUnusable(
            f"The tunnel key belongs to account {found.st_uid}, but this process is account {os.geteuid()}.",
            SshStep.LOGIN,
        )
    if found.st_mode & 0o077:
        raise KeyUnusable(
            f"The tunnel key is open to other accounts (mode {found.st_mode & 0o777:o}): make it 600.",
            SshStep.LOGIN,
        )


def command(target: SshTarget, key_path: Path) -> list[str]:
    """The argument list, for a working folder with the file of known hosts."""
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": _KNOWN_HOSTS,
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": _ALIAS,
        "HostKeyAlgorithms": ",".join(host_key_algorithms(target)),
        "CheckHostIP": "no",
        "UpdateHostKeys": "no",
        "VerifyHostKeyDNS": "no",
        "PreferredAuthentications": "publickey",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "ConnectTimeout": f"{STEP_LIMIT_S:.0f}",
        "ServerAliveInterval": str(KEEPALIVE_S),
        "ServerAliveCountMax": str(round(SILENCE_LIMIT_S / KEEPALIVE_S)),
        "TCPKeepAlive": "no",
        "ControlMaster": "yes",
        "ControlPath": _CONTROL,
        "ControlPersist": "no",
        "Ciphers": CIPHERS,
        "Compression": "no",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "EscapeChar": "none",
        "LogLevel": "INFO",  # the level on which it says why a stream was not opened
    }
    words = [PROGRAM, "-F", "none", "-N", "-T"]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    key = str(key_path.absolute()).replace("%", "%%")
    return [*words, "-i", key, "-l", target.account, "-p", str(target.port), "--", target.host]


class SshProcess:
    """A running client that is signed in. Belongs to one event loop, and to the thread of it."""

    def __init__(self, target: SshTarget, key_path: Path, folder: Path, running: set[SshProcess]) -> None:
        """Starts it in a new folder of its own; it stands among the running ones until it has ended."""
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._folder = folder
        folder.mkdir(mode=0o700)
        (folder / _KNOWN_HOSTS).write_text(f"{_ALIAS} {' '.join(target.host_key.split()[:2])}\n")
        self._folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._errors, theirs = os.pipe()
        os.set_blocking(self._errors, False)
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ended = asyncio.Event()
        self._slots = asyncio.Semaphore(OPENING_AT_ONCE)  # its control socket has a queue of 64
        self._end_asked = False
        self._session: subprocess.Popen[bytes] | None = None
        self.streams: set[Request] = set()
        self.used_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(Path(leash.__file__).absolute()),
                    str(os.getpid()),
                    *command(target, key_path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=theirs,
                cwd=folder,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._loop.add_reader(self._errors, self._listen)
        self._running = running
        running.add(self)

    @classmethod
    async def start(
        cls, target: SshTarget, key_path: Path, folder: Path, running: set[SshProcess]
    ) -> SshProcess:
        """Gives a process that is signed in. Raises a typed SshError."""
        check_program()
        check_key(key_path)
        made = cls(target, key_path, folder, running)
        try:
            await made._signed_in()
        except BaseException:
            made.end()
            raise
        made._ask_for_haste()
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._ended.is_set() and not self._end_asked

    async def open(
        self, host: str, port: int, protocol: Callable[[], asyncio.Protocol], limit_s: float
    ) -> TunnelStream:
        """Opens a stream to an address as the node sees it. Raises NotOpened, ProcessGone or NoWord."""
        try:
            return await self._open(host, port, protocol, limit_s / 2)
        except TimeoutError:  # is it the port that does not answer, or the node?
            silent = not await self._lives(host, limit_s / 2)
            raise NoWord(silent) from None

    def end(self) -> None:
        """Asks it to end, and makes it end a little later."""
        if not self._end_asked and not self._ended.is_set():
            self._end_asked = True
            self._process.terminate()
            self._loop.call_later(END_WITHIN_S, self._kill)

    async def wait_until_ended(self) -> None:
        await self._ended.wait()

    # ---- parts ----

    async def _signed_in(self) -> None:
        until_s = time.monotonic() + CONNECT_LIMIT_S
        control = self._folder / _CONTROL
        while not control.exists():  # it is made when the node has let us in
            if self._ended.is_set():
                raise explain(self._target, list(self._lines))
            if time.monotonic() > until_s:
                raise NodeUnreachable(
                    f"{self._target.place} answers, but did not let us in within {CONNECT_LIMIT_S:.0f} s.",
                    SshStep.LOGIN,
                )
            await asyncio.sleep(LOOK_EVERY_S)

    def _ask_for_haste(self) -> None:
        """Has the node run our key's one command, which does nothing, and thereby send small packets at once.

        sshd turns off Nagle's algorithm with the first session of a connection, and a tunnel has none. Without
        that every second answer of a kernel, which is several small packets, waits 40 ms for our TCP.
        """
        self._session = subprocess.Popen(
            [PROGRAM, "-F", "none", "-S", _CONTROL, "-T", "-o", "ProxyCommand=false", _ALIAS, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            env=_ENVIRONMENT,
        )
        self._loop.call_later(END_WITHIN_S, _reap, self._session)

    async def _open(
        self, host: str, port: int, protocol: Callable[[], asyncio.Protocol], limit_s: float
    ) -> TunnelStream:
        self.used_s = time.monotonic()
        async with asyncio.timeout(limit_s), self._slots:
            request, pipes = await ask_for_stream(f"/proc/self/fd/{self._folder_fd}/{_CONTROL}", host, port)
            try:
                await asyncio.shield(request.answer)
            except BaseException as problem:
                pipes.close()  # a stream that opens after all ends at once
                if not isinstance(problem, NotOpened | ProcessGone):
                    request.answer.add_done_callback(lambda _: request.close())
                if isinstance(problem, NotOpened) and self._not_allowed():
                    raise NotAllowed(str(problem)) from problem
                raise
        stream = TunnelStream(request, protocol(), f"{host}:{port}", self._is_there)
        self.streams.add(request)
        request.on_end = lambda: self._stream_over(request, stream)
        if request.ended:
            self._stream_over(request, stream)
        await stream.begin(pipes)
        return stream

    def _stream_over(self, request: Request, stream: TunnelStream) -> None:
        self.streams.discard(request)
        self.used_s = time.monotonic()
        stream.connection_over()

    async def _is_there(self) -> bool:
        """Whether the process, and with it the connection, outlived a stream that has just ended."""
        if not self.alive:
            return False
        return await is_alive(f"/proc/self/fd/{self._folder_fd}/{_CONTROL}", ALIVE_WITHIN_S) and self.alive

    async def _lives(self, host: str, limit_s: float) -> bool:
        try:
            (await self._open(host, LIFE_PORT, asyncio.Protocol, limit_s)).abort()
        except NotOpened:
            return True
        except (TimeoutError, ProcessGone):
            return False
        return True

    def _not_allowed(self) -> bool:
        """Whether the node's last refusal was one of principle. It is said just before the answer is given."""
        self._listen()
        refusals = [line for line in self._lines if "open failed: " in line]
        return bool(refusals) and "administratively prohibited" in refusals[-1]

    def _listen(self) -> None:
        if self._ended.is_set():
            return
        while True:
            try:
                said = os.read(self._errors, 65536)
            except BlockingIOError:
                return
            if not said:
                self._over()
                return
            *lines, self._rest = (self._rest + said).split(b"\n")
            self._lines += [line.decode(errors="replace").strip()[:300] for line in lines]

    def _over(self) -> None:
        """Its error stream ends with it."""
        self._loop.remove_reader(self._errors)
        os.close(self._errors)
        os.close(self._folder_fd)
        _reap(self._process)
        if self._session is not None:
            _reap(self._session)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._running.discard(self)
        self._ended.set()

    def _kill(self) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Takes leave of a process that has ended, or had its time."""
    if process.poll() is None:
        process.kill()
        process.wait()


_HOST_KEY = re.compile(r"\b(SHA256:[A-Za-z0-9+/]+)")


def explain(target: SshTarget, said: list[str]) -> SshError:
    """Turns the last words of a client that did not get in into a sentence of ours."""
    text = "\n".join(said)
    place = target.place
    log.info("ssh to %s ended: %s", place, " | ".join(said)[-1000:])
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text or "Host key verification failed" in text:
        shown = _HOST_KEY.search(text)
        return other_host_key(target, shown[1] if shown else "another host key")
    if "no matching host key type" in text:
        algorithms = ", ".join(host_key_algorithms(target))
        return HostKeyMismatch(f"{place} has no host key of a type that we take ({algorithms}).")
    if "Unable to negotiate" in text:
        return NodeUnreachable(f"{place} and we have no way to encrypt in common.", SshStep.CONNECT)
    if "UNPROTECTED PRIVATE KEY" in text or "Load key" in text:
        return KeyUnusable("The portal's ssh cannot use its tunnel key.", SshStep.LOGIN)
    if "Permission denied (" in text or "Too many authentication failures" in text:
        sentence = f"{place} does not take our key for the account {target.account}."
        return AuthenticationRefused(sentence, SshStep.LOGIN)
    if "Could not resolve hostname" in text:
        return NodeUnreachable(f"No address is known for {target.host}.", SshStep.RESOLVE)
    if "No user exists for uid" in text:
        sentence = f"The gateway's account {os.geteuid()} has no name in /etc/passwd, and ssh wants one."
        return NoProgram(sentence, SshStep.CONNECT)
    if "Connection refused" in text:
        return NodeUnreachable(f"{place} is up, but no sshd listens there.", SshStep.CONNECT)
    if "banner exchange" in text or "kex_exchange" in text:
        reason = "it hung up"
        if "timed out" in text:
            reason = f"it did not finish greeting us within {STEP_LIMIT_S:.0f} s"
        sentence = f"{place} answers, but not as an SSH server should: {reason}."
        return NodeUnreachable(sentence, SshStep.CONNECT)
    if "timed out" in text:
        sentence = (
            f"{place} does not answer within {STEP_LIMIT_S:.0f} s: it is down, or a firewall is between."
        )
        return NodeUnreachable(sentence, SshStep.CONNECT)
    if refusal := re.search(r"connect to .* port \d+: (.+)", text):
        return NodeUnreachable(f"{place} cannot be reached: {refusal[1].strip('.')}.", SshStep.CONNECT)
    if "cannot be run" in text:
        return NoProgram("The program ssh cannot be run on the portal's machine.", SshStep.CONNECT)
    return NodeUnreachable(f"{place} hung up during the login.", SshStep.LOGIN)
