"""The receipt on a waiting job: the fair share of a real cycle replayed line by line, only of what one may see."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from portal.models import Cycle, Job, Membership, Quota
from portal.selectors.receipts import receipts_for
from portal.web.receipt import sums_of
from scheduler.cycle import run_cycle
from tests import record

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def waiting() -> Job:
    """Two projects below one share four GPUs; the job waits while the other project holds three of them."""
    record.cluster()
    pool = record.pool("main-pool")
    record.node(pool)
    owner, other = record.person("ada"), record.person("eve")
    above = record.project("school")
    lab = record.project("lab", parent=above, member=owner)
    rival = record.project("rival", parent=above, member=other)
    for project, guaranteed in ((above, 3000), (lab, 1000), (rival, 1000)):
        Quota.objects.create(project=project, pool=pool, guaranteed_milli=guaranteed)
    batch = record.environment(tool=False)
    record.job(other, rival, batch, gpus_per_task=3)
    run_cycle("test", "me")
    job = record.job(owner, lab, batch, gpus_per_task=4, pool=pool)
    run_cycle("test", "me")
    return job


def test_the_steps_of_a_real_cycle_add_up(waiting) -> None:
    root = record.person("root", admin=True)
    receipts = receipts_for(root, waiting)
    assert [receipt.project.name for receipt in receipts] == ["lab", "school"]
    for replayed in sums_of(receipts):
        steps = replayed.receipt.steps
        assert sum(step["amount_milli"] for step in steps) == replayed.receipt.fair_share_milli
        assert replayed.lines[0].name == "Guaranteed"
        assert float(replayed.total) == replayed.receipt.fair_share_milli / 1000
    own = sums_of(receipts)[0]
    assert own.lines[0].words == "1 guaranteed, of which it can use 1"
    assert any(line.name == "Round 1" and "weight 1" in line.words for line in own.lines)
    assert "goes first" in own.verdict or "go first" in own.verdict


def test_what_stands_above_is_told_only_to_those_who_may_see_it(waiting) -> None:
    assert [receipt.project.name for receipt in receipts_for(waiting.owner, waiting)] == ["lab"]
    client = Client()
    client.force_login(waiting.owner)
    page = " ".join(client.get(reverse("job", args=[waiting.public_id])).content.decode().split())
    assert "Receipt: lab in main-pool" in page and "Fair share" in page and "school" not in page
    body = client.get(f"/api/v1/jobs/{waiting.public_id}/").json()
    (receipt,) = body["receipts"]
    assert receipt["project"]["name"] == "lab"
    assert sum(step["amount_milli"] for step in receipt["steps"]) == receipt["fair_share_milli"]
    assert body["interval"] is None and body["forecasts"] == []
    Membership.objects.create(user=waiting.owner, project=waiting.project.parent, role="viewer")
    assert len(receipts_for(waiting.owner, waiting)) == 2


def test_before_the_first_cycle_there_is_none(waiting) -> None:
    Cycle.objects.all().delete()
    assert receipts_for(waiting.owner, waiting) == []


def test_a_step_of_another_kind_is_shown_as_it_is(waiting) -> None:
    (receipt, *_) = receipts_for(waiting.owner, waiting)
    receipt.steps.append({"kind": "lent_back", "amount_milli": 250, "numbers": {"from_above": 2.0}})
    assert sums_of([receipt])[0].lines[-1].words == "from above 2"
