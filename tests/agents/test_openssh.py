"""The ssh process of a node: its refusals become our sentences, and it never outlives who started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents.connection_test import StepOutcome, run_connection_test
from agents.keys import Purpose, fingerprint, make_keys, read_public_key
from agents.ssh import SshTarget
from agents.tunnel.pool import PortRefusedError, TunnelError, TunnelPool
from tests.agents.test_tunnel import job_server
from tests.rig.loopback import LoopbackSshd
from tests.time_budget import budget_s

Keys = dict[Purpose, Path]
HOLDER = """
import asyncio, sys, uvloop
from pathlib import Path
from agents.ssh import SshTarget
from agents.tunnel.pool import TunnelPool

async def main(key, folder, host, account, host_key, port, job_port):
    pool = TunnelPool(Path(key), parent_dir=Path(folder))
    await pool.open_stream(SshTarget(host, account, host_key, int(port)), int(job_port))
    print("open", flush=True)
    await asyncio.sleep(60)

uvloop.run(main(*sys.argv[1:]))
"""


def clients_of(pid: int) -> list[int]:
    """The tunnels' ssh processes among the children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                if b"ControlMaster=yes" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
async def pool(key_pairs: Keys, tmp_path: Path) -> AsyncIterator[TunnelPool]:
    made = TunnelPool(key_pairs["tunnel"], parent_dir=tmp_path / "tunnels")
    yield made
    await made.close()


async def refusal(pool: TunnelPool, target: SshTarget, port: int = 9) -> str:
    began_s = time.monotonic()
    with pytest.raises(TunnelError) as refused:
        await pool.open_stream(target, port)
    assert time.monotonic() - began_s < budget_s(10)
    assert clients_of(os.getpid()) == []
    return str(refused.value)


async def test_a_different_host_key_is_named_and_nothing_is_sent(
    pool: TunnelPool, target: SshTarget, sshd: LoopbackSshd, key_pairs: Keys
) -> None:
    other = " ".join(read_public_key(key_pairs["watch"]).split()[:2])
    said = await refusal(pool, replace(target, host_key=other))
    assert (
        f"presents the host key {fingerprint(target.host_key)}, but {fingerprint(other)} was confirmed"
        in said
    )
    said = await refusal(pool, replace(target, host_key="ecdsa-sha2-nistp256 AAAA"))
    assert "has no host key of a supported type (ecdsa-sha2-nistp256)" in said
    assert "Accepted" not in (sshd.folder / "sshd.log").read_text()


async def test_a_refused_sign_in_and_a_key_of_another_role(
    key_pairs: Keys, target: SshTarget, tmp_path: Path
) -> None:
    outsider = TunnelPool(make_keys(tmp_path / "other", "x")["tunnel"])
    assert f"rejects the portal's key for the account {target.user}." in await refusal(outsider, target)
    await outsider.close()
    watcher = TunnelPool(key_pairs["watch"])
    with pytest.raises(TunnelError, match="does not allow tunnels"):
        await watcher.open_stream(target, 9)
    await watcher.close()


async def test_causes_of_unreachable_nodes_are_distinguished(pool: TunnelPool, target: SshTarget) -> None:
    assert "No address is known for no-such-node.invalid" in await refusal(
        pool, replace(target, host="no-such-node.invalid")
    )
    with contextlib.ExitStack() as stack:
        full, mute = stack.enter_context(socket.socket()), stack.enter_context(socket.socket())
        for listener in (full, mute):
            listener.bind(("127.0.0.1", 0))
        full.listen(0)
        mute.listen(5)
        for _ in range(2):  # the kernel's queue is full now: who comes next waits
            knock = stack.enter_context(socket.socket())
            knock.setblocking(False)
            knock.connect_ex(full.getsockname())
        silent, greeting = await asyncio.gather(
            refusal_alone(pool, replace(target, port=full.getsockname()[1])),
            refusal_alone(pool, replace(target, port=mute.getsockname()[1])),
        )
        assert "does not respond within 5 s: it is down, or a firewall is blocking." in silent
        assert "responds, but not as an SSH server: it did not finish the SSH handshake" in greeting


async def refusal_alone(pool: TunnelPool, target: SshTarget) -> str:
    began_s = time.monotonic()
    with pytest.raises(TunnelError) as refused:
        await pool.open_stream(target, 9)
    assert time.monotonic() - began_s < budget_s(10)
    return str(refused.value)


async def test_a_host_name_is_never_run_as_a_command(
    pool: TunnelPool, target: SshTarget, tmp_path: Path
) -> None:
    trace = tmp_path / "ran"
    for name in (f"-oProxyCommand=touch {trace}", f"x; touch {trace}", f"$(touch {trace})"):
        await refusal(pool, replace(target, host=name))
        await asyncio.sleep(1.1)
    await refusal(pool, replace(target, user=f"-oProxyCommand=touch {trace}"))
    assert not trace.exists()


