"""The page Inbox: notices are read, preferences and webhooks are saved, and refusals keep what was typed."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.utils import timezone

from portal.models import Notice, NoticeDelivery, NoticePreferences, NoticeWebhook
from tests.api.fixture_data import BROWSER

TIMES = {"quiet_start": "22:00", "quiet_end": "07:00", "digest_at": "08:30"}


@pytest.fixture
def client(client_of):
    return client_of("member")


@pytest.fixture
def notice(dataset) -> Notice:
    Notice.objects.all().delete()
    user, job = dataset.people["m-okafor"], dataset.jobs["vit-h-pretrain"]
    values = {"kind": "job_failed", "title": "vit-h failed", "message": "Out of memory.", "in_inbox": True}
    return Notice.objects.create(recipient=user, job=job, **values)


def test_an_empty_inbox_explains_what_will_arrive(client):
    Notice.objects.all().delete()
    page = client.get("/inbox/").content.decode()
    assert "Starts, ends and failures of your jobs" in page
    assert "no mail server is configured" in page


def test_a_notice_is_counted_until_it_is_opened(client, notice):
    page = client.get("/").content.decode()
    assert re.search(r'id="unread" .*?<span class="fw-inbox__n">1</span>', page)
    answer = client.post(f"/inbox/{notice.public_id}/open/")
    assert answer["Location"] == f"/jobs/{notice.job.public_id}/"
    assert "fw-inbox__n" not in client.get("/inbox/count/").content.decode()
    assert "vit-h failed" in client.get("/inbox/").content.decode()
    assert "No such notices" in client.get("/inbox/?show=unread").content.decode()


def test_notices_have_filters_and_pages(client, dataset, notice):
    user = dataset.people["m-okafor"]
    values = {"recipient": user, "kind": "quota_changed", "in_inbox": True}
    Notice.objects.bulk_create(Notice(title=f"quota {number}", **values) for number in range(25))
    page = client.get("/inbox/").content.decode()
    assert "All 26" in page and "Quotas 25" in page and "page 1 of 2" in page
    assert "vit-h failed" in client.get("/inbox/?page=2").content.decode()
    assert "quota 24" not in client.get("/inbox/?show=jobs").content.decode()


def test_preferences_are_saved_and_refused_ones_keep_what_was_typed(client, dataset):
    chosen = {"job_failed": ["desktop", "email"], "job_started": ["inbox", ""]}
    assert client.post("/inbox/preferences/", chosen | TIMES).status_code == 302
    row = NoticePreferences.objects.get(user=dataset.people["m-okafor"])
    assert row.channels["job_failed"] == ["desktop", "email"]
    assert row.channels["idle_warning"] == []
    assert (row.quiet_start, row.digest_at) == (dt.time(22), dt.time(8, 30))
    answer = client.post("/inbox/preferences/", {"job_ended": "slack"} | TIMES | {"quiet_end": "22:00"})
    page = answer.content.decode()
    assert answer.status_code == 400 and "Must differ from the start." in page
    assert re.search(r'name="job_ended" value="slack" checked', page)
    assert NoticePreferences.objects.get(user=dataset.people["m-okafor"]).quiet_end == dt.time(7)


def test_the_key_of_a_webhook_is_shown_once(client):
    answer = client.post("/inbox/channels/webhook/", {"url": "https://hooks.example.org/x"})
    assert 'id="hook-key"' in answer.content.decode()
    page = client.get("/inbox/").content.decode()
    assert "hooks.example.org" in page and 'id="hook-key"' not in page
    client.post("/inbox/channels/webhook/", {"remove": "1"})
    assert not NoticeWebhook.objects.exists()


def test_a_refused_address_stays_in_its_field(client):
    answer = client.post("/inbox/channels/slack/", {"url": "http://10.0.0.1/x"})
    page = answer.content.decode()
    assert answer.status_code == 400 and "is not a public address" in page
    assert re.search(r'value="http://10.0.0.1/x" aria-invalid="true"', page)
    assert client.post("/inbox/channels/pigeon/", {"url": "https://a.example/"}).status_code == 404


def test_failed_deliveries_are_listed_and_tried_again(client, notice):
    row = NoticeDelivery.objects.create(
        notice=notice, channel="webhook", state="failed", due_at=timezone.now(), last_error="It broke."
    )
    assert "It broke." in client.get("/inbox/").content.decode()
    client.post(f"/inbox/deliveries/{row.public_id}/retry/")
    row.refresh_from_db()
    assert row.state == "pending"


def test_browsers_are_listed_and_removed(client):
    page = client.get("/inbox/").content.decode()
    assert "data-push-form" in page and "Send a test<span" not in page.partition("Push</span>")[2][:400]
    assert client.post("/inbox/browsers/", BROWSER).status_code == 302
    row = NoticeWebhook.objects.get(channel="push")
    page = client.get("/inbox/").content.decode()
    assert "Firefox on Linux" in page and row.url_digest in page and "push.example.org" in page
    refused = client.post("/inbox/browsers/", BROWSER | {"p256dh": "AAAA"}, follow=True)
    assert "These are not the keys of a browser" in refused.content.decode()
    client.post(f"/inbox/browsers/{row.public_id}/remove/")
    assert not NoticeWebhook.objects.exists()


def test_webhooks_of_a_project_keep_what_was_typed_and_show_the_key_once(client_of, dataset):
    admin, address = client_of("admin"), f"/projects/{dataset.projects['vision'].public_id}/webhooks/"
    assert address in admin.get(address.removesuffix("webhooks/")).content.decode()
    form = {"channel": "webhook", "url": "http://10.0.0.1/x", "events": ["job_failed"]}
    refused = admin.post(address, form)
    page = refused.content.decode()
    assert refused.status_code == 400 and "is not a public address" in page
    assert re.search(r'value="http://10.0.0.1/x" aria-invalid="true"', page)
    assert re.search(r'name="events" value="job_failed" checked', page)
    page = admin.post(address, form | {"url": "https://a.example/x"}).content.decode()
    assert 'id="hook-key"' in page
    page = admin.get(address).content.decode()
    assert "a.example" in page and 'id="hook-key"' not in page
    assert "Choose from" in admin.post(address, {"channel": "webhook"}).content.decode()
    admin.post(address, {"channel": "webhook", "test": "1"})
    assert "Test of Webhook" in admin.get(address).content.decode()
    NoticeDelivery.objects.update(last_error="It broke.", state="failed")
    admin.post(address, {"retry": NoticeDelivery.objects.get().public_id})
    assert NoticeDelivery.objects.get().state == "pending"
    admin.post(address, {"channel": "webhook", "remove": "1"})
    assert not NoticeWebhook.objects.exists()
    assert "node_maintenance" in admin.get("/webhooks/").content.decode()
