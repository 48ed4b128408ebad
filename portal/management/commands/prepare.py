"""`manage.py prepare`: the first steps of an installation with external servers."""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings

from portal.config import data_paths
from portal.database.roles import single_role_warning
from portal.management.data_dir_command import DataDirCommand
from portal.services.cluster.initial_data import ensure_initial_data
from portal.standalone.address import sign_in_link
from portal.standalone.cluster_match import check_same_cluster
from portal.standalone.data_dir import DataDir
from portal.standalone.up import migrate_database


class Command(DataDirCommand):
    help = (
        "Creates the secret key and the node keys, migrates the database, and prints the first sign-in link."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        folder = DataDir(data_paths.data_dir(), None)
        folder.prepare_unowned()
        check_same_cluster(folder)
        folder.ensure_secret_key()
        if not os.environ.get("FAIRWAY_SECRET_KEY"):  # settings were loaded before the key file existed
            settings.SECRET_KEY = folder.secret_key.read_text().strip()
        migrate_database()
        code = ensure_initial_data(local_node=False, simulated_gpus=False, demo=False)
        for warning in filter(None, (settings.SAME_SITE_WARNING, single_role_warning())):
            self.stderr.write(self.style.WARNING(warning))
        if code:
            self.stdout.write(
                f"Sign in once, with this link:\n\n    {sign_in_link(settings.PORTAL_URL, code)}\n"
            )
        else:
            self.stdout.write("Everything is prepared; the first administrator has already signed in.")
