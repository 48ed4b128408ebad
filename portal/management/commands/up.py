"""`manage.py up`: starts a complete Fairway on this machine and prints its URL."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings

from portal.management.data_dir_command import DataDirCommand
from portal.standalone.process_table import ListenOptions
from portal.standalone.up import UpOptions, run


class Command(DataDirCommand):
    help = "Starts every process of Fairway on this machine under one supervisor; Ctrl-C stops all of them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--port", type=_port, default=8000, help="public port (default 8000)")
        parser.add_argument(
            "--bind", default="127.0.0.1", help="address to listen on; other than loopback requires TLS files"
        )
        parser.add_argument("--tls-cert", type=Path, help="certificate chain, PEM")
        parser.add_argument("--tls-key", type=Path, help="private key, PEM")
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
    port = int(text)
    if not 0 < port < 65_536:
        raise ValueError(text)
    return port
