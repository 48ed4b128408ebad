"""The real tracking server on the database of the tests, behind the real web application."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from portal.models import Project, User
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.jobs.tracking import tracking_url
from tests import factories
from tests.process_environment import service_environment

START_LIMIT_S = 90
# MLflow sets a variable in a thread while its client iterates over the environment.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"


@pytest.fixture(scope="session")
def tracking_server(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The server's data folder."""
    folder = tmp_path_factory.mktemp("tracking")
    socket = folder / "tracking.sock"
    environment = {
        **service_environment(),
        "FAIRWAY_TRACKING_SOCKET": str(socket),
        "FAIRWAY_DATA_DIR": str(folder),
    }
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "portal.tracking.server"], env=environment, stdout=log, stderr=log
        )
    deadline = time.monotonic() + START_LIMIT_S
    while not socket.exists():  # it listens once MLflow is loaded and its tables exist
        assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    yield folder
    server.terminate()
    server.wait(START_LIMIT_S)


class TrackingWorld:
    """Two projects with their people; the MLflow client of each."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(settings, "TRACKING_URL", url)
        self.member, self.viewer, self.stranger = (factories.user() for _ in range(3))
        self.project = factories.project(member=self.member, viewer=self.viewer)
        self.other = factories.project(member=self.stranger)

    def token(self, user: User, *scopes: Scope) -> str:
        return do_create_token(user, name="mlflow", scopes=scopes or (Scope.EXPERIMENTS,))[1]

    def client(self, user: User | None = None, project: Project | None = None, token: str = "") -> Any:
        """MLflow's own client, as a script configures it."""
        from mlflow import MlflowClient

        self._monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", token or self.token(user or self.member))
        self._monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        return MlflowClient(tracking_url((project or self.project).public_id))


@pytest.fixture
def tracking(
    transactional_db: None, tracking_server: Path, live_server: Any, monkeypatch: pytest.MonkeyPatch
) -> TrackingWorld:
    monkeypatch.setenv("FAIRWAY_TRACKING_SOCKET", str(tracking_server / "tracking.sock"))
    return TrackingWorld(live_server.url, monkeypatch)
