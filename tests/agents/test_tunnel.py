"""Streams to job ports: what goes in comes out, refusals are told apart, broken connections are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agents.keys import PURPOSES, Purpose, read_public_key
from agents.ssh import SshTarget
from agents.tunnel.pool import JOB_ADDRESS, LocalTarget, PortRefusedError, TunnelError, TunnelPool
from tests.rig.fake_agent import echo_agent
from tests.rig.loopback import LoopbackSshd, loopback_sshd
from tests.rig.needs import missing_for_loopback
from tests.time_budget import budget_s

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
MIB = 1024 * 1024


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def job_server(handler: Handler = echo) -> AsyncIterator[int]:
    """A server where a job's port would be published on this machine."""
    server = await asyncio.start_server(handler, JOB_ADDRESS, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.fixture
async def pool(key_pairs: dict[Purpose, Path]) -> AsyncIterator[TunnelPool]:
    made = TunnelPool(key_pairs["tunnel"])
    yield made
    await made.close()


@pytest.mark.parametrize("local", [True, False], ids=["local", "ssh"])
async def test_bytes_arrive_unchanged(pool: TunnelPool, target: SshTarget, local: bool) -> None:
    sent = bytes(range(256)) * 4096 * 8  # 8 MiB, several windows
    async with job_server() as port:
        reader, writer = await pool.open_stream(LocalTarget() if local else target, port)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read(-1) == sent
        writer.close()
        await writer.wait_closed()


async def test_a_server_that_sends_first_is_received(pool: TunnelPool, target: SshTarget) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome\n")
        writer.close()

    async with job_server(greet) as port:
        for _ in range(20):
            reader, writer = await pool.open_stream(target, port)
            assert await reader.read(-1) == b"welcome\n"
            writer.close()
            await writer.wait_closed()  # the server's own end is no loss


async def test_forty_streams_share_one_connection(
    pool: TunnelPool, target: SshTarget, sshd: LoopbackSshd
) -> None:
    async def talk(port: int, number: int) -> bool:
        reader, writer = await pool.open_stream(target, port)
        message = number.to_bytes(4, "big") * 50_000
        writer.write(message)
        back = await reader.readexactly(len(message))
        writer.close()
        return back == message

    async with job_server() as port:
        assert all(await asyncio.gather(*(talk(port, number) for number in range(40))))
    assert (sshd.folder / "sshd.log").read_text().count("Accepted publickey") == 1


async def test_a_closed_port_and_no_route_are_distinguished(pool: TunnelPool, target: SshTarget) -> None:
    async with job_server() as port:
        pass
    with pytest.raises(PortRefusedError, match=f"Nothing listens on port {port}"):
        await pool.open_stream(target, port)
    with pytest.raises(PortRefusedError):
        await pool.open_stream(LocalTarget(), port)
    with pytest.raises(TunnelError, match="no sshd listens on the port"):
        await pool.open_stream(replace(target, port=port), port)


async def test_the_tunnel_key_opens_job_ports_only(
    pool: TunnelPool, target: SshTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.tunnel.pool.JOB_ADDRESS", "127.0.0.1")
    with pytest.raises(TunnelError, match="does not allow tunnels"):
        await pool.open_stream(target, target.port)


async def test_a_broken_connection_ends_its_streams_and_the_next_one_works(
    pool: TunnelPool, target: SshTarget, sshd: LoopbackSshd
) -> None:
    async with job_server() as port:
        reader, writer = await pool.open_stream(target, port)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        sshd.kill_sessions()
        with pytest.raises(ConnectionResetError, match="the connection to the node was lost"):
            await asyncio.wait_for(writer.wait_closed(), 5)
        reader, writer = await pool.open_stream(target, port)
        writer.write(b"after")
        assert await reader.readexactly(5) == b"after"
        writer.close()


async def test_a_slow_reader_slows_the_sender_to_one_window(pool: TunnelPool, target: SshTarget) -> None:
    sent = 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(bytes(MIB))
                await writer.drain()
                sent += 1

    async with job_server(pour) as port:
        reader, writer = await pool.open_stream(target, port)
        await asyncio.sleep(1.0)
        assert sent < 32  # kernel buffers and one window took some, and then it stood
        received = 0
        while received < 64 * MIB:
            received += len(await reader.read(MIB))
        writer.close()


async def test_an_idle_connection_is_closed_and_opened_again_when_needed(
    key_pairs: dict[Purpose, Path], target: SshTarget, sshd: LoopbackSshd
) -> None:
    pool = TunnelPool(key_pairs["tunnel"], idle_timeout_s=0.3)
    log = sshd.folder / "sshd.log"
    async with job_server() as port:
        for turn in (1, 2):
            reader, writer = await pool.open_stream(target, port)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            await asyncio.sleep(0.8)  # a stream in use keeps its connection
            writer.write(b"y")
            assert await reader.readexactly(1) == b"y"
            writer.close()
            await asyncio.sleep(1.2)
            assert log.read_text().count("Accepted publickey") == turn
    await pool.close()


async def test_new_keys_are_exchanged_under_running_streams(
    tmp_path: Path, key_pairs: dict[Purpose, Path]
) -> None:
    if reason := missing_for_loopback():
        pytest.skip(reason)
    options = "LogLevel DEBUG1\nRekeyLimit 4M\n"
    public = {purpose: read_public_key(key_pairs[purpose]) for purpose in PURPOSES}
    sent = bytes(range(256)) * 4096 * 16
    with loopback_sshd(tmp_path, echo_agent(), public, options=options) as sshd:
        pool = TunnelPool(key_pairs["tunnel"])
        target = SshTarget(sshd.host, sshd.account, sshd.host_key, sshd.port)

        async def talk(port: int) -> bool:
            reader, writer = await pool.open_stream(target, port)
            reading = asyncio.create_task(reader.readexactly(len(sent)))
            writer.write(sent)
            back = await asyncio.wait_for(reading, 60)
            writer.close()
            return back == sent

        async with job_server() as port:
            assert all(await asyncio.gather(talk(port), talk(port), talk(port)))
        await pool.close()
        log = (tmp_path / "sshd.log").read_text()
        assert log.count("rekeying") >= 8  # said for each direction
        assert log.count("Accepted publickey") == 1


async def test_a_port_that_accepts_nothing_does_not_affect_others(
    pool: TunnelPool, target: SshTarget
) -> None:
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind((JOB_ADDRESS, 0))
        full.listen(0)
        for _ in range(2):  # the kernel's queue is full now: who comes next waits
            knock = waiting.enter_context(socket.socket())
            knock.setblocking(False)
            knock.connect_ex(full.getsockname())
        async with job_server() as port:
            reader, writer = await pool.open_stream(target, port)
            began_s = time.monotonic()
            with pytest.raises(PortRefusedError, match="accepts no connections"):
                await pool.open_stream(target, full.getsockname()[1])
            assert time.monotonic() - began_s < budget_s(8)
            writer.write(b"still here")
            assert await reader.readexactly(10) == b"still here"
            writer.close()


async def test_an_error_of_one_protocol_does_not_affect_another(pool: TunnelPool, target: SshTarget) -> None:
    class Clumsy(asyncio.Protocol):
        def __init__(self) -> None:
            self.lost = asyncio.get_running_loop().create_future()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(b"hello")

        def data_received(self, data: bytes) -> None:
            raise LookupError("clumsy")

        def connection_lost(self, problem: Exception | None) -> None:
            self.lost.set_result(None)

    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    async with job_server() as port:
        reader, writer = await pool.open_stream(target, port)
        _, clumsy = await pool.create_connection(Clumsy, target, port)
        await asyncio.wait_for(clumsy.lost, 5)
        writer.write(b"fine")
        assert await reader.readexactly(4) == b"fine"
        writer.close()
    assert reported == ["a protocol failed"]


async def test_cancelling_a_connection_attempt_leaves_nothing(pool: TunnelPool, target: SshTarget) -> None:
    accepted: list[asyncio.StreamReader] = []

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(reader)
        assert await reader.read() == b""
        writer.close()
        accepted.remove(reader)

    async with job_server(count) as port:
        for pause_s in (0.0, 0.01, 0.2, 0.0, 0.001, 0.002, 0.005):
            opening = asyncio.create_task(pool.open_stream(target, port))
            await asyncio.sleep(pause_s)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await opening)[1].close()
        await asyncio.sleep(0.3)
        assert accepted == []
