"""`manage.py node-setup`: prints the script that makes a machine a node, to run there in a root shell."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from agents.enrolment import ENGINE_ACCESS_MODES, RUNTIME_KINDS, loader_upgrade_script
from portal.config import data_paths
from portal.errors import FairwayError
from portal.services.nodes.enrolment import get_script
from portal.standalone.account import service_account
from portal.standalone.command_database import command_database
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError


class Command(BaseCommand):
    help = "Prints the enrolment script of this cluster, as shown on the page 'Add a node'."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
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
        parser.add_argument("--data-dir", help="the data folder of this installation")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["renew_loader"]:
            self.stdout.write(loader_upgrade_script(), ending="")
            return
        folder = DataDir(data_paths.data_dir(), service_account())
        if not (folder.root / "agent" / "agent.pyz").exists():
            raise CommandError(f"{folder.root} has no keys yet: `manage.py up` creates them and the agent.")
        choices = {name: options[name] for name in ("engine", "runtime", "account")}
        try:
            with command_database(folder, exclusive=False):
                script = get_script(options["host"], **choices)
        except FairwayError as trouble:
            raise CommandError(trouble.message) from trouble
        except StartError as trouble:
            raise CommandError(str(trouble)) from trouble
        self.stdout.write(script)
