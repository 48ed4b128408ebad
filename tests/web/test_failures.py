"""The failure box with the rule that matched, its one-click fix, the page of rules, and asking for help."""

from __future__ import annotations

import pytest
from django.test import override_settings
from django.urls import reverse

from portal.models import Attempt, AuditEntry, FailureRule, Job, Task
from portal.services.jobs.failures import identify_failures

FORM = {
    "code": "licence",
    "title": "No licence",
    "cause": "No licence is free.",
    "fix": "Wait.",
    "action": "retry",
    "pattern": "license server",
    "exit_codes": "1, 3",
    "reasons": "",
    "priority": "50",
    "enabled": "1",
}


@pytest.fixture
def failed(dataset) -> Job:
    """A job that ran out of memory, with its rule."""
    job = dataset.jobs["dino-abl-b128"]
    Task.objects.update(log_complete=True)
    identify_failures()
    return Job.objects.get(pk=job.pk)


def page_of(answer) -> str:
    return " ".join(answer.content.decode().replace("\u00a0", " ").split())


def test_the_box_names_rule_cause_and_fix(failed, client_of):
    page = page_of(client_of("member").get(reverse("job", args=[failed.public_id])))
    for text in (
        "rule host_out_of_memory",
        "reached its memory limit",
        "Retry with 96 GiB",
        "Per task it used 64 GiB of 64 GiB.",
    ):
        assert text in page


def test_one_click_starts_it_again_with_more_memory(failed, client_of):
    answer = client_of("member").post(reverse("job-retry", args=[failed.public_id]))
    fresh = Job.objects.order_by("-pk").first()
    assert answer["Location"] == reverse("job", args=[fresh.public_id])
    assert (fresh.name, fresh.memory_mib, fresh.state) == (failed.name, 96 * 1024, "PENDING")


def test_a_refused_fix_is_shown_on_the_page(dataset, failed, client_of):
    job = dataset.jobs["vit-h-probe-in1k"]
    answer = client_of("member").post(reverse("job-retry", args=[job.public_id]), follow=True)
    assert "Its failure has no fix that can be applied for you." in page_of(answer)


def test_the_line_is_shown_to_readers_of_the_log_only(dataset, failed, client_of):
    line = "torch.OutOfMemoryError: CUDA out of memory."
    Attempt.objects.filter(job=failed).update(
        failure_rule="cuda_out_of_memory", failure_line=line, failure_rank=0
    )
    address = reverse("job", args=[failed.public_id])
    assert line in page_of(client_of("member").get(address))
    rest = f"/api/v1/jobs/{failed.public_id}/"
    failure = client_of("member").get(rest).json()["failure"]
    assert (failure["rule"], failure["line"], failure["rank"], failure["action"]) == (
        "cuda_out_of_memory",
        line,
        0,
        "none",
    )
    Job.objects.filter(pk=failed.pk).update(kind="workspace")  # only its owner reads the log of a workspace
    viewer = client_of("s-varga")
    assert line not in page_of(viewer.get(address))
    assert viewer.get(rest).json()["failure"]["line"] is None


def test_rest_retries_with_the_fix_and_gives_the_support_text(failed, client_of):
    client = client_of("member")
    answer = client.post(f"/api/v1/jobs/{failed.public_id}/retry/", {}, content_type="application/json")
    assert (answer.status_code, answer.json()["memory_mib"]) == (201, 96 * 1024)
    with override_settings(SUPPORT_ADDRESS="help@example.org"):
        found = client.get(f"/api/v1/jobs/{failed.public_id}/support-text/").json()
    assert found["address"] == "help@example.org" and "host_out_of_memory" in found["text"]


def test_the_help_page_offers_the_text_and_a_mail_if_there_is_an_address(failed, client_of):
    address = reverse("job-help", args=[failed.public_id])
    page = page_of(client_of("member").get(address))
    assert "host_out_of_memory" in page and "mailto:" not in page
    with override_settings(SUPPORT_ADDRESS="help@example.org"):
        page = page_of(client_of("member").get(address))
    assert 'href="mailto:help@example.org?subject=Help%20with%20job%20dino-abl-b128' in page


