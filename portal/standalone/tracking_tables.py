"""MLflow's tables are created and migrated with the portal's own, by the role that owns them.

The tracking server only uses them. MLflow is imported by a child process, and only if the revision of the tables is
not that of the installed MLflow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from django.db import connection

from portal.config import variables
from portal.database.libpq import libpq_environment
from portal.database.roles import create_tracking_schema
from portal.standalone.errors import StartError
from portal.standalone.processes.exec_child import exec_command
from portal.tracking.revisions import VERSION_TABLE, known_revisions

MIGRATE = "migrate"
"""The argument of the tracking server's program with which it migrates and ends."""
MIGRATION_TIMEOUT_S = 3_600


def migrate_tracking_tables() -> None:
    """Create or migrate MLflow's tables. Must run as the owner. Repeatable. Raise StartError.

    With a separate database for them, the tracking server does it itself, as the role in its address.
    """
    if variables.TRACKING_DATABASE_URL.read():
        return
    create_tracking_schema()
    newest, known = known_revisions()
    current = _current_revision()
    if current == newest:
        return
    if current and current not in known:
        raise StartError(
            f"MLflow's tables were written by a newer MLflow (revision {current}) than the installed one: "
            "install the version of Fairway that wrote them, or a newer one."
        )
    command = [sys.executable, "-m", "portal.tracking.server", MIGRATE]
    try:
        done = subprocess.run(
            exec_command(command),
            cwd=Path(__file__).parent.parent.parent,
            env=os.environ | libpq_environment(),
            capture_output=True,
            text=True,
            timeout=MIGRATION_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartError(
            f"MLflow's tables were not migrated within {MIGRATION_TIMEOUT_S // 60} minutes."
        ) from None
    if done.returncode:
        last = (done.stderr.strip() or "its process ended").splitlines()[-1]
        raise StartError(f"MLflow's tables cannot be migrated: {last}")


def _current_revision() -> str:
    """Return the revision of the tables; blank if there are none."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [VERSION_TABLE])
        if not cursor.fetchone()[0]:
            return ""
        cursor.execute(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608  (a constant)
        row = cursor.fetchone()
        return str(row[0]) if row else ""
