"""Enrolment by one sudo login, from the page of a new node to the machine."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from django.test import Client
from django.urls import reverse

from agents.keys import PURPOSES, key_path
from portal.models import ClusterSettings, Node, NodeOperation
from portal.services.nodes.enrolment import prepare_agent
from scheduler.nodes.node_checks import run_enrolment
from tests import factories
from tests.agent_program import agent_program

pytestmark = [pytest.mark.rig, pytest.mark.django_db(transaction=True)]

PASSWORD = 'a "secret" of 1 use'


@pytest.fixture
def form(make_rig, settings, tmp_path):
    """A machine with an account that may use sudo, and the confirmed form that adds it as a node."""
    settings.DATA_DIR, settings.KEY_DIR = tmp_path, tmp_path / "keys"
    factories.cluster_settings()
    prepare_agent(agent_program().read_bytes())
    settings.KEY_FILES = {name: str(key_path(settings.KEY_DIR, name)) for name in PURPOSES}
    machine = make_rig(1).nodes[0]
    machine.add_admin("opal", PASSWORD)
    return machine, {
        "name": "fresh",
        "pool": factories.pool().public_id,
        "host": machine.address,
        "port": str(machine.port),
        "host_key": machine.host_key(),
        "confirmed": "yes",
        "sudo_account": "opal",
        "sudo_password": PASSWORD,
    }


@pytest.fixture
def admin(db) -> Client:
    client = Client()
    client.force_login(factories.user("root", admin=True))
    return client


def test_the_chosen_engine_access_is_the_one_that_is_set_up(form, admin) -> None:
    machine, fields = form
    answer = admin.post(reverse("add-node"), {**fields, "engine": "rootless"})
    assert answer.status_code == 302, answer.content
    check = NodeOperation.objects.get(public_id=urlsplit(answer["Location"]).path.rstrip("/").split("/")[-1])
    run_enrolment(check.public_id)
    check.refresh_from_db()
    assert [step["message"] for step in check.steps if not step["ok"]] == []
    assert machine.execute("ls", "/etc/sudoers.d/fairway", check=False).returncode != 0
    assert ClusterSettings.objects.get().cluster_id in machine.execute("cat", "/etc/fairway/node.json").stdout


def test_a_choice_that_is_not_offered_adds_no_node(form, admin) -> None:
    _, fields = form
    answer = admin.post(reverse("add-node"), {**fields, "engine": "$(id)"})
    assert answer.status_code == 400
    assert "Engine access must be one of" in answer.content.decode()
    assert not Node.objects.filter(name="fresh").exists()
