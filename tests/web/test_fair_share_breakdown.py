"""The receipt on a waiting job: the fair share of a real cycle replayed line by line, only of what one may see."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from portal.models import Cycle, Job, Membership, Quota
from portal.selectors.scheduling.fair_share_breakdown import list_breakdowns
from portal.web.jobs.job.fair_share_breakdown import fair_share_texts
from scheduler.cycle import run_cycle
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def waiting() -> Job:
    """Two projects below one share four GPUs; the job waits while the other project holds three of them."""
    factories.cluster_settings()
    pool = factories.pool("main-pool")
    factories.node(pool)
    owner, other = factories.user("ada"), factories.user("eve")
    above = factories.project("school")
    lab = factories.project("lab", parent=above, member=owner)
    rival = factories.project("rival", parent=above, member=other)
    for project, guaranteed in ((above, 3000), (lab, 1000), (rival, 1000)):
        Quota.objects.create(project=project, pool=pool, guaranteed_milli=guaranteed)
    batch = factories.environment(tool=False)
    factories.job(other, rival, batch, gpus_per_task=3)
    run_cycle("test", "me")
    job = factories.job(owner, lab, batch, gpus_per_task=4, pool=pool)
    run_cycle("test", "me")
    return job


def test_the_steps_of_a_real_cycle_add_up(waiting) -> None:
    root = factories.user("root", admin=True)
    receipts = list_breakdowns(root, waiting)
    assert [breakdown.project.name for breakdown in receipts] == ["lab", "school"]
    for replayed in fair_share_texts(receipts):
        steps = replayed.source.steps
        assert sum(step["amount_milli"] for step in steps) == replayed.source.fair_share_milli
        assert replayed.steps[0].name == "Guaranteed"
        assert float(replayed.total) == replayed.source.fair_share_milli / 1000
    own = fair_share_texts(receipts)[0]
    assert own.steps[0].explanation == "1 guaranteed, of which it can use 1"
    assert any(line.name == "Round 1" and "weight 1" in line.explanation for line in own.steps)
    assert own.conclusion == (
        "Jobs with up to 2\u00a0GPUs stay within its share and may reclaim borrowed GPUs. "
        "Those within its guarantee of 1 go first."
    )


def test_the_verdict_and_the_breakdown_say_the_same(waiting) -> None:
    """A project below its share, whose job would take it over: both say so, with what it holds and would hold."""
    client = Client()
    client.force_login(waiting.owner)
    body = client.get(f"/api/v1/jobs/{waiting.public_id}/").json()
    assert body["verdict"]["code"] == "over_fair_share"
    assert "lab holds 0 of its fair share of 2; with this job it would hold 4" in body["verdict"]["message"]
    page = client.get(reverse("job", args=[waiting.public_id])).content.decode()
    text = " ".join(page.replace("\u00a0", " ").split())
    assert "Holds 0 and requests 4 in total" in text
    assert "With the 4 GPUs of this job it would hold 4, more than its fair share of 2" in text
    assert "may start more" not in text and "go first" not in text and "goes first" not in text


def test_parent_projects_are_shown_only_to_those_who_may_see_them(waiting) -> None:
    assert [breakdown.project.name for breakdown in list_breakdowns(waiting.owner, waiting)] == ["lab"]
    client = Client()
    client.force_login(waiting.owner)
    page = " ".join(client.get(reverse("job", args=[waiting.public_id])).content.decode().split())
    assert "Fair-share breakdown: lab in main-pool" in page and "Fair share" in page and "school" not in page
    body = client.get(f"/api/v1/jobs/{waiting.public_id}/").json()
    (breakdown,) = body["fair_share_breakdowns"]
    assert breakdown["project"]["name"] == "lab"
    assert sum(step["amount_milli"] for step in breakdown["steps"]) == breakdown["fair_share_milli"]
    assert body["interval"] is None and body["forecasts"] == []
    Membership.objects.create(user=waiting.owner, project=waiting.project.parent, role="viewer")
    assert len(list_breakdowns(waiting.owner, waiting)) == 2


def test_before_the_first_cycle_there_is_none(waiting) -> None:
    Cycle.objects.all().delete()
    assert list_breakdowns(waiting.owner, waiting) == []


def test_a_step_of_another_kind_is_shown_as_it_is(waiting) -> None:
    (breakdown, *_) = list_breakdowns(waiting.owner, waiting)
    breakdown.steps.append({"kind": "lent_back", "amount_milli": 250, "details": {"from_above": 2.0}})
    assert fair_share_texts([breakdown])[0].steps[-1].explanation == "from above 2"
