"""Refuses a database and a data folder that do not belong to the same cluster."""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS, connection, connections
from django.db.utils import DatabaseError

from agents.keys import cluster_of_keys, missing_keys
from portal.config import variables
from portal.database.roles import as_owner
from portal.database.schema_version import check_schema
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError, database_start_error


def check_same_cluster(folder: DataDir) -> None:
    """Raise StartError before anything is written to either, unless both are new or have the same cluster.

    New keys beside an existing database would lock the portal out of every node; an empty database beside the
    keys of a cluster would not know the jobs that run on its nodes.
    """
    cluster, known = _cluster_of_database(), cluster_of_keys(folder.keys)
    where = _database_address()
    if not cluster:
        # the agent is stored after the first row was written: without it, the first start was interrupted
        if known and (folder.root / "agent" / "agent.pyz").exists():
            raise StartError(
                f"The data folder {folder.root} belongs to the cluster {known}, but the database {where} is empty: "
                "check DATABASE_URL. If the database is lost, restore a backup into a new data folder."
            )
        return
    if known and known != cluster:
        raise StartError(
            f"The database {where} belongs to the cluster {cluster}, and the data folder {folder.root} to "
            f"{known}: use a database and a data folder of the same cluster."
        )
    missing = [path.name for path in missing_keys(folder.keys)]
    if not folder.secret_key.exists() and not variables.SECRET_KEY.read():
        missing.append(folder.secret_key.name)
    if missing:
        raise StartError(
            f"The database {where} belongs to the cluster {cluster}, whose keys are not in the data folder "
            f"{folder.root} (missing: {', '.join(missing)}). Use the data folder of that cluster, restore a backup "
            "into a new data folder and an empty database, or set DATABASE_URL to an empty database."
        )


def _cluster_of_database() -> str:
    """Return the id of the cluster; blank for a database that is new, or in which `prepare` has made no user yet.

    Other processes may have written the row of the cluster in between: it has keys once there is a user.
    """
    try:
        check_schema()
        with as_owner(), connection.cursor() as cursor:
            cursor.execute("SELECT to_regclass('portal_clustersettings')")
            if cursor.fetchone()[0] is None:
                return ""
            cursor.execute(
                "SELECT cluster_id FROM portal_clustersettings WHERE id = 1 AND EXISTS (SELECT FROM portal_user)"
            )
            row = cursor.fetchone()
    except DatabaseError as error:
        raise database_start_error(error) from error
    return str(row[0]) if row else ""


def _database_address() -> str:
    facts: dict[str, Any] = connections[DEFAULT_DB_ALIAS].settings_dict
    place = facts.get("HOST") or "localhost"
    return f"{facts['NAME']} on {place}" + (f":{facts['PORT']}" if facts.get("PORT") else "")