def test_german_pages_show_shipped_rules_in_german_and_texts_of_administrators_as_they_are(failed, client_of):
    german = {"HTTP_ACCEPT_LANGUAGE": "de"}
    title, cause = "Der Speicher reichte nicht aus", "Der Task erreichte seine Speichergrenze"
    fix = "Fordern Sie mehr Speicher an, laden Sie weniger Daten auf einmal"
    own = "Ask the lab."
    box, help_page = (reverse(name, args=[failed.public_id]) for name in ("job", "job-help"))
    rules, edit = reverse("failure-rules"), {"edit": "host_out_of_memory"}
    member, admin = client_of("member"), client_of("admin")
    for page in (
        member.get(box, **german),
        member.get(help_page, **german),
        admin.get(rules, edit, **german),
    ):
        assert [text for text in (title, cause, fix) if text not in page_of(page)] == []
    assert title in page_of(admin.get(rules, {"q": title}, **german))

    form = admin.get(rules, edit, **german).context["values"] | {"row": "host_out_of_memory", "fix": own}
    admin.post(reverse("save-failure-rule"), form | {"enabled": "1"}, **german)
    row = FailureRule.objects.get()
    assert (row.title, row.cause[:8], row.fix) == ("It ran out of memory", "The task", own)
    page = page_of(member.get(box, **german))
    assert title in page and cause in page and own in page and fix not in page


def test_a_rule_is_tried_saved_disabled_and_deleted_on_its_page(failed, client_of):
    admin = client_of("admin")
    trial = FORM | {"pattern": "loss", "exit_codes": "", "try": "1"}
    page = page_of(admin.post(reverse("save-failure-rule"), trial))
    assert "failed attempts match" in page and "dino-abl-b128" in page
    assert not FailureRule.objects.exists()
    page = page_of(admin.post(reverse("save-failure-rule"), FORM, follow=True))
    assert "The rule licence is saved." in page
    row = FailureRule.objects.get()
    assert (row.exit_codes, row.action, row.enabled, row.changed_by) == ([1, 3], "retry", True, "r-castellan")
    admin.post(reverse("enable-failure-rule", args=["licence"]), {"enabled": "0"})
    assert not FailureRule.objects.get().enabled
    form = page_of(admin.get(reverse("failure-rules"), {"edit": "licence"}))
    assert "Change licence" in form and 'value="1, 3"' in form
    admin.post(reverse("remove-failure-rule", args=["licence"]))
    assert not FailureRule.objects.exists()
    assert AuditEntry.objects.filter(action__startswith="failure_rule.").count() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "(a"}, "This is not a valid RE2 pattern: missing ): (a."),
        ({"exit_codes": "many"}, "Enter numbers, such as 1, 137."),
        ({"reasons": "sadness"}, "There is no end reason sadness."),
        ({"priority": "high"}, "Enter a whole number."),
        ({"action": "pray"}, "Choose one."),
        ({"code": "disk_full"}, "There is a rule with this code."),
    ],
)
def test_a_wrong_rule_is_refused_and_the_form_keeps_what_was_typed(dataset, client_of, change, message):
    answer = client_of("admin").post(reverse("save-failure-rule"), FORM | change)
    assert answer.status_code in (400, 409)
    page = page_of(answer)
    assert message in page and "No licence is free." in page
    assert not FailureRule.objects.exists()


def test_rules_are_searched(dataset, client_of):
    admin = client_of("admin")
    page = page_of(admin.get(reverse("failure-rules"), {"q": "duplicate gpu"}))
    assert "nccl_duplicate_gpu" in page and "disk_full" not in page
    assert "No rule matches" in page_of(admin.get(reverse("failure-rules"), {"q": "nothing like it"}))
