"""A whole node over SSH: an image brought to it, a notebook reached through a tunnel, faults survived."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from agents.link import AgentError, Link, OutcomeUnknownError
from agents.ssh import NodeUnreachableError, SshTarget, connect_with_key
from agents.tunnel.pool import PortRefusedError, TunnelError, TunnelPool
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.rig.rig import Rig
from tests.time_budget import budget_s

pytestmark = pytest.mark.rig

TOKEN = "only-the-gateway-knows"
LAB = ["jupyter-lab", "--port={port}", "--ServerApp.base_url=/"]
MakeRig = Callable[..., Rig]


def spec(link: Link, job: str, image: RigImage, command: list[str], **more: Any) -> dict[str, Any]:
    return {
        "cluster": "rig", "job": job, "attempt": 1, "task": 0, "digest": "d1", "runtime": "podman",
        "image": image.name, "command": command, "uid": 20001, "gid": 20001, "user": "ada", "memory_mib": 1024,
        "gpus": [{"uuid": link.hello.gpus[0].uuid, "milli": 1000}],
        "mounts": [{"kind": "home", "source": "ada", "target": "/home/ada"}], **more,
    }  # fmt: skip


def states(link: Link) -> dict[str, str]:
    return {row["job"]: row["state"] for row in link.request("list", timeout_s=10)["containers"]}


def enrolled(make_rig: MakeRig, cluster: RigCluster, *stores: RigImage) -> RigNode:
    node = make_rig(1, image_stores=[image.store for image in stores]).nodes[0]
    cluster.enrol(node)
    return node


class TunnelConnector(aiohttp.BaseConnector):
    """aiohttp over a tunnel, as the gateway has it."""

    def __init__(self, pool: TunnelPool, place: SshTarget, port: int) -> None:
        super().__init__()
        self._way = (pool, place, port)

    async def _create_connection(self, *_: object) -> Any:
        pool, place, port = self._way
        factory: Any = lambda: aiohttp.client_proto.ResponseHandler(self._loop)  # noqa: E731
        _, protocol = await pool.create_connection(factory, place, port)
        return protocol


async def first_answer(session: aiohttp.ClientSession, url: str, limit_s: float = 30) -> int:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            async with session.get(url) as answer:
                return answer.status
        except (aiohttp.ClientError, OSError):
            assert time.monotonic() < deadline_s, "the notebook never answered"
            await asyncio.sleep(0.1)


async def test_a_notebook_is_reached_through_the_tunnel_with_its_secret_only(
    make_rig: MakeRig, rig_cluster: RigCluster, lab_image: RigImage
) -> None:
    node = enrolled(make_rig, rig_cluster, lab_image)
    with rig_cluster.open(node) as link:
        lab = spec(link, "labjob2345", lab_image, LAB, ports=[8888], secret_files={"token": TOKEN})
        started = link.request("start", timeout_s=30, epoch=1, spec=lab)
        pool = TunnelPool(rig_cluster.keys["tunnel"])
        connector = TunnelConnector(pool, rig_cluster.target(node), started["ports"]["8888"])
        async with aiohttp.ClientSession(connector=connector) as session:
            assert await first_answer(session, "http://ws-labjob2345.localhost/api/status") == 403
            mine = {"Authorization": f"token {TOKEN}"}
            async with session.get("http://ws-labjob2345.localhost/api/status", headers=mine) as answer:
                assert answer.status == 200
            async with session.post("http://ws-labjob2345.localhost/api/kernels", headers=mine) as answer:
                kernel = (await answer.json())["id"]
            url = f"http://ws-labjob2345.localhost/api/kernels/{kernel}/channels"
            async with session.ws_connect(url, headers=mine) as socket:
                assert await run_cell(socket, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])") == (
                    link.hello.gpus[0].uuid
                )
        await pool.close()
        assert TOKEN not in node.execute("sh", "-c", "cat /proc/*/cmdline /proc/*/environ; true").stdout
        log = base64.b64decode(link.request("logs", timeout_s=10, job="labjob2345", attempt=1, task=0, offset=0,
                                        limit=262_144)["data_b64"])  # fmt: skip
        assert TOKEN.encode() not in log
        stop_and_wait(link, "labjob2345")


async def run_cell(socket: aiohttp.ClientWebSocketResponse, code: str) -> str:
    """Runs a cell over the kernel's socket and gives what it printed."""
    content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}}
    header = {"msg_id": "m1", "msg_type": "execute_request", "session": "s", "username": "", "version": "5.3"}
    await socket.send_json(
        {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    )
    async with asyncio.timeout(30):
        async for message in socket:
            said = message.json()
            if said["msg_type"] == "stream" and said["parent_header"].get("msg_id") == "m1":
                return str(said["content"]["text"]).strip()
    raise AssertionError("the kernel said nothing")


def stop_and_wait(link: Link, job: str) -> None:
    deadline_s = time.monotonic() + 20
    while not link.request("stop", timeout_s=20, epoch=1, job=job, attempt=1, grace_s=1).get("gone"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_an_image_is_copied_as_a_file_and_then_runs(
    make_rig: MakeRig, rig_cluster: RigCluster, tiny_image: RigImage
) -> None:
    node = enrolled(make_rig, rig_cluster)
    with rig_cluster.open(node) as control, rig_cluster.open(node, "bulk") as bulk:
        task = spec(control, "imgjob2345", tiny_image, ["sleep", "60"])
        with pytest.raises(AgentError) as missing:
            control.request("start", timeout_s=20, epoch=1, spec=task)
        assert missing.value.code == "image_missing"
        offset = 0
        with tiny_image.archive.open("rb") as archive:
            while piece := archive.read(512 * 1024):
                data = base64.b64encode(piece).decode()
                bulk.request("load", timeout_s=20, upload="tiny", offset=offset, data_b64=data)
                offset += len(piece)
        loaded = bulk.request("load", timeout_s=60, upload="tiny", last=True)["image"]
        assert loaded["image_id"] == tiny_image.digest
        assert control.request("start", timeout_s=20, epoch=1, spec=task)["state"] == "running"


def test_a_partition_stops_no_task_and_is_reported_as_unknown(
    make_rig: MakeRig, rig_cluster: RigCluster, tiny_image: RigImage
) -> None:
    node = enrolled(make_rig, rig_cluster, tiny_image)
    link = rig_cluster.open(node)
    link.request("start", timeout_s=20, epoch=1, spec=spec(link, "cutjob2345", tiny_image, ["sleep", "600"]))
    target = rig_cluster.target(node)
    node.cut()
    with pytest.raises(OutcomeUnknownError):
        link.request("list", timeout_s=1)
    with pytest.raises(NodeUnreachableError):
        connect_with_key(target, rig_cluster.keys["control"])
    node.heal()
    link.close()
    with rig_cluster.open(node) as again:
        assert states(again) == {"cutjob2345": "running"}


async def test_a_tunnel_through_a_partition_times_out_and_is_reopened(
    make_rig: MakeRig, rig_cluster: RigCluster
) -> None:
    node = enrolled(make_rig, rig_cluster)
    pool, target = TunnelPool(rig_cluster.keys["tunnel"]), rig_cluster.target(node)
    with pytest.raises(PortRefusedError):
        await pool.open_stream(target, 9)  # the way is there; nothing listens
    node.cut()
    try:
        for words in ("no longer responds", "does not respond within 5 s"):
            began_s = time.monotonic()
            with pytest.raises(TunnelError, match=words):
                await pool.open_stream(target, 9)
            assert time.monotonic() - began_s < budget_s(10)
    finally:
        node.heal()
    await asyncio.sleep(1.1)
    with pytest.raises(PortRefusedError):
        await pool.open_stream(target, 9)
    await pool.close()


def test_after_a_reboot_no_task_runs_and_the_boot_id_differs(
    make_rig: MakeRig, rig_cluster: RigCluster, tiny_image: RigImage
) -> None:
    node = enrolled(make_rig, rig_cluster, tiny_image)
    with rig_cluster.open(node) as link:
        before = link.hello.boot_id
        link.request(
            "start", timeout_s=20, epoch=1, spec=spec(link, "bootjob234", tiny_image, ["sleep", "600"])
        )
    node.reboot()
    with rig_cluster.open(node) as link:
        assert link.hello.boot_id not in ("", before)
        rows = link.request("list", timeout_s=10)["containers"]
        assert all(row["state"] == "exited" and row["rebooted"] for row in rows)
        link.request(
            "start", timeout_s=20, epoch=1, spec=spec(link, "nextjob234", tiny_image, ["sleep", "600"])
        )


def test_a_full_disk_refuses_with_the_reason_and_heals(
    make_rig: MakeRig, rig_cluster: RigCluster, tiny_image: RigImage
) -> None:
    node = enrolled(make_rig, rig_cluster, tiny_image)
    with rig_cluster.open(node) as link:
        task = spec(link, "fulljob234", tiny_image, ["sleep", "600"])
        node.fill_disk()
        with pytest.raises(AgentError) as full:
            link.request("start", timeout_s=20, epoch=1, spec=task)
        assert full.value.code == "disk_full"
        node.free_disk()
        assert link.request("start", timeout_s=20, epoch=1, spec=task)["state"] == "running"
