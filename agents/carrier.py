"""An SSH connection on the event loop: packets come in and go out here, and each of its channels is a stream.

Nothing changes threads on the way of a byte. Only messages about keys go to paramiko's thread, and what it answers
comes back the same way (RFC 4253 section 7, RFC 4254 section 5).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from cryptography.exceptions import InvalidTag

from agents.channel_stream import ChannelStream, PeerBroke
from agents.gcm import LENGTH_BYTES, MAX_PACKET_BYTES, TAG_BYTES, Opener, Sealer
from agents.handover import HandoverPacketizer
from agents.ssh import KEEPALIVE_S

log = logging.getLogger(__name__)

WINDOW_BYTES = 2 * 1024 * 1024
PACKET_BYTES = 128 * 1024
HIGH_WATER_BYTES = 256 * 1024
NEW_KEYS_AFTER_BYTES = 16 * 1024**3
"""Well below the 64 GiB that RFC 4344 allows under one key of AES."""


SMALL_BYTES = 4096
"""sshd may hold a small packet back until the one before is acknowledged; so what is small is acknowledged at once,
and not by TCP's own time, which is 40 ms. What is large fills its packets."""


class Kind(IntEnum):
    """Message numbers (RFC 4250)."""

    DISCONNECT = 1
    KEXINIT = 20
    NEWKEYS = 21
    LAST_OF_TRANSPORT = 49
    GLOBAL_REQUEST = 80
    OPEN = 90
    OPEN_CONFIRMATION = 91
    OPEN_FAILURE = 92
    WINDOW_ADJUST = 93
    DATA = 94
    EXTENDED_DATA = 95
    EOF = 96
    CLOSE = 97
    REQUEST = 98
    CHANNEL_FAILURE = 100


_DATA = int(Kind.DATA)
PROHIBITED = 1
_SIGN_OF_LIFE = bytes([Kind.GLOBAL_REQUEST]) + (21).to_bytes(4, "big") + b"keepalive@openssh.com\x01"


class ChannelRefused(ConnectionRefusedError):
    """The node opens no channel to that port; ``code`` is the reason of RFC 4254."""

    def __init__(self, code: int) -> None:
        super().__init__(f"channel refused with reason {code}")
        self.code = code


class CarrierLost(ConnectionError):
    """The connection ended while a channel was being opened."""


class NoWord(TimeoutError):
    """A channel was neither opened nor refused in time; ``silent`` tells whether nothing else came either."""

    def __init__(self, silent: bool) -> None:
        super().__init__("no answer in time")
        self.silent = silent


