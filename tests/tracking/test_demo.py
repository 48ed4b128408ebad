"""The demo: no page of the navigation is empty, and nothing is done in the name of people who were invited."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.test import Client

from portal.models import Gpu, Job, Node, Notice, Project, Sweep, User, UserRequest
from portal.services.cluster import demo, demo_content
from portal.services.cluster.demo import ensure_demo, maintain_demo
from portal.services.jobs.starter_templates import ensure_starter_templates
from portal.services.jobs.submission import do_cancel_job
from portal.web.display.navigation import NAVIGATION
from scheduler.cycle import run_cycle
from scheduler.pipeline_plans import answer_plan_query
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)
EMPTY = 'class="fw-empty"'
PERSONAL = {"home"}
"""Pages of the reader's own work, which the demo never does."""


@pytest.fixture
def admin(transactional_db, tracking_server: Path, tmp_path: Path, settings, monkeypatch) -> User:
    """The administrator of a new demo, whose agents have reported their GPUs."""
    monkeypatch.setenv("FAIRWAY_TRACKING_SOCKET", str(tracking_server / "tracking.sock"))
    settings.DATA_DIR, settings.KEY_DIR = tmp_path, tmp_path / "keys"
    for query in ("profile", "plan"):  # in this process, as worker-ask answers
        monkeypatch.setattr(f"portal.services.jobs.pipeline_plans.query_{query}", _answer(query))
    factories.cluster_settings()
    ensure_starter_templates()
    made = factories.user("first", admin=True)
    ensure_demo(made)
    for node, spec in zip(Node.objects.order_by("pk"), demo.NODES, strict=True):
        Node.objects.filter(pk=node.pk).update(
            state="ready", reachable=True, cpu_milli=16_000, memory_mib=64_000
        )
        Gpu.objects.bulk_create(
            Gpu(node=node, uuid=f"GPU-{spec.name}-{n}", index=n, model=spec.model, memory_mib=spec.memory_mib)
            for n in range(demo.GPUS)
        )
    return made


def _answer(query: str):
    def profile(content):
        return answer_plan_query("profile", {"profile": content})

    def plan(content, levels, memory_bytes):
        return answer_plan_query("plan", {"profile": content, "levels": levels, "memory_bytes": memory_bytes})

    return {"profile": profile, "plan": plan}[query]


def complete_demo() -> None:
    for _ in range(20):
        maintain_demo()
        if not (rows := demo._demo_rows()) or not demo_content.missing_parts():
            assert rows is not None
            return
    pytest.fail(f"missing: {demo_content.missing_parts()}")


def test_no_page_of_the_navigation_is_empty(admin: User) -> None:
    complete_demo()
    run_cycle("test", "me")
    client = Client()
    client.force_login(admin)
    empty = []
    for items in NAVIGATION.values():
        for item in (each for each in items if each.view not in PERSONAL):
            answer = client.get(item.url, follow=True)
            assert answer.status_code == 200, item.url
            if EMPTY in (text := answer.content.decode()):
                at = text.index(EMPTY)
                empty.append((item.url, text[at : at + 600]))
    assert not empty


def test_the_demo_acts_in_the_name_of_its_own_people_only(admin: User) -> None:
    guests = [factories.user("guest"), factories.user("leader")]
    for name, *_rest in demo.PROJECTS:
        for guest, role in zip(guests, ("member", "manager"), strict=True):
            Project.objects.get(name=name).memberships.create(user=guest, role=role)
    complete_demo()
    run_cycle("test", "me")
    for _ in range(3):  # each time others are drawn
        for job in Job.objects.filter(state="PENDING", kind="training"):
            do_cancel_job(job.owner, job)
        assert demo.replenish_demo_jobs()
    own = set(demo.demo_users())
    assert own == {username for username, *_rest in demo.USERS}
    for rows, owner in ((Job, "owner"), (Sweep, "owner"), (UserRequest, "requested_by")):
        names = set(rows.objects.values_list(f"{owner}__username", flat=True))
        assert names and names <= own, rows
    assert not Notice.objects.filter(recipient__in=[*guests, admin]).exists()
    client = Client()
    client.force_login(guests[0])
    assert client.get("/launch/?kind=training").context["last_launch"] is None


def test_an_account_that_has_a_name_of_the_demo_is_not_its_own(transactional_db, settings, tmp_path) -> None:
    settings.DATA_DIR, settings.KEY_DIR = tmp_path, tmp_path / "keys"
    factories.cluster_settings()
    known = factories.user(demo.USERS[0][0])
    ensure_demo(factories.user("first", admin=True))
    assert known.username not in demo.demo_users() and not known.memberships.exists()


def test_what_a_user_deletes_of_the_demo_stays_deleted(admin: User) -> None:
    complete_demo()
    UserRequest.objects.all().delete()
    maintain_demo()
    assert not UserRequest.objects.exists()
