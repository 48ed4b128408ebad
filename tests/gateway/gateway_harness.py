"""A gateway between real sockets: a tool on 127.77.0.1, a web process on a unix socket, and the record."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import httpx
import uvicorn
from aiohttp import web
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.db import connection, transaction

from portal.gateway import activity
from portal.gateway.app import Gateway
from portal.gateway.protocol.http_protocol import GatewayHttpProtocol
from portal.gateway.proxy.websocket_protocol import RawWebSocketProtocol
from portal.models import Attempt, Gpu, Job, Task, User
from portal.services.accounts.sessions import SessionStore
from portal.services.jobs.attempt_secrets import create_attempt_secret
from portal.services.lifecycle import job_control, readiness
from tests import factories

activity.POLL_INTERVAL_S = 3600.0  # tests poll when they want to


def sign_in(user: User) -> str:
    """The key of a live portal session of this person."""
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    return str(session.session_key)


def running_workspace(owner: User, *, port: int, ready: bool = True, node: Any = None) -> Job:
    """A workspace job whose server listens on ``port`` of a local node."""
    project = factories.project(member=owner)
    environment = factories.environment(runtime="process")
    node = node or factories.node(factories.pool(), runtime="process", transport="local")
    job = factories.job(owner, project, environment, kind="workspace")
    slot = job_control.RankPlacement(node, [(Gpu.objects.filter(node=node, used_milli=0).first().pk, 1000)])
    with transaction.atomic():
        attempt = job_control.start_attempt(
            job, node.pool, [slot], epoch=1, secret=create_attempt_secret(job)
        )
    task = Task.objects.get(attempt=attempt)
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={"8888": port})
    if ready:
        readiness.record_attempt_ready(attempt.pk)
    job.refresh_from_db()
    return job


def attempt_of(job: Job) -> Attempt:
    """The newest attempt of a job."""
    return Attempt.objects.select_related("job").filter(job=job).latest("number")


@dataclass
class Tool:
    """A server as a workspace runs it; remembers what reached it."""

    port: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{rest:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(
            {"method": request.method, "path": request.raw_path, "headers": list(request.raw_headers)}
        )
        match request.path:
            case "/socket":
                return await self.socket(request)
            case "/upload":
                digest, size = hashlib.sha256(), 0
                async for chunk in request.content.iter_any():
                    digest.update(chunk)
                    size += len(chunk)
                return web.json_response({"bytes": size, "sha256": digest.hexdigest()})
            case "/stream":
                response = web.StreamResponse()
                await response.prepare(request)
                for number in range(10_000):
                    await response.write(f"tick {number}\n".encode())
                    await asyncio.sleep(0.05)
                return response
            case "/unanswered":
                while request.transport is not None:  # until the gateway gives up
                    await asyncio.sleep(0.05)
            case "/echo":  # a page for debugging, byte by byte
                text = "".join(f"{name}: {value}\n" for name, value in request.headers.items()).encode()
                headers = {
                    "X-Echo": request.headers.get("Authorization", ""),
                    "Content-Length": str(len(text)),
                }
                response = web.StreamResponse(headers=headers)
                await response.prepare(request)
                for byte in text:
                    await response.write(bytes([byte]))
                    await asyncio.sleep(0)
                return response
            case "/compressed":
                return web.Response(body=b"?", headers={"Content-Encoding": "br"})
            case "/broken":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b"half")
                request.transport.close()
                return response
            case "/lost":
                if sum(each.get("path") == "/lost" for each in self.seen) % 2:
                    request.transport.close()  # the first of two requests gets no response
            case "/cookies":
                answer = web.Response(text="ok", headers={"Server": "tool", "X-Powered-By": "tool"})
                answer.headers.add("Set-Cookie", "mine=1; Domain=localhost; Path=/; HttpOnly")
                answer.headers.add("Set-Cookie", "fairway_session=stolen; Path=/")
                answer.headers.add("Set-Cookie", "__Host-fairway_workspace=stolen; Path=/")
                return answer
            case "/big":
                response = web.StreamResponse(headers={"Content-Length": str(64 << 20)})
                await response.prepare(request)
                for _ in range(64):
                    await response.write(b"x" * (1 << 20))
                return response
        return web.Response(text=f"tool at {request.raw_path}")

    async def socket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("kernel.v1", "other"), max_msg_size=0)
        await socket.prepare(request)
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                if message.data == "close 4123":
                    await socket.close(code=4123)
                    break
                await socket.send_str(message.data)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        self.seen.append({"closed": socket.close_code})
        return socket

    def headers(self, which: int = -1) -> dict[str, str]:
        """Headers of a request as the tool saw them."""
        pairs = [entry for entry in self.seen if "headers" in entry][which]["headers"]
        return {name.decode().lower(): value.decode() for name, value in pairs}


async def echo_web(scope: Any, receive: Any, send: Any) -> None:
    """A web process that says what it was asked."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": "web says " + message["text"]})
        return
    if scope["type"] != "http":
        return
    if scope["path"] == "/never":
        await asyncio.sleep(60)
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    reported = {
        "path": scope["raw_path"].decode(),
        "query": scope["query_string"].decode(),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        "body": base64.b64encode(body).decode(),
    }
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"set-cookie", b"fairway_session=s")]}
    )
    await send({"type": "http.response.body", "body": json.dumps(reported).encode()})


