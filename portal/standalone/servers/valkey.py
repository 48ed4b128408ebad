"""Our own Valkey: a unix socket, no TCP port, nothing on disk, since all its data can be rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import redis

from portal.config.data_paths import VALKEY_SOCKET_NAME
from portal.standalone.data_dir import DataDir
from portal.standalone.servers.binaries import ValkeyBinary, find_valkey
from portal.standalone.servers.readiness import wait_until_ready

MEMORY_LIMIT = "512mb"
READY_TIMEOUT_S = 15


@dataclass(frozen=True)
class ValkeyServer:
    """A prepared server: `command` runs it in the foreground, SIGTERM stops it."""

    folder: DataDir
    binary: ValkeyBinary

    @property
    def command(self) -> list[str]:
        socket = str(self.folder.sockets / VALKEY_SOCKET_NAME)
        return [
            *[str(self.binary.program), "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700"],
            *["--save", "", "--appendonly", "no", "--dir", str(self.folder.valkey), "--daemonize", "no"],
            *["--maxmemory", MEMORY_LIMIT, "--maxmemory-policy", "noeviction", "--loglevel", "warning"],
        ]

    def wait_ready(self, is_running: Callable[[], bool]) -> None:
        with redis.Redis.from_url(
            self.folder.redis_url, socket_timeout=2, socket_connect_timeout=2
        ) as client:
            wait_until_ready("Valkey", client.ping, redis.RedisError, is_running, READY_TIMEOUT_S)


def prepare_valkey(folder: DataDir) -> ValkeyServer:
    """Return a startable server; remove the socket of a killed one."""
    (folder.sockets / VALKEY_SOCKET_NAME).unlink(missing_ok=True)
    return ValkeyServer(folder, find_valkey())
