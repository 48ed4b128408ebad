"""Real agents of this machine with pretend GPUs, and a web process that serves sockets in a thread."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from django.db import connections

from agents.local import open_local
from portal.asgi import application
from portal.gateway.access.authorization import _close_connection
from portal.live.websocket import permission_recheck
from portal.models import ClusterSettings, Node, User
from tests import factories
from tests.agent_program import copy_agent_program
from tests.gateway.gateway_harness import Testbed, sign_in


def local_node(folder: Path, *, gpus: int = 2, name: str = "") -> Node:
    """A node whose agent runs here, with pretend GPUs; the agent stands where ``up`` leaves it."""
    copy_agent_program(folder / "data" / "agent" / "agent.pyz")
    row = factories.node(factories.pool(), gpus=gpus, runtime="process", transport="local", name=name)
    uuids = [gpu.uuid for gpu in row.gpus.all()]
    # Tasks run under accounts of their own, which may not enter pytest's folders.
    place = Path(tempfile.mkdtemp(prefix="fairway-node-", dir="/var/tmp"))
    place.chmod(0o755)
    weakref.finalize(row, shutil.rmtree, place, ignore_errors=True)
    pretend = place / "gpus.json"
    pretend.write_text(
        json.dumps({"gpus": [{"uuid": uuid, "model": "Test 80", "memory_mib": 81920} for uuid in uuids]})
    )
    cluster = ClusterSettings.objects.get_or_create(id=1)[0].cluster_id
    row.settings = {
        "cluster": cluster,
        "state_dir": str(place / "state"),
        "home_root": str(place / "homes"),
        "gpu_provider": f"file:{pretend}",
        "runtimes": [{"kind": "process"}],
        "firewall": False,
    }
    row.save()
    return row


@contextmanager
def control(node: Node, folder: Path) -> Iterator[Any]:
    """A control link to a local node, to start tasks on it."""
    path = folder / f"{node.public_id}.control.json"
    path.write_text(json.dumps(node.settings))
    with open_local(
        folder / "data" / "agent" / "agent.pyz",
        "control",
        path,
        cluster=node.settings["cluster"],
        python=sys.executable,
    ) as link:
        yield link


class LiveTestbed(Testbed):
    """The web process alone."""

    async def _start(self) -> None:
        server = await self.serve(application, host="127.0.0.1", port=0)
        self.port = server.servers[0].sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        await super()._stop()
        together = threading.Barrier(4)
        for _ in range(4):
            permission_recheck._threads.submit(_close_connection, together)
        permission_recheck._recheck_thread.submit(connections.close_all)


class Browser:
    """One live socket of a person."""

    def __init__(
        self, port: int, person: User | str, *, origin: str | None = "http://localhost:8000"
    ) -> None:
        self._url = f"http://127.0.0.1:{port}/live/"
        self._person = person
        self._headers: dict[str, str] = {}
        self._told: deque[dict[str, Any]] = deque()
        self.subscribed: list[str] = []
        if origin:
            self._headers["Origin"] = origin

    async def __aenter__(self) -> Browser:
        key = self._person
        if isinstance(key, User):
            key = await asyncio.to_thread(_signed_in, key)
        self._headers["Cookie"] = f"fairway_session={key}"
        self._session = aiohttp.ClientSession()
        self.socket = await self._session.ws_connect(self._url, headers=self._headers, max_msg_size=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.socket.close()
        await self._session.close()

    async def say(self, **words: Any) -> None:
        await self.socket.send_str(json.dumps(words))

    async def subscribe(self, *topics: str, **words: Any) -> list[dict[str, Any]]:
        """Subscribes and waits until that stands; what was told before. The next ``hear`` hears it again."""
        await self.say(subscribe=list(topics), **words)
        reported: list[dict[str, Any]] = []
        async with asyncio.timeout(5):
            while not reported or "subscribed" not in reported[-1]:
                reported.append(await self._next())
        self.subscribed = reported.pop()["subscribed"]
        self._told.extend(reported)
        return reported

    async def _next(self) -> dict[str, Any]:
        message = await self.socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"closed with {self.socket.close_code}")
        reported: dict[str, Any] = json.loads(message.data)
        return reported

    async def hear(self, within_s: float = 5.0, **wanted: Any) -> dict[str, Any]:
        """The next message; with ``kind=`` or ``topic=`` the next one like that."""
        async with asyncio.timeout(within_s):
            while True:
                reported = self._told.popleft() if self._told else await self._next()
                found = {"topic": reported.get("topic"), "kind": (reported.get("data") or {}).get("kind")}
                if all(found[name] == value for name, value in wanted.items()):
                    return reported

    async def closed(self, within_s: float = 5.0) -> int | None:
        """The closing code, once the socket is closed."""
        async with asyncio.timeout(within_s):
            while (await self.socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
        return self.socket.close_code


def browser_of(testbed: LiveTestbed, user: User) -> Browser:
    """A browser of this person."""
    return Browser(testbed.port, user)


def _signed_in(user: User) -> str:
    try:
        return sign_in(user)
    finally:
        connections.close_all()
