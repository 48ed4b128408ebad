"""A move to the machine of another node is refused before that machine is asked anything."""

from __future__ import annotations

import socket

import pytest

from portal.models import Node
from portal.services.nodes import identity
from scheduler.nodes.node_checks import run_move
from tests import factories


@pytest.mark.django_db(transaction=True)
def test_a_node_does_not_move_to_another_one_by_a_name_of_its_address() -> None:
    name = socket.gethostname().lower()
    try:
        address = socket.getaddrinfo(name, None, family=socket.AF_INET)[0][4][0]
    except OSError:
        pytest.skip("the name of this machine has no address")
    factories.cluster_settings()
    pool = factories.pool()
    key = "ssh-ed25519 AAAA"  # both machines were made from one disk image
    node = factories.node(pool, name="gpu1", host="10.0.0.1", host_key=key)
    Node.objects.filter(pk=node.pk).update(reachable=False)
    factories.node(pool, name="gpu2", host=address, host_key=key)
    operation = identity.do_move_node(factories.user(admin=True), node, host=name)
    run_move(operation.public_id)
    operation.refresh_from_db()
    assert (operation.ok, [step["name"] for step in operation.steps]) == (False, ["Address"])
    assert "which is the node gpu2" in operation.steps[0]["message"]
    assert Node.objects.get(pk=node.pk).host == "10.0.0.1"
