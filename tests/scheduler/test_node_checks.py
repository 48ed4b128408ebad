"""Enrolment by one sudo login, from the page of a new node to the machine."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from django.test import Client
from django.urls import reverse

from agents.keys import PURPOSES, fingerprint, key_path
from portal.models import ClusterSettings, Node, NodeOperation
from portal.services.nodes.enrolment import ensure_cluster, prepare_agent
from portal.services.nodes.identity import do_confirm_host_key
from scheduler.nodes.node_checks import run_check, run_enrolment
from tests import factories
from tests.agent_program import agent_program

pytestmark = [pytest.mark.rig, pytest.mark.django_db(transaction=True)]

PASSWORD = 'a "secret" of 1 use'


@pytest.fixture
def form(make_rig, settings, tmp_path):
    """A machine with an account that may use sudo, and the confirmed form that adds it as a node."""
    settings.DATA_DIR, settings.KEY_DIR = tmp_path, tmp_path / "keys"
    factories.cluster_settings()
    ensure_cluster()
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
    check = started(admin.post(reverse("add-node"), {**fields, "engine": "rootless"}))
    run_enrolment(check.public_id)
    check.refresh_from_db()
    assert [step["message"] for step in check.steps if not step["ok"]] == []
    assert machine.execute("ls", "/etc/sudoers.d/fairway", check=False).returncode != 0
    assert ClusterSettings.objects.get().cluster_id in machine.execute("cat", "/etc/fairway/node.json").stdout


def test_a_reinstalled_machine_is_confirmed_and_set_up_again_from_its_pages(form, admin) -> None:
    machine, fields = form
    operation = started(admin.post(reverse("add-node"), fields))
    run_enrolment(operation.public_id)
    node = operation.node
    old = fingerprint(node.host_key)
    machine.reinstall()
    machine.add_admin("opal", PASSWORD)

    address = reverse("node-host-key", args=[node.public_id])
    page = admin.get(address).content.decode()
    new = fingerprint(machine.host_key())
    assert f'id="known">{old}<' in page and f'id="presented">{new}<' in page
    refused = admin.post(address, {"fingerprint": old, "reason": "a new disk"})
    assert refused.status_code == 409 and "Nothing was confirmed" in refused.content.decode()
    assert admin.post(address, {"fingerprint": new, "reason": " "}).status_code == 400
    operation = started(admin.post(address, {"fingerprint": new, "reason": "a new disk"}))
    run_check(operation.public_id)
    shown = reverse("node-operation", args=[node.public_id, operation.public_id])
    assert reverse("enrol-node", args=[node.public_id]) in admin.get(shown).content.decode()
    page = admin.get(address).content.decode()
    assert old in page and "a new disk" in page and "there is nothing to confirm" in page

    page = admin.get(reverse("enrol-node", args=[node.public_id]), {"engine": "rootless"})
    assert new in page.content.decode()
    login = {"sudo_account": "opal", "sudo_password": PASSWORD, "engine": page.context["engine"]}
    operation = started(admin.post(reverse("test-node", args=[node.public_id]), login))
    assert (operation.node_id, operation.kind) == (node.pk, "enrol")
    run_enrolment(operation.public_id)
    operation.refresh_from_db()
    assert [step["message"] for step in operation.steps if not step["ok"]] == []
    machine.reinstall()
    node.refresh_from_db()
    new = fingerprint(machine.host_key())
    do_confirm_host_key(operation.actor, node, fingerprint=new, reason="once more")
    machine.execute("sh", "-s", text_in=page.context["script"])  # the same by hand
    operation = started(admin.post(reverse("test-node", args=[node.public_id])))
    run_check(operation.public_id)
    operation.refresh_from_db()
    assert operation.ok, operation.steps


def started(answer) -> NodeOperation:
    assert answer.status_code == 302, answer.content
    return NodeOperation.objects.get(public_id=urlsplit(answer["Location"]).path.rstrip("/").split("/")[-1])


def test_a_choice_that_is_not_offered_adds_no_node(form, admin) -> None:
    _, fields = form
    answer = admin.post(reverse("add-node"), {**fields, "engine": "$(id)"})
    assert answer.status_code == 400
    assert "Engine access must be one of" in answer.content.decode()
    assert not Node.objects.filter(name="fresh").exists()
