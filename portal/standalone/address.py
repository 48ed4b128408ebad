"""Addresses of this installation: the URL to print, an SSH tunnel, and whether the port is free."""

from __future__ import annotations

import getpass
import socket

from portal.standalone.errors import StartError
from portal.standalone.process_table import ListenOptions


def check_bind_options(listening: ListenOptions) -> None:
    """Refuse invalid or occupied addresses with a message, before anything else is started."""
    if not listening.is_loopback and not listening.tls_cert:
        raise StartError(
            f"Listening on {listening.bind} sends passwords over the network, so it needs --tls-cert and --tls-key. "
            f"Otherwise omit --bind and connect through: {ssh_forward_command(listening.port)}"
        )
    if bool(listening.tls_cert) != bool(listening.tls_key):
        raise StartError("--tls-cert and --tls-key must be used together.")
    for file in (listening.tls_cert, listening.tls_key):
        try:
            if file is not None:
                file.open("rb").close()
        except OSError:
            raise StartError(f"{file} cannot be read.") from None
    family = socket.AF_INET6 if ":" in listening.bind else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((listening.bind, listening.port))
    except OSError as taken:
        raise StartError(
            f"Port {listening.port} on {listening.bind} cannot be used ({taken.strerror}). "
            f"Choose another with --port."
        ) from taken


def portal_url(listening: ListenOptions, configured: str | None) -> str:
    """Return FAIRWAY_PORTAL_URL if set, else the URL for a browser on this machine."""
    if configured:
        return configured.rstrip("/")
    host = "localhost" if listening.is_loopback or listening.bind in {"0.0.0.0", "::"} else listening.bind  # noqa: S104
    if not listening.is_loopback and host == "localhost":
        host = socket.getfqdn()
    default = 443 if listening.scheme == "https" else 80
    return f"{listening.scheme}://{host}" + ("" if listening.port == default else f":{listening.port}")


def sign_in_link(url: str, code: str) -> str:
    """Return the one-time link; its code is in the fragment, which neither servers nor logs receive."""
    return f"{url}/sign-in/link/#{code}"


def ssh_forward_command(port: int) -> str:
    """Return the command to run on another machine to reach a portal that listens on loopback."""
    return f"ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.getfqdn()}"
