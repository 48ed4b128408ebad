"""Texts that rows keep in English, on pages of German readers."""

from __future__ import annotations

import ast
import re

import pytest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext, override

from portal.catalogues import stored_translations
from portal.domain.jobs.shipped_failure_rules import SHIPPED_RULES
from portal.management.stored_templates import stored_templates
from portal.models import Cycle, JobEvent, JobVerdict, Notice
from portal.stored_texts import StoredTemplates, StoredTranslation, translate_stored

GERMAN = {
    "Needs 4 × 2 GPUs with 40 GiB or more each; 3 are free now, at most 2 on one node: enough for 1 of "
    "its 4 tasks in the pool main.": (
        "Braucht 4 × 2 GPUs mit je mindestens 40 GiB; 3 sind jetzt frei, höchstens 2 auf einem Knoten: "
        "genug für 1 seiner 4 Tasks im Pool main."
    ),
    "Needs 8 GPUs, which must be guaranteed because the job is not preemptible. vision (which contains "
    "robots) uses 3.5 of its guaranteed 4 for non-preemptible jobs in the pool a.": (
        "Braucht 8 GPUs, was garantiert sein muss, weil der Job nicht verdrängbar ist. vision (enthält "
        "robots) belegt 3.5 von garantierten 4 für nicht verdrängbare Jobs im Pool a."
    ),
    "Needs 1 GPU + 4 × 2 GPUs in one rack; no node accepts jobs now: 2 are out of service, 1 is "
    "unreachable.": (
        "Braucht 1 GPU + 4 × 2 GPUs in einem rack; kein Knoten nimmt jetzt Jobs an: 2 sind außer Betrieb,"
        " 1 ist nicht erreichbar."
    ),
    "Needs 4 A100 or H100 GPUs; no single GPU model has 8 free GPUs: 4 of A100, 4 of H100.": (
        "Braucht 4 A100 oder H100 GPUs; kein einzelnes GPU-Modell hat 8 freie GPUs: 4 von A100, 4 von H100."
    ),
    "Needs 2 GPUs; 2 are free now, but no node has them together with 4 CPUs and 8 GiB. Its image needs "
    "CUDA 12.4: 1 node is skipped because its driver supports only CUDA 12.1.": (
        "Braucht 2 GPUs; 2 sind jetzt frei, aber kein Knoten hat sie zusammen mit 4 CPUs und 8 GiB. Sein "
        "Image braucht CUDA 12.4: 1 Knoten wird übergangen, weil sein Treiber nur CUDA 12.1 unterstützt."
    ),
    "It starts after prep, train and 2 more have completed.": (
        "Er startet, sobald prep, train und 2 weitere abgeschlossen sind."
    ),
    "worker 1: The command ended with exit code 1. 3 of 4 tasks keep running.": (
        "worker 1: Der Befehl endete mit Exit-Code 1. 3 von 4 Tasks laufen weiter."
    ),
    "The node n1 refused to start it: it does not respond. It is pending again.": (
        "Der Knoten n1 hat den Start abgelehnt: Er antwortet nicht. Er wartet wieder."
    ),
    "Changed by ann: priority from 1 to 5, time limit from none to 2 h.": (
        "Geändert von ann: Priorität von 1 auf 5, Zeitlimit von keine auf 2 h."
    ),
    "guaranteed 2 GPUs to 4 GPUs; limit none to 3 GPUs. By Ann Maier.": (
        "garantiert von 2 GPUs auf 4 GPUs; Grenze von keine auf 3 GPUs. Durch Ann Maier."
    ),
    "Your request for 4 more GPUs was approved by Ann Maier": (
        "Ihr Antrag wurde von Ann Maier genehmigt: 4 weitere GPUs"
    ),
    "rank 3": "Rang 3",
    "CUDA out of memory on rank 1.": "CUDA: GPU-Speicher erschöpft auf Rang 1.",
    "Another rank failed. The command ended with exit code 1.": (
        "Ein anderer Rang ist fehlgeschlagen. Der Befehl endete mit Exit-Code 1."
    ),
    "The failure rule killed (It was killed) applies: it starts again without the node n1.": (
        "Die Fehlerregel killed (Er wurde zwangsweise beendet) greift: Er startet erneut ohne den Knoten n1."
    ),
    "Maintenance of n1 from 28 Nov 14:33 to 01 Dec 08:00": (
        "Wartung von n1 von 28. Nov 14:33 bis 1. Dez 08:00"
    ),
    "Its node is in maintenance until 29 Feb 08:00 UTC (new switch).": (
        "Sein Knoten ist bis 29. Feb 08:00 UTC in Wartung (new switch)."
    ),
}


@pytest.fixture
def german():
    with override("de"):
        yield


@pytest.mark.parametrize("text", GERMAN, ids=lambda text: text[:40])
def test_stored_texts_are_translated_with_the_texts_in_them(text: str, german) -> None:
    assert translate_stored(text) == GERMAN[text]


def test_english_readers_see_what_is_stored() -> None:
    assert [translate_stored(text) for text in GERMAN] == list(GERMAN)


def test_names_and_reasons_of_users_stay_as_they_are(german) -> None:
    assert translate_stored("another reserved node started") == "another reserved node ist gestartet"
    assert (
        translate_stored("Exempt for 2 h: All trials have ended.")
        == "Ausgenommen für 2 h: All trials have ended."
    )


@pytest.mark.parametrize("text", ["", "out of memory?", "Error response from daemon: no such image"])
def test_unknown_texts_stay_as_they_are(text: str, german) -> None:
    assert translate_stored(text) == text


