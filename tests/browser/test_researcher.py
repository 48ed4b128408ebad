"""What a researcher does, in a real Chromium: come in, look, launch, follow, stop, and all of it on a phone."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.db import transaction
from playwright.sync_api import expect

from portal.live_events import publish_on_commit
from portal.models import Job, Task
from portal.services.accounts import users
from portal.services.jobs.failures import identify_failures
from portal.services.jobs.submission import do_hold_job
from portal.services.projects.projects import QuotaValues, do_change_quota
from tests import factories
from tests.browser.conftest import elsewhere
from tests.web.dataset import start

pytestmark = [pytest.mark.browser, pytest.mark.early, pytest.mark.django_db(transaction=True)]

PAGES = ["/", "/jobs/", "/queue/", "/policy/?pool=h200", "/launch/", "/account/"]


def test_a_one_time_link_signs_in_and_leaves_no_code_in_the_url(open_as):
    code = users.do_create_magic_link(None, factories.user("first-admin", admin=True))
    page = open_as()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"/sign-in/link/#{code}")
    page.wait_for_url("**/account/")
    expect(page.get_by_role("heading", name="Your account")).to_be_visible()
    assert not [address for address in asked if code in address]


def test_signing_in_by_keyboard(open_as, dataset):
    user = dataset.people["m-okafor"]
    user.set_password(factories.PASSWORD)
    user.save()
    page = open_as()
    page.goto("/jobs/?state=waiting")
    page.keyboard.type("m-okafor")
    page.keyboard.press("Tab")
    page.keyboard.type(factories.PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/jobs/?state=waiting")
    expect(page.get_by_role("link", name="depth-anything-ft")).to_be_visible()


def test_a_verdict_appears_on_the_open_page(open_as, dataset):
    page = open_as("m-okafor")
    job = dataset.jobs["depth-anything-ft"]
    page.goto(f"/jobs/{job.public_id}/")
    expect(page.locator("[data-live-chip]")).to_have_text("live")
    elsewhere(lambda: do_hold_job(dataset.people["m-okafor"], Job.objects.get(pk=job.pk), True))
    expect(page.locator("#job-head")).to_contain_text("Held")
    expect(page.get_by_role("button", name="Release")).to_be_visible()


def test_lost_messages_reach_the_open_page_within_two_minutes(open_as, dataset):
    page = open_as("m-okafor")
    page.clock.install()
    job = dataset.jobs["depth-anything-ft"]
    page.goto(f"/jobs/{job.public_id}/")
    expect(page.locator("[data-live-chip]")).to_have_text("live")
    Job.objects.filter(pk=job.pk).update(held=True)  # and nobody is told
    page.clock.run_for(20_000)
    expect(page.locator("#job-head")).not_to_contain_text("Held", timeout=1_000)
    page.clock.run_for(100_000)
    expect(page.locator("#job-head")).to_contain_text("Held")


def test_a_verdict_before_the_subscription_also_appears(open_as, dataset):
    page = open_as("m-okafor")
    job = dataset.jobs["depth-anything-ft"]

    def hold_first(socket) -> None:
        elsewhere(lambda: do_hold_job(dataset.people["m-okafor"], Job.objects.get(pk=job.pk), True))
        socket.connect_to_server()

    page.route_web_socket("**/live/", hold_first)
    page.goto(f"/jobs/{job.public_id}/")
    expect(page.locator("#job-head")).to_contain_text("Held")
    expect(page.locator("[data-live-chip]")).to_have_text("live")


def test_a_cached_page_refreshes_when_shown_again(open_as, dataset):
    page = open_as("m-okafor")
    page.goto("/")
    expect(page.locator("[data-live-chip]")).to_have_text("live")
    Job.objects.filter(pk=dataset.jobs["depth-anything-ft"].pk).update(name="renamed-meanwhile")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    expect(page.get_by_role("link", name="renamed-meanwhile")).to_be_visible()


def test_the_log_appears_when_the_job_starts(open_as, dataset, settings):
    page = open_as("m-okafor")
    job = dataset.jobs["depth-anything-ft"]
    page.goto(f"/jobs/{job.public_id}/")
    expect(page.locator("[data-live-chip]")).to_have_text("live")
    folder = settings.LOG_DIR / job.public_id / "1"
    folder.mkdir(parents=True)
    (folder / "0.k8s").write_text("2026-05-12T13:52:00.000000+00:00 stdout F the first line of the run\n")
    place = [("a100-2", list(range(8)))]
    elsewhere(lambda: begin(dataset, job, place))
    expect(page.get_by_text("the first line of the run")).to_be_visible(timeout=10_000)
    expect(page.get_by_role("heading", name="GPU memory")).to_be_visible()


def begin(dataset, job, place) -> None:
    with transaction.atomic():
        start(dataset, job, place, ran=dt.timedelta(seconds=1))


def test_without_a_socket_the_page_shows_its_age_and_polls(open_as, dataset):
    page = open_as("m-okafor")
    page.route_web_socket("**/live/", lambda socket: socket.close())
    page.goto("/")
    expect(page.locator("[data-live-chip]")).to_contain_text("data is")
    Job.objects.filter(pk=dataset.jobs["depth-anything-ft"].pk).update(name="renamed-meanwhile")
    expect(page.get_by_role("link", name="renamed-meanwhile")).to_be_visible(timeout=12_000)


def test_launching_from_the_form(open_as, dataset):
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training")
    page.get_by_label("Name", exact=True).fill("from-the-page")
    page.get_by_label("Command", exact=True).fill("python train.py")
    page.get_by_role("button", name="16").is_disabled()
    page.get_by_role("button", name="4 free now").click()
    expect(page.locator("#v-yaml")).to_contain_text("gpus_per_task: 4")
    page.get_by_label("GPUs", exact=True).fill("9")
    expect(page.locator("#rail")).to_contain_text("This can never start here")
    page.get_by_role("button", name="Nearest feasible request").click()
    expect(page.get_by_label("GPUs", exact=True)).to_have_value("8")
    page.get_by_label("GPUs", exact=True).fill("2")
    expect(page.locator("#rail")).to_contain_text("Fits on free GPUs")
    page.locator("#rail").get_by_role("button", name="Launch").first.click()
    page.wait_for_url("**/jobs/*/")
    expect(page.get_by_role("heading", name="from-the-page")).to_be_visible()
    assert Job.objects.get(name="from-the-page").gpus_per_task == 2


def test_a_stop_can_be_undone(open_as, dataset):
    page = open_as("m-okafor")
    job = dataset.jobs["depth-anything-ft"]
    page.goto(f"/jobs/{job.public_id}/")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelling depth-anything-ft in")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("Cancelling depth-anything-ft in")).to_have_count(0)
    assert Job.objects.get(pk=job.pk).state == "PENDING"
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("depth-anything-ft is stopped.")).to_be_visible(timeout=10_000)
    assert Job.objects.get(pk=job.pk).state == "CANCELLED"


def test_logs_follow_and_filter(open_as, dataset, settings):
    page = open_as("m-okafor")
    job = dataset.jobs["vit-h-pretrain"]
    page.goto(f"/jobs/{job.public_id}/logs/")
    lines = page.locator("[data-log-lines] li:visible")
    expect(page.locator("[data-log-foot]")).to_contain_text("204 lines")
    page.get_by_label("Filter log lines").fill("/checkpoint took/")
    expect(page.locator("[data-log-foot]")).to_contain_text("of 204 lines match")
    assert 0 < lines.count() < 20
    page.get_by_label("Filter log lines").fill("")
    with (settings.LOG_DIR / job.public_id / "1" / "0.k8s").open("a") as log:
        log.write("2026-05-12T13:52:00.000000+00:00 stdout F a line that came later\n")
    expect(page.get_by_text("a line that came later")).to_be_visible()


def test_charts_are_drawn_with_their_numbers(open_as, dataset):
    page = open_as("m-okafor")
    page.goto(f"/jobs/{dataset.jobs['vit-h-pretrain'].public_id}/metrics/")
    expect(page.locator("[data-plot=gpu] canvas")).to_be_visible()
    expect(page.locator("[data-now=gpu_memory]")).to_contain_text("of 141")
    page.get_by_text("The same as a table").click()
    expect(page.locator("[data-plot-table] tbody tr").first).to_be_visible()


def test_keys_and_palette(open_as, dataset):
    page = open_as("m-okafor")
    page.goto("/")
    page.keyboard.press("g")
    page.keyboard.press("j")
    page.wait_for_url("**/jobs/")
    page.keyboard.press("/")
    expect(page.get_by_label("Search jobs by name or id")).to_be_focused()
    page.keyboard.press("Escape")
    page.locator("body").click(position={"x": 5, "y": 500})
    page.keyboard.press("Control+k")
    page.keyboard.type("vit-h-pre")
    expect(page.get_by_role("option", name="vit-h-pretrain")).to_be_visible()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{dataset.jobs['vit-h-pretrain'].public_id}/")


def test_the_list_of_keys_opens_and_each_page_key_works(open_as):
    page = open_as("m-okafor")
    page.goto("/")
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(keys).to_be_visible()
    listed = keys.locator("[data-pages] kbd:last-child").all_inner_texts()
    offered = [link.get_attribute("data-key") for link in page.locator(".fw-side [data-key]").all()]
    assert listed == offered and len(listed) > 3
    assert keys.get_by_text("Search or go to a page").count() == 2
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()
    page.keyboard.press("g")
    page.keyboard.press(listed[1])
    expect(page).not_to_have_url(re.compile(r"//[^/]+/$"))


def test_colours_follow_the_system_or_the_choice(open_as):
    page = open_as("m-okafor", dark=True)
    page.goto("/")
    theme = page.locator("html")
    expect(theme).to_have_attribute("data-bs-theme", "dark")
    page.locator(".fw-side [data-theme-switch]").click()
    expect(theme).to_have_attribute("data-bs-theme", "light")
    page.reload()
    expect(theme).to_have_attribute("data-bs-theme", "light")


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.long)])
def test_no_page_overflows_horizontally(open_as, dataset, width):
    page = open_as("m-okafor", width=width)
    names = ("vit-h-pretrain", "depth-anything-ft", "dino-abl-b128")
    jobs = [f"/jobs/{dataset.jobs[name].public_id}/" for name in names]
    for address in [*PAGES, *jobs, f"{jobs[0]}logs/", f"{jobs[0]}metrics/", f"{jobs[0]}run/"]:
        page.goto(address)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address


def test_a_choice_of_rows_survives_live_changes(open_as, dataset):
    page = open_as("m-okafor")
    page.goto("/jobs/")
    page.get_by_label("Select depth-anything-ft").check()
    expect(page.get_by_text("1 job selected")).to_be_visible()
    elsewhere(lambda: publish_on_commit("cluster", {"kind": "nodes"}))
    page.wait_for_timeout(1_000)
    expect(page.get_by_label("Select depth-anything-ft")).to_be_checked()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_role("heading", name="Stop 1 of 1 selected job?")).to_be_visible()
    page.get_by_role("button", name="Stop 1 job").click()
    expect(page.get_by_role("heading", name="1 job stopped")).to_be_visible()


def test_a_finger_reads_the_exact_time_of_a_change(open_as, dataset):
    numbers = QuotaValues(guaranteed_milli=2000, limit_milli=9000, weight=2.0, priority=0)
    project, pool = dataset.projects["vision"], dataset.pools["h200"]
    do_change_quota(dataset.people["r-castellan"], project, pool, numbers, version=None, reason="A deadline.")
    page = open_as("r-castellan", width=390, touch=True)
    page.goto(f"/quotas/?pool={pool.name}")
    time = page.locator("section[aria-labelledby=hi-h] time").first
    exact = time.get_attribute("title")
    time.evaluate("element => element.scrollIntoView({ block: 'center' })")
    time.tap()
    assert page.locator(".fw-tip").inner_text() == exact
    page.get_by_role("heading", name="History").tap()
    assert page.locator(".fw-tip").count() == 0


def test_the_queue_opens_by_key_updates_live_and_keeps_expanded_rows(open_as, dataset):
    page = open_as("m-okafor")
    page.goto("/")
    page.keyboard.press("g")
    page.keyboard.press("q")
    page.wait_for_url("**/queue/")
    expect(page.locator("[data-live-chip]")).to_have_text("live")
    page.get_by_text("The same as a table").click()
    expect(page.locator("#queue-table-box")).to_be_visible()
    job = Job.objects.get(pk=dataset.jobs["depth-anything-ft"].pk)
    elsewhere(lambda: do_hold_job(dataset.people["m-okafor"], job, True))
    elsewhere(lambda: publish_on_commit("cluster", {"kind": "cycle"}))
    expect(page.locator("#queue").get_by_text("Held", exact=True)).to_be_visible(timeout=10_000)
    expect(page.locator("#queue-table-box")).to_be_visible()


def test_a_failed_job_is_retried_by_the_fix_of_its_rule(open_as, dataset):
    job = dataset.jobs["dino-abl-b128"]
    Task.objects.update(log_complete=True)
    identify_failures()
    page = open_as("m-okafor")
    page.goto(f"/jobs/{job.public_id}/")
    expect(page.get_by_text("rule host_out_of_memory")).to_be_visible()
    page.get_by_role("button", name="Retry with 96 GiB").click()
    page.wait_for_url(re.compile(rf"/jobs/(?!{job.public_id})[a-z0-9]+/$"))
    fresh = Job.objects.order_by("-pk")[0]
    assert page.url.endswith(f"/jobs/{fresh.public_id}/")
    assert (fresh.name, fresh.memory_mib) == (job.name, 96 * 1024)
