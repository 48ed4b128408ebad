"""Requests on the page Requests, and temporary quota on the page Quotas."""

from __future__ import annotations

import datetime as dt

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.models import NodePool, QuotaAddition, UserRequest
from tests import factories


@pytest.fixture
def asked(dataset) -> dict[str, str]:
    """The form of a member who needs more quota for a week."""
    until = timezone.now() + dt.timedelta(days=7)
    return {
        "kind": "quota",
        "project": dataset.jobs["vit-h-pretrain"].project.public_id,
        "pool": NodePool.objects.order_by("name").first().public_id,
        "gpus": "2",
        "ends_at": f"{until:%Y-%m-%dT%H:%M}",
        "reason": "a deadline",
    }


def text_of(answer) -> str:
    return answer.content.decode().replace("\xa0", " ").replace("&nbsp;", " ")


def test_a_member_requests_quota_and_sees_the_answer(dataset, client_of, asked) -> None:
    member, admin = client_of("member"), client_of("admin")
    page = member.post(reverse("make-request"), asked, follow=True).content.decode()
    assert "Requested from the administrators." in page and "a deadline" in page and "Withdraw" in page
    row = UserRequest.objects.get()
    assert row.extra_milli == 2000 and row.ends_at is not None
    page = text_of(admin.get(reverse("approvals")))
    assert "2 GPUs more" in page and "Simulate the effect" in page and "Approve" in page
    answer = reverse("answer-request", args=[row.public_id])
    assert client_of("stranger").post(answer, {"approve": "1"}).status_code == 404
    page = admin.post(answer, {"approve": "1", "answer": "one week"}, follow=True).content.decode()
    assert "is approved" in page
    page = member.get(reverse("approvals")).content.decode()
    assert "one week" in page and "No open requests" in page
    page = admin.post(answer, {"approve": "0"}, follow=True).content.decode()
    assert "It is already approved by" in page
    quotas = reverse("quotas") + f"?pool={row.pool.name}"
    page = text_of(member.get(quotas))
    assert "Temporary quota" in page and "2 GPUs more" in page and "End now" not in page
    addition = QuotaAddition.objects.get()
    page = text_of(admin.post(reverse("end-quota-addition", args=[addition.public_id]), follow=True))
    assert "has ended" in page and "2 GPUs more" not in page


def test_a_wrong_form_keeps_what_was_typed_and_marks_the_field(dataset, client_of, asked) -> None:
    for change, said in (
        ({"gpus": "many"}, "is not a number of GPUs"),
        ({"ends_at": "soon"}, "Enter a date and a time"),
        ({"ends_at": "2020-01-01T00:00"}, "Must be in the future"),
        ({"reason": " "}, "Say what it is needed for."),
        ({"pool": "none"}, "Choose a pool."),
        ({"kind": "project", "project": "nowhere", "role": "member"}, "There is no project with this name."),
        ({"kind": "environment", "environment": "nothing"}, "There is no environment with this name."),
    ):
        answer = client_of("member").post(reverse("make-request"), asked | change)
        page = answer.content.decode()
        assert answer.status_code == 400 and said in page and 'aria-invalid="true"' in page, change
    assert not UserRequest.objects.exists()


def test_a_stranger_joins_and_withdraws(dataset, client_of) -> None:
    name = dataset.jobs["vit-h-pretrain"].project.name
    stranger = client_of("stranger")
    form = {"kind": "project", "project": name, "role": "member", "reason": "a paper"}
    page = stranger.post(reverse("make-request"), form, follow=True).content.decode()
    assert f"Requested from the managers of {name}." in page
    again = stranger.post(reverse("make-request"), form)
    assert again.status_code == 409 and "You already have an open request for this." in again.content.decode()
    row = UserRequest.objects.get()
    page = stranger.post(reverse("withdraw-request", args=[row.public_id]), follow=True).content.decode()
    assert "The request is withdrawn." in page and "withdrawn" in page


def test_an_administrator_adds_quota_for_a_time(dataset, client_of, asked) -> None:
    name = dataset.jobs["vit-h-pretrain"].project.name
    admin, pool = client_of("admin"), NodePool.objects.get(public_id=asked["pool"])
    form = {"pool": pool.name, "project": name, "gpus": "1.5", "why": "a course"}
    answer = admin.post(reverse("add-quota"), form | {"ends_at": ""})
    page = answer.content.decode()
    assert answer.status_code == 400 and "Enter a date and a time" in page and 'value="1.5"' in page
    page = admin.post(
        reverse("add-quota"), form | {"ends_at": asked["ends_at"]}, follow=True
    ).content.decode()
    assert "1.5 more GPUs then" in page and "a course" in page and "End now" in page
    assert QuotaAddition.objects.get().extra_milli == 1500


def test_open_requests_have_pages_of_their_own(dataset, client_of, asked) -> None:
    client_of("member").post(reverse("make-request"), asked)
    row = UserRequest.objects.get()
    for number in range(50):
        row.pk, row.public_id, row.reason = None, f"request{number}", f"reason {number}"
        row.requested_by = factories.user()
        row.save()
    admin = client_of("admin")
    first, second = (text_of(admin.get(reverse("approvals"), {"open": number})) for number in ("1", "2"))
    assert "51 requests" in first and "reason 49" in first and "a deadline" not in first
    assert 'href="?open=2"' in first and 'href="?open=1"' in second
    assert "51 requests" in second and "a deadline" in second and "reason 49" not in second
