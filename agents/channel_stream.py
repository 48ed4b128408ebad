"""One channel of an SSH connection as an asyncio transport: a TCP stream to a port on the node."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

HIGH_WATER_BYTES = 512 * 1024
LOW_WATER_BYTES = 128 * 1024

_ADJUST, _DATA, _EOF, _CLOSE = b"\x5d", b"\x5e", b"\x60", b"\x61"


class PeerBroke(Exception):
    """The node does what the protocol does not allow."""


class Sending(Protocol):
    """What a stream needs of its connection."""

    @property
    def writable(self) -> bool:
        """True when bytes may go out at once."""

    def send(self, payload: bytes) -> None:
        """Sends a message."""

    def give_turn(self, stream: ChannelStream) -> None:
        """Calls ``take_turn`` once something may go out."""

    def forget(self, number: int) -> None:
        """The stream has ended."""


class ChannelStream(asyncio.Transport):
    """The stream. At most one window of bytes waits here for a slow reader, which slows the sender on the node."""

    def __init__(
        self, connection: Sending, number: int, remote: int, sizes: tuple[int, int, int], peer: str
    ) -> None:
        """``sizes``: our window, the node's window, and the longest data that the node takes in a packet."""
        super().__init__(extra={"peername": peer})
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._number = number
        self.remote = remote
        self._window, self._may_send, self._packet = sizes
        self._their_allowance = self._window
        self._taken = 0
        self._data_head = _DATA + remote.to_bytes(4, "big")
        self._protocol: asyncio.Protocol = asyncio.Protocol()
        self._inbox: deque[bytes] = deque()
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._in_turn = False
        self._reading = True
        self._their_eof = self._their_close = self._told_eof = False
        self._eof_wanted = self._eof_sent = False
        self._closing = self._close_sent = self._lost = False
        self._protocol_paused = False
        self._high, self._low = HIGH_WATER_BYTES, LOW_WATER_BYTES

    def begin(self, protocol: asyncio.Protocol) -> None:
        """Joins the stream with the protocol that reads it."""
        self._protocol = protocol
        protocol.connection_made(self)

    # ---- what the connection tells ----

    def received(self, data: bytes) -> None:
        """Bytes from the node. Raises PeerBroke when they are more than we allowed."""
        self._their_allowance -= len(data)
        if self._their_allowance < 0:
            raise PeerBroke("more data than the window allows")
        if (self._reading and not self._inbox) or self._closing:
            self._deliver(data)
        else:
            self._inbox.append(data)

    def not_for_us(self, size: int) -> None:
        """Bytes of another kind than data: taken and dropped."""
        self._their_allowance -= size
        self._count(size)

    def widened(self, size: int) -> None:
        """The node takes so many bytes more."""
        self._may_send += size
        self._push()

    def ended(self) -> None:
        """The node will send nothing more."""
        self._their_eof = True
        self._look_at_end()

    def closed(self) -> None:
        """The node has closed the channel."""
        self._their_eof = self._their_close = True
        self._look_at_end()

    def lose(self) -> None:
        """The connection is gone, and what waited with it."""
        self._close_sent = True
        self._lose()

    def take_turn(self) -> None:
        """Sends one packet."""
        self._in_turn = False
        self._push(packets=1)

    # ---- reading ----

    def _deliver(self, data: bytes) -> None:
        if not self._closing:
            try:
                self._protocol.data_received(data)
            except Exception as problem:  # one stream's trouble is not that of the others
                told = {"message": "a protocol failed", "exception": problem, "transport": self}
                self._loop.call_exception_handler(told)
                self.abort()
        self._count(len(data))

    def _count(self, size: int) -> None:
        """Lets the node send more in place of what was taken."""
        self._taken += size
        if self._taken * 4 >= self._window and not self._close_sent:
            taken, self._taken = self._taken, 0
            self._their_allowance += taken
            self._connection.send(_ADJUST + self.remote.to_bytes(4, "big") + taken.to_bytes(4, "big"))

    def _look_at_end(self) -> None:
        if not self._their_eof or self._inbox:
            return
        if not self._told_eof:
            self._told_eof = True
            if not self._closing and not self._protocol.eof_received():
                self.close()
        if self._their_close:
            self._drop_output()
            self._say_close()
            self._loop.call_soon(self._lose)

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._empty_inbox)

    def _empty_inbox(self) -> None:
        while self._reading and self._inbox:
            self._deliver(self._inbox.popleft())
        self._look_at_end()

    # ---- writing ----

    def write(self, data: bytes | bytearray | memoryview) -> None:
        size = len(data)
        if self._closing or self._eof_wanted or not size:
            return
        if not self._out and size <= self._packet and size <= self._may_send and self._connection.writable:
            self._may_send -= size
            self._connection.send(b"".join((self._data_head, size.to_bytes(4, "big"), data)))
            return
        self._out.append(memoryview(bytes(data)))
        self._out_bytes += size
        self._push()
        if self._out_bytes > self._high and not self._protocol_paused:
            self._protocol_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._eof_wanted = True
        self._push()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self._out_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def _push(self, packets: int = 1 << 30) -> None:
        """Sends what may go out, at most so many packets; asks for a turn when more could follow."""
        while self._out and self._may_send and packets:
            if not self._connection.writable:
                break
            packets -= 1
            first = self._out[0]
            size = min(len(first), self._may_send, self._packet)
            self._may_send -= size
            self._out_bytes -= size
            self._connection.send(b"".join((self._data_head, size.to_bytes(4, "big"), first[:size])))
            if size == len(first):
                self._out.popleft()
            else:
                self._out[0] = first[size:]
        if self._out and self._may_send and not self._in_turn:
            self._in_turn = True
            self._connection.give_turn(self)
        if not self._out:
            self._say_end()
        if self._protocol_paused and self._out_bytes <= self._low and not self._closing:
            self._protocol_paused = False
            self._loop.call_soon(self._protocol.resume_writing)

    def _say_end(self) -> None:
        if self._eof_wanted and not self._eof_sent and not self._close_sent:
            self._eof_sent = True
            self._connection.send(_EOF + self.remote.to_bytes(4, "big"))
        if self._closing:
            self._say_close()
            self._loop.call_soon(self._lose)

    def _say_close(self) -> None:
        if not self._close_sent:
            self._close_sent = True
            self._connection.send(_CLOSE + self.remote.to_bytes(4, "big"))
            self._connection.forget(self._number)

    def _drop_output(self) -> None:
        self._out.clear()
        self._out_bytes = 0

    # ---- ending ----

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Ends the stream once what was written is on its way."""
        if not self._closing:
            self._closing = True
            self._inbox.clear()
            self._push()

    def abort(self) -> None:
        """Ends the stream at once; what was written may be lost."""
        self._drop_output()
        if self._closing:
            self._push()
        self.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol  # type: ignore[assignment]

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def _lose(self) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._drop_output()
        self._inbox.clear()
        self._connection.forget(self._number)
        self._protocol.connection_lost(None)
