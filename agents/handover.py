"""Paramiko greets and signs in; then an event loop takes its socket, and its thread keeps only the keys' exchange."""

from __future__ import annotations

import socket
import threading
from queue import SimpleQueue
from typing import Any, Protocol

import paramiko
from paramiko.packet import NeedRekeyException

from agents.gcm import Opener, Sealer
from agents.ssh import HearingPacketizer, ReadAhead, SshTransport


class Taker(Protocol):
    """What takes a connection over. Every method may be called on paramiko's thread."""

    def send_for_thread(self, payload: bytes) -> None:
        """Sends a message of paramiko's."""

    def seal_with(self, sealer: Sealer) -> None:
        """From the next packet on, seal with these keys; paramiko has just sent NEWKEYS."""

    def open_with(self, opener: Opener) -> None:
        """Packets after NEWKEYS are opened with these keys."""

    def end_for_thread(self) -> None:
        """Paramiko has ended the connection."""


class Wire:
    """The socket as paramiko holds it, until it is let go; after that paramiko's hands are empty."""

    def __init__(self, read_ahead: ReadAhead) -> None:
        self._read_ahead = read_ahead
        self._gone = False

    @property
    def _closed(self) -> bool:
        """Paramiko asks by this name whether its socket is closed."""
        return self._gone or bool(self._read_ahead._closed)

    def let_go(self) -> tuple[socket.socket, bytes]:
        """The socket, and the bytes that were read from it too early."""
        self._gone = True
        return self._read_ahead.give_up()

    def close(self) -> None:
        if not self._gone:
            self._read_ahead.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read_ahead, name)


class _Counted:
    """An AES-GCM for paramiko that knows how many packets it has served, as each takes the next nonce."""

    def __init__(self, engine: Any, iv: bytes) -> None:
        self._engine, self._iv, self._served = engine, iv, 0

    def encrypt(self, *arguments: bytes) -> bytes:
        self._served += 1
        return bytes(self._engine.encrypt(*arguments))

    def decrypt(self, *arguments: bytes) -> bytes:
        self._served += 1
        return bytes(self._engine.decrypt(*arguments))

    def sealer(self) -> Sealer:
        return Sealer(self._engine, self._iv, self._served)

    def opener(self) -> Opener:
        return Opener(self._engine, self._iv, self._served)


class HandoverPacketizer(HearingPacketizer):
    """Paramiko's packets until the handover; from then on a letter box between its thread and the taker."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self._outbound: _Counted | None = None
        self._inbound: _Counted | None = None
        self._letters: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._wanted = False
        self._parked = threading.Event()
        self._taker: Taker | None = None
        self._ended = False

    # ---- for the taker ----

    def park(self) -> None:
        """Asks paramiko's thread to read no further than the packet it reads now."""
        self._wanted = True

    def wait_until_parked(self, limit_s: float) -> bool:
        return self._parked.wait(limit_s)

    def give_to(self, taker: Taker) -> tuple[Sealer, Opener]:
        """From now on what paramiko sends goes to the taker, which goes on with these keys."""
        self._taker = taker
        if self._outbound is None or self._inbound is None:
            raise paramiko.SSHException("there are no keys yet")
        return self._outbound.sealer(), self._inbound.opener()

    def post(self, kind: int, payload: bytes) -> None:
        """A message for paramiko's thread."""
        self._letters.put((kind, payload))

    def ask_for_keys(self) -> None:
        """Has paramiko's thread begin an exchange of keys."""
        self._trigger_rekey()
        self._letters.put((0, b""))

    def end(self) -> None:
        """Has paramiko's thread end: nothing more will come."""
        self._ended = True
        self._letters.put(None)

    # ---- for paramiko ----

    def read_message(self) -> Any:
        if not self._wanted:
            return super().read_message()
        self._parked.set()
        letter = None if self._ended else self._letters.get()
        if letter is None:
            raise EOFError
        kind, payload = letter
        if not kind:
            raise NeedRekeyException
        message = paramiko.Message(payload[1:])
        message.seqno = 0
        return kind, message

    def send_message(self, data: Any) -> None:
        if self._taker is None:
            super().send_message(data)
        else:
            self._taker.send_for_thread(data.asbytes())

    def set_outbound_cipher(self, block_engine: Any, *others: Any, **named: Any) -> None:
        counted = self._outbound = _Counted(block_engine, named["iv_out"])
        super().set_outbound_cipher(counted, *others, **named)
        if self._taker is not None:
            self._taker.seal_with(counted.sealer())

    def set_inbound_cipher(self, block_engine: Any, *others: Any, **named: Any) -> None:
        counted = self._inbound = _Counted(block_engine, named["iv_in"])
        super().set_inbound_cipher(counted, *others, **named)
        if self._taker is not None:
            self._taker.open_with(counted.opener())

    def close(self) -> None:
        super().close()  # the wire knows whether the socket is still ours to close
        if self._taker is not None:
            self.end()
            self._taker.end_for_thread()


class HandoverTransport(SshTransport):
    """An SSH transport whose connection can be taken over. It offers AES-GCM alone, which `agents.gcm` speaks."""

    _preferred_ciphers: tuple[str, ...] = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")

    def __init__(self, sock: ReadAhead, **named: Any) -> None:
        self.wire = Wire(sock)
        super().__init__(self.wire, **(named | {"packetizer_class": HandoverPacketizer}))
