"""Time limits on pages: the warning, asking for more, and the page on which somebody decides."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.models import Attempt, Job, UserRequest


@pytest.fixture
def late(dataset) -> Job:
    """A run of the member's with ten minutes left of its twelve hours."""
    job = dataset.jobs["vit-h-pretrain"]
    Attempt.objects.filter(job=job).update(running_at=timezone.now() - timedelta(hours=11, minutes=50))
    return job


def test_the_job_page_warns_and_accepts_a_request_that_an_administrator_answers(
    dataset, client_of, late
) -> None:
    member, admin = client_of("member"), client_of("admin")
    address = reverse("job", args=[late.public_id])
    page = member.get(address).content.decode()
    assert "Time limit:" in page and "30&nbsp;s to save its work" in page and "data-left" in page
    asked = {"extra_s": "3600", "reason": "the last epoch"}
    page = member.post(reverse("job-extend", args=[late.public_id]), asked, follow=True).content.decode()
    assert "it needs approval, because the scheduler did not determine in time which jobs it delays" in page
    assert "An administrator must decide." in page and "Request extension" not in page
    row = UserRequest.objects.get()
    assert "Approve<" not in member.get(reverse("approvals")).content.decode()
    assert "the last epoch" in admin.get(reverse("approvals")).content.decode()
    decide = reverse("answer-request", args=[row.public_id])
    assert client_of("stranger").post(decide, {"approve": "1"}).status_code == 404
    assert (
        "Only administrators can answer"
        in member.post(decide, {"approve": "1"}, follow=True).content.decode()
    )
    assert Job.objects.get(pk=late.pk).time_limit_s == 12 * 3600
    admin.post(decide, {"approve": "1", "answer": "well then"})
    assert Job.objects.get(pk=late.pk).time_limit_s == 13 * 3600
    page = member.get(address).content.decode()
    assert "Time limit:" not in page and "up to 23\xa0h more" in page
    assert "well then" in member.get(reverse("approvals")).content.decode()


@pytest.mark.parametrize(
    ("more", "said"), [("soon", "is not a time"), ("40 d", "may be added"), ("", "is not a time")]
)
def test_invalid_input_is_reported(client_of, late, more, said) -> None:
    page = client_of("member").post(
        reverse("job-extend", args=[late.public_id]), {"extra_s": more}, follow=True
    )
    assert said in page.content.decode()
    assert not UserRequest.objects.exists()


def test_a_job_without_a_limit_shows_none(dataset, client_of) -> None:
    page = client_of("member").get(reverse("job", args=[dataset.jobs["label-qa"].public_id])).content.decode()
    assert "Extend time limit" not in page and "Its time limit ends" not in page
