"""The launch form in a browser: what is wrong is said at its field while the form is filled in."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, Route, expect

from portal.models import CodeArchive, Job, Node, Volume
from portal.selectors.nodes.resources_per_gpu import list_resources_per_gpu, proportional_amounts
from portal.services.projects.secrets import do_save_secret

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

OPEN_FOLDS = "() => document.querySelectorAll('#launch details').forEach((fold) => { fold.open = true; })"
MOVE_BUTTON = "() => { document.querySelector('#rail button[type=submit]').style.marginTop = '200px'; }"
AMOUNTS_OF = """(grid) => {
  const { elements } = document.getElementById("launch");
  const set = (name, value) => {
    const field = elements[name];
    if (field instanceof RadioNodeList) { field[0].value = value; field[0].checked = true; return; }
    field.value = value;
  };
  return grid.map((gpus) => {
    for (const [name, value] of Object.entries(gpus)) set(name, value);
    elements.gpus_per_task.dispatchEvent(new Event("input", { bubbles: true }));
    const amount = (name, factor) => Math.round(Number(elements[name].value) * factor);
    return [amount("cores", 1000), amount("memory_gib", 1024), amount("shm_mib", 1)];
  });
}"""
"""CPU (milli), memory and shared memory (MiB) that the launch form shows for each request of GPUs."""
PATIENCE_MS = 20_000


def test_an_invalid_time_limit_is_marked_at_its_field_until_it_is_corrected(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training")
    page.evaluate(OPEN_FOLDS)
    field, note = page.locator("[name=time_limit_s]"), page.locator("#id_time_limit_s_error")
    field.fill("a while")
    expect(field).to_have_attribute("aria-invalid", "true", timeout=PATIENCE_MS)
    expect(note).to_be_visible()
    assert "id_time_limit_s_error" in (field.get_attribute("aria-describedby") or "")
    assert note.inner_text()
    field.fill("4h")
    expect(note).to_be_hidden(timeout=PATIENCE_MS)
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_the_preview_and_the_lines_of_folded_steps_follow_the_page(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("[name=command]").fill("python train.py")
    expect(page.locator("#rail")).not_to_contain_text("Checking", timeout=PATIENCE_MS)
    expect(page.locator("#sum-environment")).to_contain_text("python train.py", timeout=PATIENCE_MS)
    expect(page.locator("#sum-limits")).to_contain_text("no time limit")
    page.goto("/launch/?kind=workspace&defaults=1")  # everything is filled in, and nothing is typed
    expect(page.locator("#sum-data")).to_contain_text("your home", timeout=PATIENCE_MS)
    expect(page.locator("#review")).to_contain_text("Copy YAML")


def test_a_preview_that_fails_is_requested_again(open_as) -> None:
    page, failures = open_as("m-okafor"), []

    def fail_twice(route: Route) -> None:
        failures.append(route)
        if len(failures) == 1:
            route.abort()
        elif len(failures) == 2:
            route.fulfill(status=503)
        else:
            route.continue_()

    page.route("**/launch/check/", fail_twice)
    page.goto("/launch/?kind=workspace&defaults=1")
    expect(page.locator("#rail")).to_contain_text("Checking")
    expect(page.locator("#rail").get_by_role("button", name="Launch")).to_be_enabled()
    expect(page.locator("#rail")).not_to_contain_text("Checking", timeout=2 * PATIENCE_MS)
    assert len(failures) == 3
    provoked = ("Failed to load resource", "Response Status Error Code 503", "[object HTMLElement]")
    open_as.complaints[:] = [each for each in open_as.complaints if not each.startswith(provoked)]


def test_a_job_is_launched_with_few_tabs(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/")
    skip = page.get_by_role("link", name="Skip to preview and launch")
    tabs = 0
    while not skip.evaluate("(link) => link === document.activeElement"):
        page.keyboard.press("Tab")
        tabs += 1
        assert tabs < 5
    page.keyboard.press("Enter")
    launch = page.locator("#rail button[type=submit]").first
    while not launch.evaluate("(button) => button === document.activeElement"):
        page.keyboard.press("Tab")
        tabs += 1
        assert tabs < 15


def test_a_draft_survives_navigation_until_it_is_launched_or_discarded(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("[name=name]").fill("half written")
    page.locator("[name=command]").fill("python train.py")
    page.locator("[name=launcher]").select_option("torchrun")
    page.goto("/jobs/")
    page.goto("/launch/?kind=training&defaults=1")
    note = page.locator("[data-draft]")
    expect(note).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator("[name=name]")).to_have_value("half written")
    expect(page.locator("[name=command]")).to_have_value("python train.py")
    expect(page.locator("[name=launcher]")).to_have_value("torchrun")
    note.get_by_role("button").click()
    expect(page.locator("[name=name]")).not_to_have_value("half written", timeout=PATIENCE_MS)
    page.locator("[name=name]").fill("sent")
    page.locator("[name=command]").fill("true")
    page.locator("[name=launcher]").select_option("none")
    page.locator("#rail button[type=submit]").first.click()
    page.wait_for_url("**/jobs/*/", timeout=PATIENCE_MS)
    page.goto("/launch/?kind=training&defaults=1")
    expect(page.locator("[name=name]")).not_to_have_value("sent", timeout=PATIENCE_MS)
    expect(note).to_be_hidden()


def test_launch_pressed_before_the_preview_is_current_counts(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    launch = page.locator("#rail button[type=submit]").first
    expect(launch).to_have_attribute("aria-disabled", "true", timeout=PATIENCE_MS)  # no command yet
    page.locator("[name=command]").fill("true")
    launch.evaluate("button => button.click()")  # without waiting until it is enabled, or stands still
    page.wait_for_url("**/jobs/*/", timeout=PATIENCE_MS)


def test_launch_pressed_while_a_field_is_wrong_launches_nothing_when_it_is_corrected(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    page.evaluate(OPEN_FOLDS)
    launch = page.locator("#rail button[type=submit]").first
    expect(launch).to_have_attribute("aria-disabled", "true", timeout=PATIENCE_MS)  # no command yet
    page.locator("[name=command]").fill("true")
    page.locator("[name=time_limit_s]").fill("a while")
    launch.evaluate("button => button.click()")
    expect(page.locator("#id_time_limit_s_error")).to_be_visible(timeout=PATIENCE_MS)
    page.locator("[name=time_limit_s]").fill("4h")
    expect(launch).not_to_have_attribute("aria-disabled", "true", timeout=PATIENCE_MS)
    assert "/launch/" in page.url


def test_a_click_counts_when_a_new_preview_replaces_the_pressed_button(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=workspace&defaults=1")
    expect(page.locator("#sum-data")).to_contain_text("your home", timeout=PATIENCE_MS)
    launch = page.locator("#rail button[type=submit]").first
    launch.hover()
    page.mouse.down()
    launch.evaluate("(button) => { button.dataset.pressed = '1'; }")
    page.evaluate("() => window.htmx.trigger(document.getElementById('rail'), 'check')")
    expect(page.locator("[data-pressed]")).to_have_count(0, timeout=PATIENCE_MS)
    page.evaluate(MOVE_BUTTON)
    page.mouse.up()
    page.wait_for_url("**/jobs/*/", timeout=PATIENCE_MS)


def test_amounts_follow_the_gpus_until_they_are_edited(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    cores, memory = page.locator("[name=cores]"), page.locator("[name=memory_gib]")
    before = float(memory.input_value())
    page.locator("#size_presets button").nth(1).click()
    expect(memory).not_to_have_value(str(before), timeout=PATIENCE_MS)
    assert float(memory.input_value()) >= 2 * before
    cores.fill("3")
    expect(page.locator("#id_cores_typed")).to_contain_text("Stays as typed")
    page.locator("#size_presets button").nth(0).click()
    expect(page.locator("#sum-limits")).to_contain_text("no time limit", timeout=PATIENCE_MS)
    expect(cores).to_have_value("3")
    expect(memory).to_have_value(str(int(before)))  # nobody typed it


def test_amounts_on_the_page_are_those_of_the_server(open_as, dataset) -> None:
    """The rule exists twice: ``amounts.js`` and ``proportional_amounts``."""
    for number, node in enumerate(dataset.nodes.values()):
        Node.objects.filter(pk=node.pk).update(
            cpu_milli=7_300 + 3_000 * number, memory_mib=9_001 + 70_007 * number
        )
    shares = list_resources_per_gpu(dataset.people["m-okafor"])
    models = sorted({share.model for share in shares})
    grid = [
        {"pool": pool, "gpu_model": model, "gpus_per_task": count, "milli_per_gpu": milli}
        for pool in ("", *(pool.public_id for pool in dataset.pools.values()))
        for model in ("", *models, "|".join(models[:2]))
        for count in (0, 1, 2, 3, 8, 31)
        for milli in ((1000, 500, 250) if count == 1 else (1000,))
    ]
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("#launch[data-follows]").wait_for()  # the script has arrived
    shown = page.evaluate(AMOUNTS_OF, grid)
    for gpus, amounts in zip(grid, shown, strict=True):
        expected = proportional_amounts(shares, **gpus)
        if expected:  # else the form stays as it was
            assert amounts == list(expected.values()), gpus


@pytest.mark.parametrize("width", [1280, 390])
def test_after_a_remembered_launch_amounts_follow_except_those_that_were_typed(open_as, width) -> None:
    page = open_as("m-okafor", width=width, dark=width == 390)
    page.goto("/launch/?kind=training&defaults=1")
    cores, memory = page.locator("[name=cores]"), page.locator("[name=memory_gib]")
    one = float(memory.input_value())
    page.locator("[name=command]").fill("true")
    cores.fill("3")
    page.reload()  # the draft of this tab keeps what was typed
    expect(page.locator("#id_cores_typed")).to_be_visible()
    page.locator("#rail button[type=submit]").first.evaluate("button => button.click()")
    page.wait_for_url("**/jobs/*/", timeout=PATIENCE_MS)
    page.goto("/launch/?kind=training")
    expect(page.locator("[data-remembered]")).to_be_visible()
    expect(cores).to_have_value("3")
    page.locator("[name=gpus_per_task]").fill("4")
    expect(memory).to_have_value(str(int(4 * one)))
    expect(cores).to_have_value("3")
    assert page.locator("#id_cores_typed").is_visible() and not page.locator("#id_memory_gib_typed").count()
    assert "id_cores_typed" in (cores.get_attribute("aria-describedby") or "")
    page.locator("#id_cores_typed button").click()
    expect(page.locator("#id_cores_typed")).to_have_count(0)
    expect(cores).not_to_have_value("3")
    page.locator("[name=gpus_per_task]").fill("0")
    expect(memory).to_have_value("2")
    expect(cores).to_have_value("1")
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0


@pytest.mark.parametrize("width", [1280, 390])
def test_amounts_of_a_changed_job_follow_its_gpus(open_as, dataset, width) -> None:
    job = dataset.jobs["depth-anything-ft"]
    Job.objects.filter(pk=job.pk).update(typed_amounts=["cpu_milli"])
    page = open_as("m-okafor", width=width, dark=width == 390)
    page.goto(f"/jobs/{job.public_id}/change/")
    cores, memory = page.locator("[name=cores]"), page.locator("[name=memory_gib]")
    typed = cores.input_value()
    expect(page.locator("#id_cores_typed")).to_be_visible()
    page.locator("[name=gpus_per_task]").fill("1")
    one = float(memory.input_value())
    page.locator("[name=gpus_per_task]").fill("2")
    expect(memory).to_have_value(str(int(2 * one)))
    expect(cores).to_have_value(typed)
    with page.expect_navigation():
        page.get_by_role("button", name="Save change").click()
    changed = Job.objects.get(pk=job.pk)
    assert (changed.gpus_per_task, changed.memory_mib) == (2, 2 * one * 1024)
    assert changed.typed_amounts == ["cpu_milli"]


@pytest.mark.parametrize("width", [1280, 390])
def test_volumes_and_secrets_are_chosen_from_lists(open_as, dataset, width) -> None:
    Volume.objects.create(name="imagenet", kind="host_path", path="/srv/imagenet", read_only=True)
    Volume.objects.create(name="runs", kind="host_path", path="/srv/runs")
    do_save_secret(dataset.people["m-okafor"], dataset.people["m-okafor"], "hub-token", "value")
    page = open_as("m-okafor", width=width, dark=width == 390)
    page.goto("/launch/?kind=training&defaults=1")
    page.locator("[name=name]").fill("with data")
    page.locator("[name=command]").fill("true")
    page.locator("#data-h").click()
    lists = page.locator("[data-lines=volumes]")
    expect(page.locator("[name=volumes]")).to_be_hidden()
    for volume, path, access in (("imagenet", "", "ro"), ("runs", "/runs", "")):
        page.get_by_role("button", name="Add a volume").click()
        for label, value in (("Volume", volume), ("Access", access)):
            lists.get_by_label(label, exact=True).last.select_option(value)
        page.get_by_label("Mount path").last.fill(path)
    assert page.locator("[name=volumes]").input_value() == "imagenet ro\nruns /runs"
    page.locator("summary", has_text="Secrets").click()
    page.get_by_role("button", name="Add a secret as a variable").click()
    page.get_by_label("Variable of a secret").fill("HUB_TOKEN")
    page.get_by_label("Secret", exact=True).first.select_option("hub-token")
    assert page.locator("[name=secret_variables]").input_value() == "HUB_TOKEN=hub-token"
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    page.reload()  # the draft of this tab fills the lists again
    page.locator("#data-h").click()
    expect(page.get_by_label("Volume", exact=True).last).to_have_value("runs")
    page.locator("[data-lines=volumes] [data-line-remove]").last.click()
    assert page.locator("[name=volumes]").input_value() == "imagenet ro"


def packed(name: str, *, link: bool = False) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as made:
        header = tarfile.TarInfo(name)
        if link:
            header.type, header.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(header, io.BytesIO())
    return content.getvalue()


def test_the_review_has_all_that_is_launched_also_a_chosen_archive(open_as, dataset) -> None:
    page = open_as("r-castellan")
    page.goto("/launch/?kind=training&defaults=1")
    page.evaluate(OPEN_FOLDS)
    page.locator("[name=project]").select_option(dataset.projects["nlp"].public_id)
    page.locator("[name=name]").fill("with code")
    page.locator("[name=command]").fill("python train.py")
    upload = page.locator("[name=code_upload]")
    upload.set_input_files(
        {"name": "code.tar", "mimeType": "application/x-tar", "buffer": packed("train.py")}
    )
    review = page.locator("#p-yaml")
    expect(review).to_contain_text("code_archive: ", timeout=PATIENCE_MS)
    page.locator("[name=project]").select_option(
        dataset.projects["vision"].public_id
    )  # an archive is of one project
    expect(review).to_contain_text("project: vision", timeout=PATIENCE_MS)
    expect(review).to_contain_text("code_archive: ", timeout=PATIENCE_MS)
    text = review.text_content() or ""
    page.locator("#rail button[type=submit]").first.click()
    page.wait_for_url("**/jobs/*/", timeout=PATIENCE_MS)
    job = Job.objects.select_related("project").get(name="with code")
    assert CodeArchive.objects.filter(project=job.project, sha256=job.code_archive).exists()
    assert yaml.safe_load(text)["code_archive"] == job.code_archive


@pytest.fixture
def open_late(open_as) -> Any:
    """Opens a page of a user whose scripts of one name arrive only when the returned function is called."""

    def opened(name: str, address: str, script: str) -> tuple[Page, Callable[[], None]]:
        page: Page = open_as(name)
        held: list[Route] = []
        page.route(re.compile(rf"/chunks/{script}-\w+\.js"), lambda route: held.append(route))

        def deliver() -> None:
            while not held:
                page.wait_for_timeout(20)
            held.pop().continue_()

        page.goto(address)
        return page, deliver

    return opened


def test_what_is_entered_before_the_script_of_the_form_arrives_counts(open_late) -> None:
    page, deliver = open_late("m-okafor", "/launch/?kind=training&defaults=1", "launch")
    page.evaluate(OPEN_FOLDS)
    cores, memory = page.locator("[name=cores]"), page.locator("[name=memory_gib]")
    one = float(memory.input_value())
    cores.fill("3")
    page.locator("[name=gpus_per_task]").fill("2")
    page.locator("[name=code_upload]").set_input_files(
        {"name": "code.tar", "mimeType": "application/x-tar", "buffer": packed("train.py")}
    )
    deliver()
    expect(memory).to_have_value(str(int(2 * one)))
    expect(page.locator("#id_cores_typed")).to_be_visible()
    expect(page.locator("[name=code_archive]")).to_have_value(re.compile("^[0-9a-f]{64}$"))
    page.reload()
    deliver()
    expect(page.locator("[data-draft]")).to_be_visible()  # it was kept as a draft
    cores.fill("5")  # newer than the draft
    expect(page.locator("#id_cores_typed")).to_be_visible()
    expect(cores).to_have_value("5")


def test_an_edit_before_the_script_of_a_sheet_arrives_is_marked(open_late) -> None:
    page, deliver = open_late("r-castellan", "/quotas/", "editable_sheet")
    page.locator(".fw-edit").first.fill("7")
    deliver()
    expect(page.locator(".fw-edit[data-dirty]")).to_have_count(1)


def test_an_archive_that_is_refused_says_why_before_the_launch(open_as) -> None:
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    page.evaluate(OPEN_FOLDS)
    content = packed("out", link=True)
    page.locator("[name=code_upload]").set_input_files(
        {"name": "a.tar", "mimeType": "a/b", "buffer": content}
    )
    expect(page.locator("#launch")).to_contain_text("is a symbolic link", timeout=PATIENCE_MS)
    assert not CodeArchive.objects.exists()
    open_as.complaints[:] = [each for each in open_as.complaints if "422" not in each]
