"""A job fails on a real agent, and its stored log names the cause on its page."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from portal.models import Job
from portal.services.jobs.failures import identify_failures
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine

pytestmark = pytest.mark.django_db(transaction=True)

SCRIPT = """
if [ "$FAIRWAY_TASK" = 0 ]; then sleep 600; fi
echo "step 811  loss 3.118"
echo "OSError: [Errno 28] No space left on device: '/scratch/step_4000.pt'" >&2
exit 3
"""


@pytest.fixture
def dataset(harness: EngineHarness, request: pytest.FixtureRequest) -> dict[str, Any]:
    name = f"f{abs(hash(request.node.name)) % 10**9}"
    harness.mark_enrolled(harness.create_node(name=name))
    owner = factories.user("ada")
    return {
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
        "engine": InProcessEngine(),
    }


def test_the_log_of_a_failed_rank_names_the_cause(dataset: dict[str, Any]) -> None:
    job = factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        command=["sh", "-c", SCRIPT],
        tasks=2,
        memory_mib=64,
        termination_grace_s=1,
    )

    def identified() -> bool:
        identify_failures()
        return Job.objects.filter(pk=job.pk, attempts__failure_checked_at__isnull=False).exists()

    assert dataset["engine"].run_until(identified, 40.0)
    attempt = job.attempts.get()
    assert (attempt.failure_rule, attempt.failure_rank) == ("disk_full", 1)
    assert attempt.failure_line == "OSError: [Errno 28] No space left on device: '/scratch/step_4000.pt'"
    client = Client()
    client.force_login(dataset["owner"])
    page = client.get(reverse("job", args=[job.public_id])).content.decode()
    assert "The disk is full" in page and "rule disk_full" in page and "step_4000.pt" in page
    help_text = client.get(reverse("job-help", args=[job.public_id])).content.decode()
    assert "step 811  loss 3.118" in help_text