def in_thread(act: Callable[[], Any]) -> None:
    """Does something in a thread of its own, which leaves no connection behind."""
    try:
        act()
    finally:
        connection.close()


class Testbed:
    """Everything in one event loop of a thread of its own."""

    __test__ = False
    web_application: Callable[..., Any] = staticmethod(echo_web)

    def __init__(self, folder: Path) -> None:
        self.web_socket = str(folder / "web.sock")
        self.tool = Tool()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._servers: list[uvicorn.Server] = []
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Testbed:
        self._thread.start()
        self.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def call(self, work: Any) -> Any:
        """Runs a coroutine in the stand's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._runner = web.AppRunner(self.tool.application())
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.77.0.1", 0)
        await site.start()
        self.tool.port = self._runner.addresses[0][1]
        await self.serve(self.web_application, uds=self.web_socket)
        server = await self.serve(
            self._gateway(),
            host="127.0.0.1",
            port=0,
            http=GatewayHttpProtocol,
            ws=RawWebSocketProtocol,
            lifespan="on",
        )
        self.port = server.servers[0].sockets[0].getsockname()[1]

    def _gateway(self) -> Gateway:
        with mock.patch.dict(os.environ, FAIRWAY_WEB_SOCKET=self.web_socket):
            return Gateway()

    async def serve(self, app: Callable[..., Any], **options: Any) -> uvicorn.Server:
        """Serves an application as the real processes do."""
        config = uvicorn.Config(
            app,
            ws_per_message_deflate=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            **{"lifespan": "off", "http": "httptools", "ws": "websockets-sansio"} | options,
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None
        server.capture_signals = _NoSignals
        task = self._loop.create_task(server.serve())
        server.fairway_task = task
        while not server.started:
            await asyncio.sleep(0.01)
        self._servers.append(server)
        return server

    def stop_web(self) -> None:
        """The web process goes away."""
        self.call(self._stop_server(self._servers[0]))

    async def _stop_server(self, server: uvicorn.Server) -> None:
        server.should_exit = True
        await server.fairway_task

    async def _stop(self) -> None:
        for server in reversed(self._servers):
            if not server.fairway_task.done():
                await self._stop_server(server)
        if self._runner is not None:
            await self._runner.cleanup()

    # -- the browser's side ------------------------------------------------------------------------

    def host(self, job: Job | str) -> str:
        """The Host header of a workspace."""
        return f"ws-{job if isinstance(job, str) else job.public_id}.localhost:8000"

    def browser(self, job: Job | str | None = None) -> httpx.Client:
        """A browser at a workspace, or at the portal."""
        host = "localhost:8000" if job is None else self.host(job)
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Host": host, "Accept": "text/html", "User-Agent": "test"},
            timeout=15,
        )

    def enter(self, job: Job, ticket: str, **headers: str) -> httpx.Response:
        """Posts a ticket as the portal's page does."""
        with self.browser(job) as browser:
            return browser.post(
                "/.fairway/enter",
                data={"ticket": ticket},
                headers={"Origin": "http://localhost:8000"} | headers,
            )


class _NoSignals:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