def test_only_what_is_known_of_a_text_is_translated(german) -> None:
    known = "Der Knoten n1 hat den Start abgelehnt: no such image. Er wartet wieder."
    assert translate_stored("The node n1 refused to start it: no such image. It is pending again.") == known


def test_each_template_is_recognized(german) -> None:
    """No other template takes its texts away."""
    shown, expected = {}, {}
    for source, german_text in stored_translations("de"):
        values = {name: f"v{at}" for at, name in enumerate(re.findall(r"\{(\w+)\}", source), 1)}
        values |= {"count": "3", "label": "priority"}
        shown[source] = translate_stored(source.format_map(values))
        expected[source] = german_text.format_map(values | {"label": "Priorität"})
    assert len(shown) > 300 and shown == expected


def test_titles_of_shipped_failure_rules_are_recognized(german) -> None:
    """No template takes a title away, alone or in an event or a message."""
    shown, expected = [], []
    for code, rule in SHIPPED_RULES.items():
        title = gettext(rule.title)
        shown.append(
            [
                translate_stored(f"{rule.title}."),
                translate_stored(f"{rule.title} on rank 2."),
                translate_stored(f"{rule.title}. It used more than its share of a GPU."),
                translate_stored(f"The failure rule {code} ({rule.title}) applies: it starts again."),
            ]
        )
        after = translate_stored("It used more than its share of a GPU.")
        expected.append(
            [
                f"{title}.",
                f"{title} auf Rang 2.",
                f"{title}. {after}",
                f"Die Fehlerregel {code} ({title}) greift: Er startet erneut.",
            ]
        )
    assert shown == expected


@pytest.mark.parametrize(
    "text", ["a, " * 330, "Needs " * 160, "It is. " * 140, "1 of 2 on " * 100, "a: " * 330]
)
def test_no_text_takes_long(text: str, german) -> None:
    """Users choose names; the work must not explode with their number of words."""
    translation = StoredTranslation(StoredTemplates(stored_translations("de")))
    assert translation.translate(text[:1000]).text


def test_pages_translate_what_rows_keep(client_of, dataset) -> None:
    client, job = client_of("member"), dataset.jobs["depth-anything-ft"]
    verdict = "Needs 8 GPUs; 2 are free now, at most 2 on one node in the pool h200."
    change = {"kind": "fewer_gpus", "message": "It would start now with 2 GPUs instead of 8.", "fields": {}}
    JobVerdict.objects.filter(job=job).update(message=verdict, suggestion=change)
    JobEvent.objects.create(job=job, kind="edited", message="Held by m-okafor.")
    JobEvent.objects.create(job=job, kind="job_state", before="PENDING", after="RUNNING", message="On n1.")
    JobEvent.objects.create(job=job, kind="attempt_state", after="PREEMPTED", message="Held by m-okafor.")
    Notice.objects.create(
        recipient=job.owner,
        kind="job_failed",
        title="train failed",
        message="A GPU of n1 failed.",
        in_inbox=True,
    )
    waits = "Braucht 8 GPUs; 2 sind jetzt frei, höchstens 2 auf einem Knoten im Pool h200."
    shown = {
        f"/jobs/{job.public_id}/": [waits],
        f"/jobs/{job.public_id}/scheduling/": [
            waits,
            "Zurückgehalten von m-okafor.",
            "<small>Wartend → Läuft</small>",
            "<small>Verdrängt</small>",
        ],
        "/jobs/": [waits, "Er würde jetzt mit 2 GPUs statt 8 starten."],
        "/queue/": [waits, "Er würde jetzt mit 2 GPUs statt 8 starten."],
        "/inbox/": ["train ist fehlgeschlagen", "Eine GPU von n1 ist ausgefallen."],
    }
    for path, texts in shown.items():
        page = client.get(path, HTTP_ACCEPT_LANGUAGE="de").content.decode()
        assert [text for text in texts if text not in page] == [], path
        assert "are free now" not in page and "Held by" not in page
    assert verdict in client.get("/jobs/").content.decode()
    answer = client.get(f"/api/v1/jobs/{job.public_id}/", HTTP_ACCEPT_LANGUAGE="de")
    assert answer.json()["verdict"]["message"] == verdict


def test_options_of_settings_are_german_and_forms_post_their_codes(client_of) -> None:
    page = client_of("admin").get(reverse("policy"), HTTP_ACCEPT_LANGUAGE="de").content.decode()
    assert '<option value="suspend" >aussetzen</option>' in page
    assert "aus oder benachrichtigen oder aussetzen" in page


def test_triggers_of_cycles_are_german(client_of, dataset) -> None:
    Cycle.objects.create(
        started_at=timezone.now(),
        epoch=1,
        trigger="submit",
        snapshot_ms=4,
        decide_ms=12,
        commit_ms=3,
        pending=9,
        started_jobs=2,
        refused_commits=1,
        steps=321,
        truncated=True,
    )
    page = client_of("admin").get(reverse("scheduler"), HTTP_ACCEPT_LANGUAGE="de").content.decode()
    assert "eingereichter Job" in page


def test_templates_have_a_placeholder_for_each_value_and_a_text_for_each_alternative() -> None:
    source = 'f"{job.name} needs {format_gpus(milli)}" + (f" of {len(rows)}" if rows else " now") + "."'
    marked = ast.parse(source, mode="eval").body
    assert stored_templates(marked) == ["{job_name} needs {gpus} of {rows}.", "{job_name} needs {gpus} now."]


def test_values_that_touch_are_refused() -> None:
    expression = ast.parse('f"{one}{other} is full"', mode="eval").body
    with pytest.raises(ValueError, match="values touch"):
        stored_templates(expression)
