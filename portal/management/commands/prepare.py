"""`manage.py prepare`: the first steps of an installation with external servers."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import OperationalError, connection

from portal.config import data_paths, variables
from portal.database.roles import as_owner, services_role, single_role_warning
from portal.management.data_dir_command import DataDirCommand
from portal.services.cluster.initial_data import ensure_initial_data
from portal.standalone.address import sign_in_link
from portal.standalone.backup_requirements import foreign_tables, missing_requirements
from portal.standalone.cluster_match import check_same_cluster
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError, database_start_error
from portal.standalone.up import migrate_database


class Command(DataDirCommand):
    help = (
        "Creates the secret key and the node keys, migrates the database, and prints the first sign-in link."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        folder = DataDir(data_paths.data_dir(), None)
        folder.prepare_unowned()
        _check_database()
        check_same_cluster(folder)
        folder.ensure_secret_key()
        if not variables.SECRET_KEY.read():  # settings were loaded before the key file existed
            settings.SECRET_KEY = folder.secret_key.read_text().strip()
        migrate_database()
        code = ensure_initial_data(local_node=False, simulated_gpus=False, demo=False)
        with as_owner():
            missing = [f"Backup and restore: {message}" for message in missing_requirements()]
        for warning in filter(None, (settings.SAME_SITE_WARNING, single_role_warning(), *missing)):
            self.stderr.write(self.style.WARNING(warning))
        if code:
            self.stdout.write(
                f"Sign in once, with this link:\n\n    {sign_in_link(settings.PORTAL_URL, code)}\n"
            )
        else:
            self.stdout.write("Everything is prepared; the first administrator has already signed in.")


def _check_database() -> None:
    """Raise StartError before anything is created, for a database that cannot be used."""
    try:
        with as_owner():
            connection.ensure_connection()
            # those of the services' role are taken over
            if missing := foreign_tables(besides=services_role()):
                raise StartError(missing[0])
    except OperationalError as error:
        raise database_start_error(error) from error
