"""`manage.py up`: starts a complete Fairway on this machine and prints its URL."""

from __future__ import annotations

import ipaddress
import re
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

from django.conf import settings

from portal.management.data_dir_command import DataDirCommand, path_argument, shown
from portal.standalone.process_table import LOOPBACK_NAMES, ListenOptions
from portal.standalone.up import UpOptions, run


class Command(DataDirCommand):
    help = "Starts every process of Fairway on this machine under one supervisor; Ctrl-C stops all of them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--port", type=_port, default=8000, help="public port (default 8000)")
        parser.add_argument(
            "--bind",
            type=_bind,
            default="127.0.0.1",
            help="address to listen on; other than loopback requires TLS files",
        )
        parser.add_argument("--tls-cert", type=path_argument, help="certificate chain, PEM")
        parser.add_argument("--tls-key", type=path_argument, help="private key, PEM")
        parser.add_argument("--demo", action="store_true", help="add a small simulated cluster")
        parser.add_argument("--no-local-node", action="store_true", help="do not run jobs on this machine")
        parser.add_argument(
            "--no-simulated-gpus", action="store_true", help="do not simulate GPUs if there are none"
        )
        parser.add_argument("--quiet", action="store_true", help="do not print the processes' log lines")

    def handle(self, *args: Any, **options: Any) -> None:
        up_options = UpOptions(
            listening=ListenOptions(
                options["bind"], options["port"], options["tls_cert"], options["tls_key"]
            ),
            demo=options["demo"],
            local_node=not options["no_local_node"],
            simulated_gpus=not options["no_simulated_gpus"],
            quiet=options["quiet"],
        )
        run(Path(settings.BASE_DIR), up_options)


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65_536:
        raise ArgumentTypeError(f"{shown(text)} is not a port: use a number from 1 to 65535.")
    return int(text)


def _bind(text: str) -> str:
    """Return an address in its shortest form, without brackets, or a host name."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if len(text) < 254 and re.fullmatch(r"([A-Za-z0-9-]{1,63}\.)*[A-Za-z][A-Za-z0-9-]{0,62}", text):
            return text
        raise ArgumentTypeError(
            f"{shown(text)} is not an address of this machine, such as 127.0.0.1, ::1 or 0.0.0.0; the port is --port."
        ) from None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    if address.is_loopback and str(address) not in LOOPBACK_NAMES:
        raise ArgumentTypeError(
            f"{text} is not supported: of the loopback addresses use 127.0.0.1 or ::1, since browsers open "
            "workspaces at names below localhost."
        )
    return str(address)
