"""One SSH channel as an asyncio transport: bytes go from the SSH thread to the protocol without a copy between."""

from __future__ import annotations

import asyncio
import contextlib
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

HIGH_WATER_BYTES = 512 * 1024
LOW_WATER_BYTES = 128 * 1024
DIRECT_SEND_BYTES = 16 * 1024


class Inbox:
    """What has come in on a channel and was not yet delivered; stands where paramiko keeps its own buffer.

    The SSH thread feeds it. At most one receive window waits in it: the window is opened again as the
    protocol takes the bytes, so a slow reader slows the sender on the node and costs no memory here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: deque[bytes] = deque()
        self._ended = False
        self._told = False
        self._stream: ChannelStream | None = None

    def attach(self, stream: ChannelStream) -> None:
        """Sends what is here, and what will come, to this stream."""
        with self._lock:
            self._stream = stream
            self._told = True
        stream.tell_from_ssh_thread()

    def feed(self, data: bytes) -> None:
        with self._lock:
            self._chunks.append(data)
            stream = self._claim_telling()
        if stream is not None:
            stream.tell_from_ssh_thread()

    def close(self) -> None:
        with self._lock:
            self._ended = True
            stream = self._claim_telling()
        if stream is not None:
            stream.tell_from_ssh_thread()

    def take(self) -> tuple[bytes, bool]:
        """Gives all that waits, and whether nothing will follow."""
        with self._lock:
            self._told = False
            chunks, ended = self._chunks, self._ended
            self._chunks = deque()
        return (chunks[0] if len(chunks) == 1 else b"".join(chunks)), ended

    def set_event(self, event: threading.Event) -> None:
        """Part of paramiko's interface; nobody waits on events here."""

    def read_ready(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def _claim_telling(self) -> ChannelStream | None:
        if self._stream is None or self._told:
            return None
        self._told = True
        return self._stream


class WindowCondition(threading.Condition):
    """Paramiko's condition for "the peer takes more now", which tells our sender too."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.stream: ChannelStream | None = None

    def notify_all(self) -> None:
        super().notify_all()
        if self.stream is not None:
            self.stream.sender.offer(self.stream)


class Sender:
    """The thread that writes to one SSH connection, in turns of one packet for each channel with something to say.

    Writing to the connection can block (full socket, new keys), which the event loop must not.
    """

    def __init__(self, connection_name: str) -> None:
        self._ready: deque[ChannelStream] = deque()
        self._queued: set[ChannelStream] = set()
        self._changed = threading.Condition()
        self._busy = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"tunnel {connection_name}", daemon=True)
        self._thread.start()

    def offer(self, stream: ChannelStream) -> None:
        """Puts a channel into the round, once."""
        with self._changed:
            if stream not in self._queued and not self._stopped:
                self._queued.add(stream)
                self._ready.append(stream)
                self._changed.notify()

    def is_idle(self) -> bool:
        return not self._busy and not self._ready

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not self._ready and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                stream = self._ready.popleft()
                self._queued.discard(stream)
                self._busy = True
            if stream.send_one_packet():
                self.offer(stream)


class ChannelStream(asyncio.Transport):
    """The asyncio side of one channel. Every method is called on the event loop unless its name says otherwise."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: Any,
        sender: Sender,
        protocol: asyncio.Protocol,
        peer: str,
        on_lost: Callable[[ChannelStream], None],
    ) -> None:
        super().__init__(extra={"peername": peer})
        self._loop = loop
        self._channel = channel
        self._protocol = protocol
        self.sender = sender
        self._on_lost = on_lost
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._out_lock = threading.Lock()
        self._eof_wanted = False
        self._owed_window = 0
        self._reading = True
        self._pending_in = False
        self._saw_eof = False
        self._closing = False
        self._lost = False
        self._protocol_paused = False
        self._high, self._low = HIGH_WATER_BYTES, LOW_WATER_BYTES
        self._poll = select.poll()
        with contextlib.suppress(OSError, ValueError):
            self._poll.register(channel.transport.sock, select.POLLOUT)
        channel.settimeout(0.0)
        protocol.connection_made(self)
        channel.out_buffer_cv.stream = self
        channel.in_buffer.attach(self)

    # ---- reading ----

    def tell_from_ssh_thread(self) -> None:
        """Wakes the event loop; called on the SSH connection's own thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everyone who would read
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        if self._lost:
            return
        if not self._reading:
            self._pending_in = True
            return
        data, ended = self._channel.in_buffer.take()
        if data:
            if not self._closing:
                self._protocol.data_received(data)
            self._return_window(len(data))
        if ended and not self._saw_eof:
            self._saw_eof = True
            if not self._closing and not self._protocol.eof_received():
                self.close()
        if ended and self._channel.closed:
            self._lose(None)

    def _return_window(self, size: int) -> None:
        grown = self._channel._check_add_window(size)
        if grown > 0:
            with self._out_lock:
                self._owed_window += grown
            self.sender.offer(self)

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        if self._pending_in:
            self._pending_in = False
            self._loop.call_soon(self._deliver)

    # ---- writing ----

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._eof_wanted or not data:
            return
        if not self._out_bytes and len(data) <= DIRECT_SEND_BYTES and self._send_directly(data):
            return
        with self._out_lock:
            self._out.append(memoryview(bytes(data)))
            self._out_bytes += len(data)
        self.sender.offer(self)
        if self._out_bytes > self._high and not self._protocol_paused:
            self._protocol_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        with self._out_lock:
            self._eof_wanted = True
        self.sender.offer(self)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self._out_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def _send_directly(self, data: bytes | bytearray | memoryview) -> bool:
        """Sends a small message without a change of thread, when nothing on the way can make it wait."""
        channel = self._channel
        if (
            not self.sender.is_idle()
            or channel.out_window_size < len(data)
            or not channel.transport.clear_to_send.is_set()
            or not self._poll.poll(0)
        ):
            return False
        try:
            sent = channel.send(bytes(data))
        except OSError:
            return False
        if sent < len(data):
            with self._out_lock:
                self._out.appendleft(memoryview(bytes(data))[sent:])
                self._out_bytes += len(data) - sent
            self.sender.offer(self)
        return True

    def send_one_packet(self) -> bool:
        """Sends at most one packet of data and says whether more waits; called on the sender's thread."""
        with self._out_lock:
            owed, self._owed_window = self._owed_window, 0
            data = self._out[0] if self._out else None
            finish = data is None and (self._eof_wanted or self._closing)
        try:
            if owed:
                self._adjust_window(owed)
            if data is not None:
                sent = self._channel.send(data)
                return self._after_sending(data, sent)
            if finish:
                self._finish()
        except TimeoutError:
            return False  # the window is shut; its condition offers us again
        except (OSError, EOFError):
            self._drop_output()
        return False

    def _after_sending(self, data: memoryview, sent: int) -> bool:
        if sent == 0:  # the channel is closed
            self._drop_output()
            return False
        with self._out_lock:
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = data[sent:]
            self._out_bytes -= sent
            waits = bool(self._out) or self._eof_wanted or self._closing
            relieved = self._protocol_paused and self._out_bytes <= self._low
        if relieved:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._resume_protocol)
        return waits

    def _finish(self) -> None:
        if self._closing:
            self._channel.close()
            self.tell_lost_from_sender()
        else:
            self._channel.shutdown_write()

    def _adjust_window(self, size: int) -> None:
        self._channel.transport.open_window(self._channel.remote_chanid, size)

    def _drop_output(self) -> None:
        with self._out_lock:
            self._out.clear()
            self._out_bytes = 0
            closing = self._closing
        if closing:
            self.tell_lost_from_sender()

    def tell_lost_from_sender(self) -> None:
        """Lets the loop end the protocol; called on the sender's thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lose, None)

    def _resume_protocol(self) -> None:
        if self._protocol_paused and self._out_bytes <= self._low:
            self._protocol_paused = False
            self._protocol.resume_writing()

    # ---- ending ----

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Ends the stream once what was written is on its way."""
        if self._closing:
            return
        self._closing = True
        self.sender.offer(self)

    def abort(self) -> None:
        """Ends the stream at once; what was written may be lost."""
        with self._out_lock:
            self._out.clear()
            self._out_bytes = 0
        self.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol  # type: ignore[assignment]

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._drop_output()
        self._protocol.connection_lost(error)
        self._on_lost(self)
        self.sender.offer(self)
