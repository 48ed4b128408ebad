"""The demo's pool lets gangs use a network, so that every launcher can be tried on it."""

from __future__ import annotations

import pytest
from django.db import transaction

from agents.launchers import REQUIRES_RENDEZVOUS
from portal.domain.nodes.gang_fabric import GangFabric
from portal.models import Environment, Job, Node, NodePool, Rendezvous, User
from portal.services.cluster.demo import ENVIRONMENT, POOL, ensure_demo
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.nodes.gang_fabric import do_set_gang_fabric
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def admin() -> User:
    factories.cluster_settings()
    user = factories.user(admin=True)
    ensure_demo(user)
    return user


def pool() -> NodePool:
    return NodePool.objects.get(name=POOL)


def test_gangs_have_a_network_until_an_administrator_forbids_it(admin: User) -> None:
    assert pool().allow_host_network
    do_set_gang_fabric(admin, pool(), allowed=False, fabric=GangFabric())
    ensure_demo(admin)
    assert not pool().allow_host_network


def test_gangs_of_every_launcher_meet_on_this_machine(admin: User) -> None:
    """Without an interface to other machines, and on ports that the nodes share."""
    environment = Environment.objects.get(name=ENVIRONMENT)
    project = factories.project(member=admin)
    nodes = list(Node.objects.filter(pool=pool()).order_by("pk")[:2])
    for node in nodes:
        Node.objects.filter(pk=node.pk).update(
            state="ready", reachable=True, cpu_milli=16_000, memory_mib=64_000,
            agent_info={"capabilities": ["rendezvous_port"], "interfaces": []},
        )  # fmt: skip
    used: set[int] = set()
    for launcher in sorted(REQUIRES_RENDEZVOUS):
        job = factories.job(
            admin,
            project,
            environment,
            pool=pool(),
            tasks=2,
            launcher=launcher,
            gpus_per_task=0,
            memory_mib=64,
        )
        with transaction.atomic():
            row = Job.objects.select_for_update().get(pk=job.pk)
            placements = [RankPlacement(Node.objects.get(pk=node.pk), []) for node in nodes]
            attempt = job_control.start_attempt(row, pool(), placements, epoch=1)
        meeting = Rendezvous.objects.get(attempt=attempt)
        assert meeting.address == "127.0.0.1" and set(meeting.interfaces.values()) == {"lo"}
        ports = [
            meeting.port,
            *(port for task in attempt.task_rows.all() for port in task.gang_ports.values()),
        ]
        assert not used & set(ports) and len(ports) == len(set(ports)), launcher
        used |= set(ports)
