"""Our own Valkey: a unix socket, no TCP port, nothing on disk, since all its data can be rebuilt."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from portal.config.data_paths import VALKEY_SOCKET_NAME
from portal.standalone.data_dir import DataDir
from portal.standalone.servers.binaries import ValkeyBinary, find_valkey
from portal.standalone.servers.server import Server, copy_programs_for_account

MEMORY_LIMIT = "512mb"


@dataclass(frozen=True)
class ValkeyServer(Server):
    name = "valkey"
    title = "Valkey"
    ready_timeout_s = 15.0
    not_ready = redis.RedisError

    binary: ValkeyBinary

    @property
    def command(self) -> list[str]:
        socket = str(self.folder.sockets / VALKEY_SOCKET_NAME)
        return [
            *[str(self.binary.program), "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700"],
            *["--save", "", "--appendonly", "no", "--dir", str(self.folder.valkey), "--daemonize", "no"],
            *["--maxmemory", MEMORY_LIMIT, "--maxmemory-policy", "noeviction", "--loglevel", "warning"],
        ]

    @property
    def from_wheel(self) -> bool:
        return self.binary.from_wheel

    def check_ready(self) -> None:
        ping(self.folder.redis_url, timeout_s=2)


def ping(redis_url: str, *, timeout_s: float) -> None:
    """Return when the server answers. Raise RedisError."""
    with redis.Redis.from_url(
        redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
    ) as client:
        client.ping()


def prepare_valkey(folder: DataDir) -> ValkeyServer:
    """Return a startable server; remove the socket of a killed one."""
    (folder.sockets / VALKEY_SOCKET_NAME).unlink(missing_ok=True)
    binary = find_valkey()
    if binary.from_wheel and folder.account is not None:
        binary = _copy_binary(binary, folder)
    return ValkeyServer(folder, binary)


def _copy_binary(binary: ValkeyBinary, folder: DataDir) -> ValkeyBinary:
    copied = copy_programs_for_account(folder, "valkey", binary.program, {"bin": binary.program.parent})
    return ValkeyBinary(copied / "bin" / binary.program.name, from_wheel=True)
