"""Services of registered models: the Deploy button, lineage both ways, and versions that do not exist."""

from __future__ import annotations

import html

import pytest

from portal.domain.serving.model_servers import ServiceSpec
from portal.errors import InvalidRequest
from portal.models import Service
from portal.services.jobs.submission import JobRequest
from portal.services.serving.model_servers import (
    Deployment,
    ModelReference,
    do_deploy_service,
    do_update_service,
)
from tests import factories
from tests.tracking.conftest import TrackingWorld
from tests.tracking.test_pages import browser

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_model_is_deployed_and_both_pages_name_each_other(tracking: TrackingWorld) -> None:
    client = tracking.client()
    run = client.create_run(client.create_experiment("digits")).info.run_id
    client.create_registered_model("digits")
    client.create_model_version("digits", "s3://bucket/model", run)
    factories.node(factories.pool())
    environment = factories.environment()
    project, member = tracking.project, browser(tracking.member)
    at = f"/models/?project={project.public_id}&model=digits&version=1"

    shown = html.unescape(member.get(at).content.decode())
    button = f"/launch/?kind=service&project={project.public_id}&model=digits&version=1"
    assert button in shown
    form = html.unescape(member.get(button).content.decode())
    assert "mlflow models serve --model-uri models:/digits/1" in form and 'value="/ping"' in form

    request = JobRequest(name="digits", project=project, environment=environment, gpus_per_task=0)
    for model in (
        ModelReference("digits", "2"),
        ModelReference("digits", "x"),
        ModelReference("letters", "1"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            do_deploy_service(tracking.member, Deployment(ServiceSpec(), request, model))
        assert "has no version" in refused.value.fields["model"]
    assert not Service.objects.exists()
    deployment = Deployment(ServiceSpec(), request, ModelReference("digits", "1"))
    service = do_deploy_service(tracking.member, deployment)
    version = service.versions.get()
    assert version.model_run == run and version.job["command"][:3] == ["mlflow", "models", "serve"]
    page = html.unescape(member.get(f"/services/{service.public_id}/").content.decode())
    assert "digits v1" in page and f"/experiments/{project.public_id}/{run}/" in page
    assert f"/services/{service.public_id}/" in member.get(at).content.decode()

    client.delete_model_version("digits", "1")
    with pytest.raises(InvalidRequest):
        do_update_service(tracking.member, service, deployment)
    assert service.versions.count() == 1
