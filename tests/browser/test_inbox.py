"""The inbox in a real Chromium: a notice arrives without a reload, as a number, a row and a desktop notification."""

from __future__ import annotations

import pytest
from django.db import transaction
from playwright.sync_api import Page, expect

from portal.domain.notices.notices import NoticeKind
from portal.models import NoticeDelivery, NoticeWebhook
from portal.services.notices.messages import build_webhook_body
from portal.services.notices.write import NoticeDraft, write_notices
from tests.api.fixture_data import BROWSER
from tests.browser.conftest import elsewhere
from tests.browser.test_accessibility import look_at

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.django_db(transaction=True)]

RECORD = """window.shown = []; window.Notification = class extends EventTarget {
  static permission = "default"; static async requestPermission() { return (this.permission = "granted"); }
  constructor(title, options) { super(); window.shown.push([title, options.body]); } };"""
"""Headless Chromium shows no notifications: what would be shown is recorded."""


def test_a_notice_arrives_live_and_is_read(open_as, dataset) -> None:
    user, job = dataset.people["m-okafor"], dataset.jobs["dino-abl-b128"]

    def notify(title: str) -> None:
        with transaction.atomic():
            draft = NoticeDraft(
                NoticeKind.JOB_FAILED, user.pk, title, "CUDA out of memory on rank 3.", job=job
            )
            write_notices([draft])

    page = open_as("m-okafor")
    page.add_init_script(RECORD)
    page.goto("/inbox/")
    expect(page.locator("[data-live-chip]")).to_have_text("live")
    desktop = page.locator(".fw-row", has_text="This browser asks you first.")
    desktop.get_by_role("button", name="Allow").click()
    expect(page.get_by_text("Allowed in this browser")).to_be_visible()
    failed = page.get_by_role("row", name="Job failed")
    failed.get_by_label("Job failed, Desktop").check()
    expect(failed.get_by_label("Job failed, Inbox")).to_be_disabled()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    expect(page.get_by_label("Job failed, Desktop")).to_be_checked()

    page.evaluate("Notification.permission = 'granted'")
    expect(page.locator("[data-live-chip]")).to_have_text("live")
    count = page.locator("#unread")
    before = int(count.inner_text().split()[0] or 0) if count.inner_text() else 0
    elsewhere(lambda: notify("dino-abl-b128 failed again"))
    expect(page.locator(".fw-msg").first).to_contain_text("dino-abl-b128 failed again")
    expect(count).to_contain_text(str(before + 1))
    shown = page.evaluate("window.shown")
    assert shown == [["dino-abl-b128 failed again", "CUDA out of memory on rank 3."]]

    page.get_by_role("button", name="dino-abl-b128 failed again", exact=True).click()
    expect(page).to_have_url(f"{page.url.split('/jobs/')[0]}/jobs/{job.public_id}/")
    page.goto("/inbox/")
    page.get_by_role("button", name="Mark all as read").click()
    expect(page.locator("#unread")).to_be_empty()
    page.goto("/inbox/?show=unread")
    expect(page.get_by_text("No such notices")).to_be_visible()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_the_inbox_passes_axe(open_as, dataset, width, dark) -> None:
    assert look_at(open_as("m-okafor", width=width, dark=dark), ["/inbox/"]) == ""


SUBSCRIBE = """const fake = (endpoint) => ({ endpoint, unsubscribe: async () => true,
  toJSON: () => ({ endpoint, keys: { p256dh: "%s", auth: "%s" } }) });
PushManager.prototype.subscribe = async ({ applicationServerKey }) => {
  sessionStorage.setItem("endpoint", "https://push.example.org/" + applicationServerKey.length);
  return fake(sessionStorage.getItem("endpoint")); };
PushManager.prototype.getSubscription = async () => {
  const endpoint = sessionStorage.getItem("endpoint"); return endpoint && fake(endpoint); };"""
"""The push service of the browser's vendor cannot be reached in tests; the rest is the browser's own."""


RECORD_IN_WORKER = """() => { self.shown = new Promise((resolve) => {
  self.registration.showNotification = async (title, { body, tag, data }) =>
    resolve([title, body, tag, data]); }); }"""


def deliver_push(page: Page, site: str, message: str) -> None:
    """Give the browser a push message, after its decryption, as its push service does while no page is open."""
    devtools = page.context.new_cdp_session(page)
    registrations: list[str] = []
    devtools.on(
        "ServiceWorker.workerRegistrationUpdated",
        lambda event: registrations.extend(each["registrationId"] for each in event["registrations"]),
    )
    devtools.send("ServiceWorker.enable")
    while not registrations:
        page.wait_for_timeout(50)
    target = {"origin": site, "registrationId": registrations[0]}
    devtools.send("ServiceWorker.deliverPushMessage", {**target, "data": message})


def test_a_browser_is_allowed_named_and_removed(open_as, site) -> None:
    page = open_as("m-okafor")
    page.context.grant_permissions(["notifications"], origin=site)
    page.add_init_script(SUBSCRIBE % (BROWSER["p256dh"], BROWSER["auth"]))
    page.goto("/inbox/")
    page.get_by_role("button", name="Allow in this browser").click()
    expect(page.get_by_text("This browser gets push messages.")).to_be_visible()
    expect(page.get_by_text("(this browser)")).to_be_visible()
    expect(page.get_by_role("button", name="Allow in this browser")).to_be_hidden()
    row = NoticeWebhook.objects.get(channel="push")
    assert (row.host, row.label) == ("push.example.org", "Chrome on Linux")
    assert [each.url for each in page.context.service_workers] == [f"{site}/static/push_worker.js"]

    page.get_by_role("button", name="Send a test push message").click()
    expect(page.get_by_text("The test is on its way")).to_be_visible()
    delivery = NoticeDelivery.objects.select_related("notice__recipient").get()
    (worker,) = page.context.service_workers
    worker.evaluate(RECORD_IN_WORKER)
    deliver_push(page, site, build_webhook_body(delivery).decode())
    shown = worker.evaluate("shown")
    notice = delivery.notice
    assert shown == ["Test of Push", notice.message, notice.public_id, f"{site}/inbox/"]

    page.get_by_role("button", name="Remove Chrome on Linux").click()
    expect(page.get_by_role("button", name="Allow in this browser")).to_be_visible()
    assert not NoticeWebhook.objects.exists()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_the_webhooks_of_a_project_pass_axe(open_as, dataset, width, dark) -> None:
    address = f"/projects/{dataset.projects['vision'].public_id}/webhooks/"
    assert look_at(open_as("r-castellan", width=width, dark=dark), [address]) == ""