class Carrier(asyncio.Protocol):
    """The connection after its handover. Everything runs on the loop but the four methods named ``..._thread``
    or ``..._with``, which paramiko's thread calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop, keys: HandoverPacketizer) -> None:
        self._loop = loop
        self._keys = keys
        sealer, opener = keys.give_to(self)
        self._seal, self._open = sealer.seal, opener.open
        self._transport: asyncio.Transport | None = None
        self._hand: socket.socket | None = None
        self._rest = b""
        self._waits_for_keys = False
        self._held: deque[bytes] | None = None  # while keys are exchanged only messages about keys may go out
        self._under_key_bytes = 0
        self._taken = True
        self._turn: deque[ChannelStream] = deque()
        self._next_number = 0
        self._opening: dict[
            int, tuple[asyncio.Future[ChannelStream], Callable[[], asyncio.Protocol], str]
        ] = {}
        self.streams: dict[int, ChannelStream] = {}
        self.lost = False
        self.used_s = time.monotonic()
        self._heartbeat = loop.call_later(KEEPALIVE_S, self._beat)

    @classmethod
    async def take_over(cls, keys: HandoverPacketizer, sock: socket.socket, ahead: bytes) -> Carrier:
        """Goes on with a connection that paramiko has let go."""
        loop = asyncio.get_running_loop()
        hand = sock.dup()  # the loop's own view of a socket takes no options without a copy each time
        try:
            _, carrier = await loop.create_connection(lambda: cls(loop, keys), sock=sock)
        except OSError:
            hand.close()
            raise
        carrier._hand = hand
        if ahead:
            carrier.data_received(ahead)
        return carrier

    # ---- channels ----

    async def open(
        self, address: tuple[str, int], protocol: Callable[[], asyncio.Protocol], limit_s: float
    ) -> ChannelStream:
        """Opens a stream to an address as the node sees it. Raises ChannelRefused, CarrierLost or NoWord."""
        if self.lost:
            raise CarrierLost("the connection is closed")
        number = self._next_number
        self._next_number = (number + 1) & 0xFFFFFFFF
        answer: asyncio.Future[ChannelStream] = self._loop.create_future()
        self._opening[number] = (answer, protocol, f"{address[0]}:{address[1]}")
        self.used_s = time.monotonic()
        words = [_text(b"direct-tcpip"), _number(number), _number(WINDOW_BYTES), _number(PACKET_BYTES)]
        words += [_text(address[0].encode()), _number(address[1]), _text(b"127.0.0.1"), _number(0)]
        self.send(bytes([Kind.OPEN]) + b"".join(words))
        try:
            done, _ = await asyncio.wait({answer}, timeout=limit_s / 2)
            if not done:  # is it the port that does not answer, or the node?
                asked_s = time.monotonic()
                self.send(_SIGN_OF_LIFE)
                done, _ = await asyncio.wait({answer}, timeout=limit_s / 2)
                if not done:
                    raise NoWord(silent=self._keys.heard_s < asked_s)
        except asyncio.CancelledError:
            if answer.done() and answer.exception() is None:
                answer.result().abort()
            raise
        finally:
            answer.cancel()
        return answer.result()

    def forget(self, number: int) -> None:
        """A stream has ended."""
        self.streams.pop(number, None)
        self.used_s = time.monotonic()

    # ---- sending ----

    @property
    def writable(self) -> bool:
        """True when bytes may go out at once; else ask for a turn."""
        return self._taken and self._held is None

    def send(self, payload: bytes) -> None:
        """Sends a message, or holds it while keys are exchanged."""
        if self._held is not None:
            self._held.append(payload)
        elif self._transport is not None and not self.lost:
            self._under_key_bytes += len(payload)
            self._transport.write(self._seal(payload))

    def give_turn(self, stream: ChannelStream) -> None:
        """Calls the stream back once something may go out: one packet for each in its turn."""
        self._turn.append(stream)

    def _give_turns(self) -> None:
        while self._turn and self.writable and not self.lost:
            self._turn.popleft().take_turn()

    # ---- paramiko's thread ----

    def send_for_thread(self, payload: bytes) -> None:
        self._on_loop(self._send_about_keys, payload)

    def seal_with(self, sealer: Sealer) -> None:
        self._on_loop(self._go_on_sending, sealer)

    def open_with(self, opener: Opener) -> None:
        self._on_loop(self._go_on_reading, opener)

    def end_for_thread(self) -> None:
        self._on_loop(self.close)

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection with it
            self._loop.call_soon_threadsafe(call, *arguments)

    def _send_about_keys(self, payload: bytes) -> None:
        if payload[0] > Kind.LAST_OF_TRANSPORT:
            self.send(payload)
            return
        held, self._held = self._held, None
        self.send(payload)
        self._held = deque() if payload[0] == Kind.KEXINIT and held is None else held

    def _go_on_sending(self, sealer: Sealer) -> None:
        self._seal = sealer.seal
        self._under_key_bytes = 0
        held, self._held = self._held, None
        for payload in held or ():
            self.send(payload)
        self._give_turns()

    def _go_on_reading(self, opener: Opener) -> None:
        self._open = opener.open
        self._waits_for_keys = False
        rest, self._rest = self._rest, b""
        if self._transport is not None and not self.lost:
            self._transport.resume_reading()
            self.data_received(rest)

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def pause_writing(self) -> None:
        self._taken = False

    def resume_writing(self) -> None:
        self._taken = True
        self._give_turns()

    def data_received(self, data: bytes) -> None:
        self._keys.heard_s = time.monotonic()
        if self._rest:
            data = self._rest + data
        size, position, view = len(data), 0, memoryview(data)
        try:
            while size - position > LENGTH_BYTES and not self._waits_for_keys and not self.lost:
                length = data[position : position + LENGTH_BYTES]
                end = position + LENGTH_BYTES + int.from_bytes(length, "big") + TAG_BYTES
                if end > size:
                    if end - position > MAX_PACKET_BYTES:
                        raise PeerBroke("a packet is too long")
                    break
                packet = self._open(length, view[position + LENGTH_BYTES : end])
                position = end
                if packet[1] == _DATA:
                    stream = self.streams.get(int.from_bytes(packet[2:6], "big"))
                    if stream is not None:
                        stream.received(packet[10 : 10 + int.from_bytes(packet[6:10], "big")])
                else:
                    self._read(packet[1], packet[1 : len(packet) - packet[0]])
        except (InvalidTag, PeerBroke, IndexError) as problem:
            log.warning("an SSH connection is cut: %s", problem or type(problem).__name__)
            self.close()
            return
        if size < SMALL_BYTES and self._hand is not None:
            self._hand.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self._rest = data[position:]
        self._under_key_bytes += position
        if self._under_key_bytes > NEW_KEYS_AFTER_BYTES and self._held is None:
            self._under_key_bytes = 0
            self._keys.ask_for_keys()

    def connection_lost(self, problem: Exception | None) -> None:
        self.lost = True
        self._heartbeat.cancel()
        if self._hand is not None:
            self._hand.close()
            self._hand = None
        self._keys.end()
        opening, self._opening = self._opening, {}
        for answer, _, _ in opening.values():
            if not answer.done():
                answer.set_exception(CarrierLost(str(problem or "the node closed the connection")))
        for stream in list(self.streams.values()):
            stream.lose()

    def close(self) -> None:
        """Ends the connection and its streams."""
        if self._transport is not None and not self.lost:
            self._transport.abort()

    # ---- reading ----

    def _read(self, kind: int, payload: bytes) -> None:
        if kind <= Kind.LAST_OF_TRANSPORT:
            if kind == Kind.NEWKEYS and self._transport is not None:
                self._waits_for_keys = True
                self._transport.pause_reading()
            self._keys.post(kind, payload)
            return
        number = int.from_bytes(payload[1:5], "big")
        if kind in (Kind.OPEN_CONFIRMATION, Kind.OPEN_FAILURE):
            self._read_answer(kind, number, payload)
        elif kind == Kind.GLOBAL_REQUEST:
            self._keys.post(kind, payload)
        elif kind == Kind.OPEN:  # a node has nothing to ask of us
            theirs = 5 + number
            refusal = payload[theirs : theirs + 4] + _number(PROHIBITED) + _text(b"") + _text(b"")
            self.send(bytes([Kind.OPEN_FAILURE]) + refusal)
        elif (stream := self.streams.get(number)) is not None:
            match kind:
                case Kind.WINDOW_ADJUST:
                    stream.widened(int.from_bytes(payload[5:9], "big"))
                case Kind.EXTENDED_DATA:
                    stream.not_for_us(int.from_bytes(payload[9:13], "big"))
                case Kind.EOF:
                    stream.ended()
                case Kind.CLOSE:
                    stream.closed()
                case Kind.REQUEST:
                    named = 9 + int.from_bytes(payload[5:9], "big")
                    if payload[named : named + 1] == b"\x01":
                        self.send(bytes([Kind.CHANNEL_FAILURE]) + _number(stream.remote))

    def _read_answer(self, kind: int, number: int, payload: bytes) -> None:
        answer, make, peer = self._opening.pop(number, (None, None, ""))
        if answer is None or make is None:
            raise PeerBroke("an answer to a question that was not asked")
        second = int.from_bytes(payload[5:9], "big")
        if kind == Kind.OPEN_FAILURE:
            if not answer.done():
                answer.set_exception(ChannelRefused(second))
        elif answer.done():  # whoever asked has left
            self.send(bytes([Kind.CLOSE]) + _number(second))
        else:
            window, packet = int.from_bytes(payload[9:13], "big"), int.from_bytes(payload[13:17], "big")
            stream = ChannelStream(self, number, second, (WINDOW_BYTES, window, packet), peer)
            self.streams[number] = stream
            stream.begin(make())
            answer.set_result(stream)

    # ---- parts ----

    def _beat(self) -> None:
        if time.monotonic() - self._keys.heard_s >= KEEPALIVE_S - 0.5:
            self.send(_SIGN_OF_LIFE)
        self._heartbeat = self._loop.call_later(KEEPALIVE_S, self._beat)


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _text(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value
