"""Addresses of this installation: the URL to print, an SSH tunnel, and whether the port is free."""

from __future__ import annotations

import errno
import getpass
import os
import socket
import ssl
from pathlib import Path

from portal.standalone.errors import StartError
from portal.standalone.process_table import ListenOptions


def check_bind_options(listening: ListenOptions) -> None:
    """Refuse invalid or occupied addresses with a message, before anything else is started."""
    if not listening.is_loopback and not listening.tls_cert:
        raise StartError(
            f"Listening on {listening.bind} sends passwords over the network, so it needs --tls-cert and --tls-key. "
            f"Otherwise omit --bind and connect through: {ssh_forward_command(ListenOptions(port=listening.port))}"
        )
    if bool(listening.tls_cert) != bool(listening.tls_key):
        raise StartError("--tls-cert and --tls-key must be used together.")
    if listening.tls_cert and listening.tls_key:
        _check_certificate(listening.tls_cert, listening.tls_key)
    try:
        found = socket.getaddrinfo(listening.bind, listening.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StartError(
            f"{listening.bind} has no address ({error.strerror}). Choose another with --bind."
        ) from error
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind(address)
        except OSError as error:
            option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--bind"
            raise StartError(
                f"Port {listening.port} on {listening.bind} cannot be used ({os.strerror(error.errno or 0)}). "
                f"Choose another with {option}."
            ) from error


def _check_certificate(certificate: Path, key: Path) -> None:
    """Refuse what the gateway could not load; it would read a password from the terminal."""
    for file in (certificate, key):
        try:
            if not file.is_file():
                raise StartError(f"{file} cannot be read: there is no such file.")
            file.open("rb").close()
        except OSError as error:
            raise StartError(f"{file} cannot be read: {error.strerror}.") from error

    def refuse_password() -> str:
        raise StartError(f"{key} is encrypted with a password, which nobody can enter: use one without.")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise StartError(f"{key} is not the private key of the certificate {certificate}.") from error
        raise StartError(
            f"{certificate} and {key} are not a certificate chain and its private key in PEM format."
        ) from error


def portal_url(listening: ListenOptions, configured: str | None) -> str:
    """Return FAIRWAY_PORTAL_URL if set, else the URL for a browser on this machine."""
    if configured:
        return configured.rstrip("/")
    bind = f"[{listening.bind}]" if ":" in listening.bind else listening.bind
    host = "localhost" if listening.is_loopback or listening.bind in {"0.0.0.0", "::"} else bind  # noqa: S104
    if not listening.is_loopback and host == "localhost":
        host = socket.getfqdn()
    default = 443 if listening.scheme == "https" else 80
    return f"{listening.scheme}://{host}" + ("" if listening.port == default else f":{listening.port}")


def sign_in_link(url: str, code: str) -> str:
    """Return the one-time link; its code is in the fragment, which neither servers nor logs receive."""
    return f"{url}/sign-in/link/#{code}"


def ssh_forward_command(listening: ListenOptions) -> str:
    """Return the command to run on another machine to reach a portal that listens on loopback."""
    port = listening.port
    # a shell may take brackets for a pattern
    forward = (
        f"'{port}:[{listening.bind}]:{port}'" if ":" in listening.bind else f"{port}:{listening.bind}:{port}"
    )
    return f"ssh -L {forward} {getpass.getuser()}@{socket.getfqdn()}"
