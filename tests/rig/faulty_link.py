"""A misbehaving wire in user space: delays, throttles, freezes or cuts the TCP connections that pass it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import Self

CHUNK_BYTES = 16 * 1024


@dataclass
class LinkConditions:
    """How the wire behaves; may be changed while connections are open."""

    delay_s: float = 0.0  # each way
    bytes_per_s: float | None = None  # each way and connection
    frozen: bool = False  # takes bytes from nobody and gives none, as a half-open connection does
    cut_after_bytes: int | None = None  # of both ways together, then both sides are reset


class FaultyLinkProxy:
    """Listens on the loopback address and passes connections on to a place, through its weather."""

    def __init__(self, host: str, port: int, weather: LinkConditions | None = None) -> None:
        self.weather = weather or LinkConditions()
        self.host = "127.0.0.1"
        self.port = 0
        self._place = (host, port)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weather-proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(5):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, self.host, 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        open_tasks = asyncio.all_tasks(self._loop)
        for task in open_tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*open_tasks, return_exceptions=True))
        for writer in self._writers:
            writer.transport.abort()
        self._loop.run_until_complete(asyncio.sleep(0))  # the sockets are closed in the next round
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._place)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        passed = _Passed()
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = self._loop.create_task(self._pass_on(source, sink, passed, (writer, far_writer)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        passed: _Passed,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        """Passes one direction on: a reading side and, so that delay costs no throughput, a delivering side."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def deliver() -> None:
            while True:
                due_s, data = await waiting.get()
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                while self.weather.frozen:
                    await asyncio.sleep(0.02)
                if not data:
                    with contextlib.suppress(OSError):
                        sink.write_eof()
                    return
                sink.write(data)
                await sink.drain()

        delivering = self._loop.create_task(deliver())
        with contextlib.suppress(OSError):
            while True:
                while self.weather.frozen:
                    await asyncio.sleep(0.02)
                data = await source.read(CHUNK_BYTES)
                passed.bytes += len(data)
                limit = self.weather.cut_after_bytes
                if limit is not None and passed.bytes > limit:
                    for writer in both:
                        writer.transport.abort()
                await waiting.put((self._loop.time() + self.weather.delay_s, data))
                if not data:
                    break
                if self.weather.bytes_per_s:
                    await asyncio.sleep(len(data) / self.weather.bytes_per_s)
            await delivering
        delivering.cancel()


@dataclass
class _Passed:
    bytes: int = 0