async def test_a_frozen_node_is_left_and_found_again(
    pool: TunnelPool, target: SshTarget, sshd: LoopbackSshd
) -> None:
    async with job_server() as port:
        reader, writer = await pool.open_stream(target, port)
        sshd.freeze()
        try:
            assert "no longer responds" in await refusal_alone(pool, target)
            assert await asyncio.wait_for(reader.read(1), 5) == b""
        finally:
            sshd.thaw()
        writer.close()
        reader, writer = await pool.open_stream(target, port)
        writer.write(b"again")
        assert await reader.readexactly(5) == b"again"
        writer.close()


async def test_a_key_open_to_others_is_not_used(target: SshTarget, key_pairs: Keys, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(key_pairs["tunnel"].read_bytes())
    key.chmod(0o640)
    pool = TunnelPool(key)
    assert "accessible to other accounts (mode 640)" in await refusal(pool, target)
    key.unlink()
    await asyncio.sleep(1.1)
    assert "cannot read its tunnel key" in await refusal(pool, target)
    await pool.close()


async def test_a_machine_without_ssh_is_reported(
    pool: TunnelPool, target: SshTarget, key_pairs: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: Keys = {"control": key_pairs["control"]}
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "lacks the ssh client" in await refusal(pool, target)
    for held in (key_pairs, alone):  # the gateway may hold the tunnel key alone
        steps = {step.name: step for step in run_connection_test(target, held, "rig")}
        assert steps["tunnel"].outcome is StepOutcome.FAILED
        assert "apt-get install openssh-client" in steps["tunnel"].message


async def test_the_end_of_the_pool_is_the_end_of_its_processes(
    key_pairs: Keys, target: SshTarget, tmp_path: Path
) -> None:
    folder = tmp_path / ("deep-" * 30) / "and long"  # longer than the path of a socket may be
    pool = TunnelPool(key_pairs["tunnel"], parent_dir=folder)
    async with job_server() as port:
        reader, _ = await pool.open_stream(target, port)
        [client] = clients_of(os.getpid())
        [private] = folder.iterdir()
        assert private.stat().st_mode & 0o777 == 0o700
        await asyncio.wait_for(pool.close(), 5)
        with pytest.raises(ConnectionResetError):  # an end of the connection, not one of the server
            await reader.read(1)
    assert not lives(client)
    assert list(folder.iterdir()) == []


async def test_closing_the_pool_also_ends_connections_being_opened(
    pool: TunnelPool, target: SshTarget, sshd: LoopbackSshd
) -> None:
    sshd.freeze()
    opening = asyncio.create_task(pool.open_stream(target, 9))
    while not clients_of(os.getpid()):
        await asyncio.sleep(0.01)
    await asyncio.wait_for(pool.close(), 5)
    assert clients_of(os.getpid()) == []
    with pytest.raises(asyncio.CancelledError):
        await opening
    sshd.thaw()


async def test_a_killed_holder_leaves_no_process_and_its_folder_is_removed_later(
    key_pairs: Keys, target: SshTarget, tmp_path: Path
) -> None:
    folder = tmp_path / "tunnels"
    place = [target.host, target.user, target.host_key, str(target.port)]
    async with job_server() as port:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(key_pairs["tunnel"]), str(folder), *place, str(port)],
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == b"open\n"
        [client] = clients_of(holder.pid)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
        for _ in range(100):
            if not lives(client):
                break
            await asyncio.sleep(0.02)
        assert not lives(client)
        [left] = folder.iterdir()
        pool = TunnelPool(key_pairs["tunnel"], parent_dir=folder)
        _, writer = await pool.open_stream(target, port)
        assert not left.exists()
        writer.close()
        await pool.close()


async def test_a_stream_cut_short_is_cut_on_the_node_too(pool: TunnelPool, target: SshTarget) -> None:
    ended = asyncio.Event()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        ended.set()

    async with job_server(pour) as port:
        reader, writer = await pool.open_stream(target, port)
        await reader.readexactly(65536)
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 5)
    with pytest.raises(PortRefusedError):
        await pool.open_stream(target, port)


async def test_an_answer_in_small_pieces_does_not_wait_for_our_tcp(
    pool: TunnelPool, target: SshTarget
) -> None:
    async def piecemeal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(100):
                for _ in range(4):
                    writer.write(b"piece")
                    await asyncio.sleep(0.001)
        writer.close()

    took_s = []
    async with job_server(piecemeal) as port:
        reader, writer = await pool.open_stream(target, port)
        await asyncio.sleep(0.3)
        for _ in range(20):
            began_s = time.monotonic()
            writer.write(b"?")
            await reader.readexactly(20)
            took_s.append(time.monotonic() - began_s)
        writer.close()
    assert sorted(took_s)[10] < 0.03  # sshd would hold the second piece back for 40 ms
