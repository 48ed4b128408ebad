"""A model that scikit-learn trained and MLflow's client registered, deployed and asked through the gateway."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from django.conf import settings

from portal.domain.serving.model_servers import ServiceSpec
from portal.models import Service
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.environments.process_environment import world_readable_python
from portal.services.jobs.submission import JobRequest
from portal.services.jobs.tracking import tracking_url
from portal.services.serving.model_servers import Deployment, ModelReference, do_deploy_service
from tests import factories
from tests.engine_harness import engine_harness, wait_for
from tests.gateway.gateway_harness import Testbed
from tests.gateway.test_services import Cluster, ready_replicas
from tests.tracking.conftest import TrackingWorld, tracking, tracking_server

__all__ = ["tracking", "tracking_server"]
pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True)]

NEEDS = ("mlflow==3.17.2", "scikit-learn")
TRAIN = """
import mlflow
from sklearn.linear_model import LinearRegression
mlflow.set_experiment("doubling")
with mlflow.start_run():
    model = LinearRegression().fit([[0.0], [1.0], [2.0]], [0.0, 2.0, 4.0])
    mlflow.sklearn.log_model(model, name="model", registered_model_name="doubling", pip_requirements=[])
"""


@pytest.fixture(scope="session")
def mlflow_environment() -> Path:
    """An environment with MLflow and scikit-learn that every account may run; made once and kept.

    Tasks have a /var/tmp of their own.
    """
    kept = Path("/var/cache/fairway-tests/mlflow-3.17.2")
    python = kept / "bin/python"
    check = [python, "-c", "import mlflow, sklearn"]
    if not python.exists() or subprocess.run(check, capture_output=True).returncode:
        subprocess.run([world_readable_python(), "-m", "venv", "--clear", kept], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *NEEDS], check=True)
    return kept / "bin"


def test_a_registered_model_is_deployed_and_answers_through_the_gateway(
    tracking: TrackingWorld, own_stand: Testbed, mlflow_environment: Path
) -> None:
    variables = {
        "PATH": f"{mlflow_environment}:/usr/bin:/bin",
        "MLFLOW_TRACKING_URI": tracking_url(tracking.project.public_id),
        "MLFLOW_TRACKING_TOKEN": tracking.token(tracking.member),
    }
    trained = subprocess.run(
        [mlflow_environment / "python", "-c", TRAIN], env=variables, capture_output=True, text=True
    )
    assert trained.returncode == 0, trained.stderr
    with engine_harness() as harness:
        harness.mark_enrolled(harness.create_node(gpus=1), gpus=1)
        harness.start_worker(FAIRWAY_TRACKING_URL=settings.TRACKING_URL)
        _, token = do_create_token(tracking.member, name="calls", scopes=[Scope.SERVICES])
        environment = factories.environment(runtime="process", tool=False)
        cluster = Cluster(own_stand, tracking.member, tracking.project, environment, token)
        request = JobRequest(
            name="doubling", project=tracking.project, environment=environment, gpus_per_task=0,
            memory_mib=1500, env={"PATH": variables["PATH"]}, termination_grace_s=2,
        )  # fmt: skip
        spec = ServiceSpec(readiness_path="/ping", readiness_timeout_s=300)
        service = do_deploy_service(
            tracking.member, Deployment(spec, request, ModelReference("doubling", "1"))
        )
        try:
            wait_for("a ready replica", lambda: ready_replicas(service), 80)
        except AssertionError as error:
            logs = [each.read_text()[-4000:] for each in harness.folder.glob("*/state/tasks/*/log*")]
            raise AssertionError(list(service.versions.values()), logs) from error
        with cluster.program(service) as program:
            answer = program.post("/invocations", json={"inputs": [[21.0]]})
            assert (answer.status_code, answer.json()) == (200, {"predictions": [pytest.approx(42.0)]})
        assert Service.objects.get().versions.get().model_run != ""
