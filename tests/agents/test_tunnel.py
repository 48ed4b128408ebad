"""Streams to job ports: what goes in comes out, refusals are told apart, broken connections are replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agents.keys import Purpose
from agents.ssh import SshTarget
from agents.tunnel import JOB_ADDRESS, LocalPlace, PortRefused, TunnelError, TunnelPool
from tests.rig.loopback import LoopbackSshd

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
async def test_bytes_come_back_unchanged(pool: TunnelPool, target: SshTarget, local: bool) -> None:
    sent = bytes(range(256)) * 4096 * 8  # 8 MiB, several windows
    async with job_server() as port:
        reader, writer = await pool.open_stream(LocalPlace() if local else target, port)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read(-1) == sent
        writer.close()
        await writer.wait_closed()


async def test_a_server_that_speaks_first_is_heard(pool: TunnelPool, target: SshTarget) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome\n")
        writer.close()

    async with job_server(greet) as port:
        for _ in range(20):
            reader, writer = await pool.open_stream(target, port)
            assert await reader.read(-1) == b"welcome\n"
            writer.close()


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


async def test_nothing_listening_is_told_from_no_way_there(pool: TunnelPool, target: SshTarget) -> None:
    async with job_server() as port:
        pass
    with pytest.raises(PortRefused, match=f"Nothing listens on port {port}"):
        await pool.open_stream(target, port)
    with pytest.raises(PortRefused):
        await pool.open_stream(LocalPlace(), port)
    with pytest.raises(TunnelError, match="no sshd listens there"):
        await pool.open_stream(replace(target, port=port), port)


async def test_the_tunnel_key_opens_job_ports_only(
    pool: TunnelPool, target: SshTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.tunnel.JOB_ADDRESS", "127.0.0.1")
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
        assert await asyncio.wait_for(reader.read(1), 5) == b""
        writer.close()
        reader, writer = await pool.open_stream(target, port)
        writer.write(b"after")
        assert await reader.readexactly(5) == b"after"
        writer.close()


async def test_a_slow_reader_slows_the_sender_and_holds_no_more_than_a_window(
    pool: TunnelPool, target: SshTarget
) -> None:
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
    pool = TunnelPool(key_pairs["tunnel"], idle_close_s=0.3)
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
