"""A service in a podman container of a node behind SSH: requests and a socket through its origin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portal.domain.serving.model_servers import ServiceSpec
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.serving.advance import advance_active_services
from portal.services.serving.model_servers import do_stop_service
from tests.engine_harness import held_milli
from tests.gateway.gateway_harness import Testbed
from tests.gateway.test_services import Cluster, echo, ready_replicas, serve
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.rig.plugin import make_rig, rig_cluster, tiny_image
from tests.two_rig_nodes import two_rig_nodes, wait_until

__all__ = ["make_rig", "rig_cluster", "tiny_image"]
pytestmark = [pytest.mark.rig, pytest.mark.early, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def nodes(
    make_rig: Any, rig_cluster: RigCluster, tiny_image: RigImage, settings: Any, tmp_path: Path
) -> dict[str, Any]:
    stores = [[tiny_image.store], [tiny_image.store]]
    found = two_rig_nodes(make_rig, rig_cluster, tiny_image, stores, settings, tmp_path)
    settings.KEY_FILES = settings.KEY_FILES | {"tunnel": str(rig_cluster.keys["tunnel"])}
    return found


@pytest.fixture
def cluster(nodes: dict[str, Any], tmp_path: Path) -> Iterator[Cluster]:
    owner = nodes["owner"]
    _, token = do_create_token(owner, name="calls", scopes=[Scope.SERVICES])
    with Testbed(tmp_path) as gateway:
        yield Cluster(gateway, owner, nodes["project"], nodes["environment"], token)


def test_a_service_in_containers_answers_requests_and_sockets(
    nodes: dict[str, Any], cluster: Cluster
) -> None:
    spec = ServiceSpec(replicas=2, readiness_path="/health", drain_s=3)
    service = cluster.deploy(spec, *serve("v1"))

    def ready() -> bool:
        advance_active_services()
        return len(ready_replicas(service)) == 2

    wait_until(nodes, ready, within_s=120)
    with cluster.program(service) as program:
        answers = [program.post("/a", content=b"x" * 100_000) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.text.endswith("POST /a 100000 None None") for answer in answers)
    assert asyncio.run(echo(cluster, service, cluster.token)) == "echo hello"
    do_stop_service(cluster.owner, service)
    wait_until(nodes, lambda: held_milli() == 0)
