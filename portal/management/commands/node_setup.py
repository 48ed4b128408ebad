"""`manage.py node-setup`: prints the script that makes a machine a node, to run there in a root shell."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from agents.enrolment import ENGINE_ACCESS_MODES, RUNTIME_KINDS, loader_upgrade_script
from portal.management.data_dir_command import DataDirCommand, installed_data_dir
from portal.services.nodes.enrolment import check_choices, check_resolves, get_script
from portal.services.nodes.nodes import validate_host
from portal.standalone.command_database import command_database


class Command(DataDirCommand):
    help = "Prints the enrolment script of this cluster, as shown on the page 'Add a node'."

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--engine",
            default="auto",
            choices=ENGINE_ACCESS_MODES,
            help="how the agent accesses the container engine",
        )
        parser.add_argument(
            "--runtime",
            default="podman",
            choices=RUNTIME_KINDS,
            help="the container runtime of the node",
        )
        parser.add_argument(
            "--host",
            default="",
            help="the node's address; its containers then cannot connect to this machine",
        )
        parser.add_argument("--account", default="fairway", help="the account that the script creates")
        parser.add_argument(
            "--renew-loader",
            action="store_true",
            help="print the script that renews the loader of an enrolled node instead",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["renew_loader"]:
            self.stdout.write(loader_upgrade_script(), ending="")
            return
        choices = {name: options[name] for name in ("engine", "runtime", "account")}
        check_choices(**choices)
        if options["host"]:
            validate_host(options["host"])
            check_resolves(options["host"])
        folder = installed_data_dir()
        if not (folder.root / "agent" / "agent.pyz").exists():
            raise CommandError(f"{folder.root} has no keys yet: `manage.py up` creates them and the agent.")
        with command_database(folder, exclusive=False):
            script = get_script(options["host"], **choices)
        self.stdout.write(script)
