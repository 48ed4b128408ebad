"""The processes of an installation, declared once, and how `up` runs them on one machine.

deploy/systemd and docker-compose.yml run the same processes; a test compares all three.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agents.keys import Purpose, key_path
from portal.standalone.data_dir import DataDir
from portal.standalone.processes.orphan_processes import SUPERVISED_VARIABLE
from portal.standalone.processes.supervisor import Process, Supervisor
from portal.standalone.servers.server import Server

NOT_INHERITED = (
    "FAIRWAY_CONTROL_KEY",
    "FAIRWAY_WATCH_KEY",
    "FAIRWAY_TUNNEL_KEY",
    "DATABASE_OWNER_URL",
    "FAIRWAY_IN_ENVIRONMENT",
)


@dataclass(frozen=True)
class ProcessAddresses:
    """What differs between `up`, systemd and docker-compose.yml: sockets, files and the public port."""

    web_socket: Path
    beat_file: Path
    bind: str
    port: int


@dataclass(frozen=True)
class PortalProcess:
    """One process: its Python arguments, and the key of nodes that only it has."""

    name: str
    template: tuple[str, ...]
    key: Purpose | None = None
    niceness: int = 0

    @property
    def key_variable(self) -> str:
        return f"FAIRWAY_{str(self.key).upper()}_KEY"

    def arguments(self, addresses: ProcessAddresses) -> tuple[str, ...]:
        values = {f"{{{name}}}": str(value) for name, value in vars(addresses).items()}
        return tuple(values.get(word, word) for word in self.template)


def web_arguments(socket: Path | str) -> tuple[str, ...]:
    """Return the arguments of a web process.

    Only the gateway can reach the socket, so proxy headers are trusted. Live frames are not compressed, since
    each would be compressed separately for every browser.
    """
    return (
        *("-m", "uvicorn", "portal.asgi:application", "--uds", str(socket)),
        *("--proxy-headers", "--forwarded-allow-ips", "*", "--no-server-header", "--no-access-log"),
        *("--lifespan", "off", "--timeout-graceful-shutdown", "3"),
        *("--ws-max-size", "1048576", "--ws-per-message-deflate", "false"),
    )


_CELERY = ("-m", "celery", "--quiet", "-A", "scheduler.worker")


def _worker(
    name: str, queue: str, *options: str, key: Purpose | None = None, niceness: int = 0
) -> PortalProcess:
    common = ("-n", f"{name}@fairway", "--without-gossip", "--without-mingle", "--loglevel", "INFO")
    return PortalProcess(name, (*_CELERY, "worker", "-Q", queue, *common, *options), key, niceness)


PROCESSES = (
    PortalProcess("web", web_arguments("{web_socket}")),
    PortalProcess("gateway", ("-m", "portal.gateway", "--bind", "{bind}", "--port", "{port}"), key="tunnel"),
    PortalProcess("tracking", ("-m", "portal.tracking.server")),
    _worker("worker-cycle", "cycle", "-P", "solo"),
    _worker("worker-nodes", "nodes", "-P", "threads", "--concurrency", "4", key="control"),
    PortalProcess("collector", ("manage.py", "collect"), key="watch"),
    _worker("worker-ask", "ask", "-P", "solo"),
    _worker("worker-replay", "replay", "--concurrency", "1", niceness=10),
    PortalProcess("beat", (*_CELERY, "beat", "--loglevel", "INFO", "-s", "{beat_file}", "--pidfile", "")),
)
"""In the order in which `up` starts them."""
PREPARE = PortalProcess("prepare", ("manage.py", "prepare"))
"""Ends before the others start: tables, keys and the first sign-in link."""


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
    environment[SUPERVISED_VARIABLE] = folder.mark
    return environment


def start_servers(supervisor: Supervisor, servers: Sequence[Server]) -> None:
    """Start servers, all at once, and wait until they answer; they get none of our settings."""
    for server in servers:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            SUPERVISED_VARIABLE: server.folder.mark,
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
    addresses = ProcessAddresses(web_socket(folder), folder.run / "beat", listening.bind, listening.port)
    options: tuple[str, ...] = ()
    if listening.tls_cert and listening.tls_key:
        options = ("--tls-cert", str(listening.tls_cert), "--tls-key", str(listening.tls_key))

    def row(declared: PortalProcess) -> Process:
        own = dict(environment)
        if declared.key is not None:
            own[declared.key_variable] = str(key_path(folder.keys, declared.key))
        command = (sys.executable, *declared.arguments(addresses))
        if declared.name == "gateway":
            command += options
        return Process(declared.name, command, own, folder=checkout, niceness=declared.niceness)

    rows = {declared.name: row(declared) for declared in PROCESSES}
    servers = [rows.pop("web"), rows.pop("gateway")]
    return servers, list(rows.values())
