"""The tracking server: MLflow's REST API on a unix socket that only the web process uses.

`python -m portal.tracking.server` runs it. The web process authorizes each request and names the project in
MLflow's workspace header; MLflow's store confines the request to that workspace. Only this module imports MLflow.
With the argument `migrate` it creates or migrates MLflow's tables and ends: `manage.py migrate` runs it as the owner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any
from wsgiref.types import WSGIApplication

import environ
import waitress
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError

from agents.node.host.atomic_files import PRIVATE_UMASK, make_folder
from portal.config import data_paths, variables
from portal.database.unfinished_restore import RESTORE_SCHEMA, UNFINISHED_RESTORE
from portal.tracking.client import socket_path
from portal.tracking.metric_writes import MetricWriter
from portal.tracking.model_lists import ModelLists
from portal.tracking.revisions import SCHEMA, VERSION_TABLE, known_revisions
from portal.tracking.run_continuations import RunContinuations

THREADS = 4
STATEMENT_TIMEOUT_MS = 6000
"""Below the time limit of the web process."""
MAX_BODY_BYTES = 2**40
"""The web process limits what it forwards."""
_PROVIDER = "fairway"


def main() -> None:
    if sys.argv[1:] == ["migrate"]:
        migrate_tables(create_engine(owner_url()))
    else:
        serve()


def serve() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    data = data_paths.data_dir()
    artifacts = data / "artifacts"
    os.umask(PRIVATE_UMASK)  # MLflow chooses no modes for its files, which belong to all projects
    for folder in (artifacts, artifacts / "incoming"):
        make_folder(str(folder), 0o700)
        with contextlib.suppress(PermissionError):  # a volume of another account
            folder.chmod(0o700)  # an earlier version left it to the umask
    tempfile.tempdir = str(artifacts / "incoming")  # /tmp may be small, and a rename within a disk is cheap
    separate = variables.TRACKING_DATABASE_URL.read()
    url = database_url(separate or _services_url(data))
    if separate:
        migrate_tables(create_engine(url))
    check_tables(create_engine(url))
    application = build_application(url.render_as_string(hide_password=False), artifacts)
    logging.getLogger("waitress.queue").setLevel(
        logging.ERROR
    )  # it warns of every request that waits for a thread
    path = socket_path()
    path.unlink(missing_ok=True)
    waitress.serve(
        application,
        unix_socket=str(path),
        unix_socket_perms="600",
        threads=THREADS,
        max_request_body_size=MAX_BODY_BYTES,
        ident=None,
    )


def _services_url(data: Path) -> str:
    return os.environ.get("DATABASE_URL") or data_paths.database_url(data)


def database_url(text: str) -> URL:
    """Return SQLAlchemy's form of an address such as DATABASE_URL, with MLflow's own schema."""
    parts = environ.Env.db_url_config(text)
    query = {"options": f"-csearch_path={SCHEMA} -cstatement_timeout={STATEMENT_TIMEOUT_MS} -cjit=off"}
    query |= {name: str(value) for name, value in (parts.get("OPTIONS") or {}).items()}
    if parts["HOST"]:
        query["host"] = parts["HOST"]
    if parts["PORT"]:
        query["port"] = str(parts["PORT"])
    return URL.create(
        "postgresql+psycopg",
        username=parts["USER"] or None,
        password=parts["PASSWORD"] or None,
        database=parts["NAME"],
        query=query,
    )


def owner_url() -> URL:
    """Return the address for a migration: libpq's variables name the server and the role."""
    options = f"-csearch_path={SCHEMA} -clock_timeout={STATEMENT_TIMEOUT_MS} -cjit=off"
    return URL.create("postgresql+psycopg", query={"options": options})


def migrate_tables(engine: Engine) -> None:
    """Create the schema and MLflow's tables, or migrate them, as the role that owns them. Repeatable.

    Exit with a sentence if the database refuses.
    """
    try:
        with engine.begin() as connection:
            if connection.execute(text("SELECT to_regnamespace(:name)"), {"name": SCHEMA}).scalar() is None:
                connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
            current = _revision(connection)
        newest, _ = known_revisions()
        if current != newest:
            from mlflow.store.db.utils import _initialize_tables, _upgrade_db

            (_upgrade_db if current else _initialize_tables)(engine)  # type: ignore[no-untyped-call]
    except DBAPIError as error:
        sys.exit(str(error.orig).splitlines()[0])
    finally:
        engine.dispose()


def check_tables(engine: Engine) -> None:
    """Exit with a sentence unless the tables are those of the installed MLflow."""
    with engine.connect() as connection:
        if connection.execute(text("SELECT to_regnamespace(:name)"), {"name": RESTORE_SCHEMA}).scalar():
            sys.exit(UNFINISHED_RESTORE)
        current = _revision(connection)
    engine.dispose()
    newest, _ = known_revisions()
    if current != newest:
        found = f"have the revision {current}" if current else "are missing"
        sys.exit(f"MLflow's tables {found}; the installed MLflow needs {newest}. Run manage.py migrate.")


def _revision(connection: Connection) -> str:
    """Return the revision of MLflow's tables; blank if there are none."""
    if connection.execute(text("SELECT to_regclass(:name)"), {"name": VERSION_TABLE}).scalar() is None:
        return ""
    return str(connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar() or "")  # noqa: S608


def build_application(database: str, artifacts: Path) -> WSGIApplication:
    """Return MLflow's WSGI application; MLflow's tables exist."""
    os.environ |= {
        "MLFLOW_ENABLE_WORKSPACES": "true",
        "MLFLOW_WORKSPACE_STORE_URI": f"{_PROVIDER}://",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_REGISTRY_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(artifacts),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    # MLflow reads these variables when it is imported
    from mlflow.entities import Workspace
    from mlflow.server import app, handlers
    from mlflow.store.workspace.abstract_store import AbstractStore
    from mlflow.tracking._workspace import registry

    class ProjectWorkspaces(AbstractStore):
        """Every project is a workspace of its public id; the web process names existing ones only."""

        def __init__(self, workspace_uri: str) -> None:
            pass

        def list_workspaces(self) -> list[Workspace]:
            return []

        def get_workspace(self, workspace_name: str) -> Workspace:
            return Workspace(name=workspace_name)

        def get_default_workspace(self) -> Workspace:
            raise NotImplementedError  # a request without a workspace is refused

        def resolve_artifact_root(
            self, default_artifact_root: str | None, workspace_name: str
        ) -> tuple[str | None, bool]:
            return default_artifact_root, True

    registry._get_workspace_store_registry().register(_PROVIDER, ProjectWorkspaces)  # type: ignore[no-untyped-call]
    handlers.initialize_backend_stores(database, database, "mlflow-artifacts:/", f"{_PROVIDER}://")
    store: Any = handlers._get_tracking_store()
    return RunContinuations(ModelLists(MetricWriter(app, store.engine), store.engine), store.engine)


if __name__ == "__main__":
    main()
