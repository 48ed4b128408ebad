"""The processes that `up` runs on one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agents.keys import key_path
from portal.standalone.data_dir import DataDir
from portal.standalone.processes.orphan_processes import SUPERVISED_VARIABLE
from portal.standalone.processes.supervisor import Process, Supervisor
from portal.standalone.servers.server import Server

NOT_INHERITED = (
    "FAIRWAY_CONTROL_KEY",
    "FAIRWAY_WATCH_KEY",
    "FAIRWAY_TUNNEL_KEY",
    "FAIRWAY_SIGNING_KEY",
    "DATABASE_OWNER_URL",
    "FAIRWAY_IN_ENVIRONMENT",
)


LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ListenOptions:
    """Address and TLS files of the gateway's public port."""

    bind: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def is_loopback(self) -> bool:
        return self.bind in LOOPBACK_NAMES

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"


def web_socket(folder: DataDir) -> Path:
    return folder.sockets / "web.sock"


def common_environment(folder: DataDir, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process: addresses and settings, without keys of nodes."""
    environment = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
    environment.setdefault("DATABASE_URL", folder.database_url)
    environment.setdefault("REDIS_URL", folder.redis_url)
    environment["FAIRWAY_DATA_DIR"] = str(folder.root)
    environment["FAIRWAY_WEB_SOCKET"] = str(web_socket(folder))
    environment["PYTHONUNBUFFERED"] = "1"
    # Celery warns about root; docs/operations.md explains what `up` as root means.
    environment["PYTHONWARNINGS"] = "ignore:You're running the worker with superuser privileges"
    environment[SUPERVISED_VARIABLE] = str(folder.root)
    return environment


def start_servers(supervisor: Supervisor, servers: Sequence[Server]) -> None:
    """Start servers, all at once, and wait until they answer; they get none of our settings."""
    for server in servers:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            SUPERVISED_VARIABLE: str(server.folder.root),
        }
        supervisor.start(
            Process(
                server.name,
                tuple(server.command),
                environment,
                stage=0,
                account=server.folder.account,
                stop_signal=server.stop_signal,
                grace_s=server.grace_s,
            )
        )
    for server in servers:
        server.wait_ready(partial(supervisor.is_running, server.name))


def portal_processes(
    checkout: Path, folder: DataDir, listening: ListenOptions, environment: Mapping[str, str]
) -> tuple[list[Process], list[Process]]:
    """Return the public processes and the workers, each with only the key that its work needs."""
    python = (sys.executable,)
    celery = (*python, "-m", "celery", "--quiet", "-A", "scheduler.worker")
    quiet = ("--without-gossip", "--without-mingle", "--loglevel", "INFO")

    def row(name: str, *command: str, key: str | None = None, niceness: int = 0) -> Process:
        own = dict(environment)
        if key is not None:
            own[f"FAIRWAY_{key.upper()}_KEY"] = str(key_path(folder.keys, key))  # type: ignore[arg-type]
        return Process(name, command, own, folder=checkout, niceness=niceness)

    def worker(name: str, queue: str, *options: str, key: str | None = None, niceness: int = 0) -> Process:
        command = (*celery, "worker", "-Q", queue, "-n", f"{name}@%h", *quiet, *options)
        return row(name, *command, key=key, niceness=niceness)

    gateway = [*python, "-m", "portal.gateway", "--bind", listening.bind, "--port", str(listening.port)]
    if listening.tls_cert and listening.tls_key:
        gateway += ["--tls-cert", str(listening.tls_cert), "--tls-key", str(listening.tls_key)]
    servers = [row("web", *python, *_uvicorn(web_socket(folder))), row("gateway", *gateway, key="tunnel")]
    workers = [
        row("tracking", *python, "-m", "portal.tracking.server"),
        worker("worker-cycle", "cycle", "-P", "solo"),
        worker("worker-nodes", "nodes", "-P", "threads", "--concurrency", "4", key="control"),
        row("collector", *python, "manage.py", "collect", key="watch"),
        worker("worker-ask", "ask", "-P", "solo"),
        worker("worker-replay", "replay", "--concurrency", "1", niceness=10),
        row("beat", *celery, "beat", "--loglevel", "INFO", "-s", str(folder.run / "beat"), "--pidfile", ""),
    ]
    return servers, workers


def _uvicorn(socket: Path) -> tuple[str, ...]:
    """Return the Python arguments of a web process.

    Only the gateway can reach the socket, so proxy headers are trusted. Live frames are not compressed, since
    each would be compressed separately for every browser.
    """
    return (
        *("-m", "uvicorn", "portal.asgi:application", "--uds", str(socket)),
        *("--proxy-headers", "--forwarded-allow-ips", "*", "--no-server-header", "--no-access-log"),
        *("--lifespan", "off", "--timeout-graceful-shutdown", "3"),
        *("--ws-max-size", "1048576", "--ws-per-message-deflate", "false"),
    )
