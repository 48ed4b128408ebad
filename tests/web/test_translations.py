"""Pages in German: whose language counts, what stays English, and whether the catalogues are whole."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import polib
import pytest
from django.conf import settings
from django.core.management import call_command
from django.urls import reverse
from django.utils import translation
from django.utils.dates import MONTHS
from django.utils.formats import localize

from portal.web.display.formatting import format_date

CATALOGUES = sorted(Path(settings.LOCALE_PATHS[0]).glob("*/LC_MESSAGES/*.po"))
PLACEHOLDERS = re.compile(r"%\(\w+\)s|\{\w*\}|</?[a-z]+|%%")
GERMAN = {"HTTP_ACCEPT_LANGUAGE": "de-AT,de;q=0.9,en;q=0.5"}
NOT_SHOWN = re.compile(
    r"\{#.*?#\}|\{% (comment|blocktranslate)\b.*?\{% end\1 %\}|<(script|style)\b.*?</\2>", re.S
)

NAMES = {
    "..fairway", "/dev/infiniband/uverbs*", "/volumes/NAME", "Fairway", "Fairway · Fairway", "Python",
    "block&#10;rack", "changes.diff", "environment.json", "fabric0", "fairway ssh --rank=", "https://…",
    "hub-token", "models:resnet", "rack=r7", "requirements.txt", "resnet50, batch 64",
    'curl -H "Authorization: Bearer $FAIRWAY_TOKEN" /',
}  # fmt: skip
"""Names, commands and examples, which are the same in each language."""


def test_catalogues_have_the_texts_of_the_pages() -> None:
    call_command("update_translations", check=True, verbosity=0)


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_each_text_is_translated_with_its_placeholders(path: Path) -> None:
    entries = polib.pofile(str(path))
    assert entries and not [entry.msgid for entry in entries if not entry.translated() or entry.fuzzy]
    for entry in entries:
        wanted = sorted(PLACEHOLDERS.findall(entry.msgid))
        for text in [entry.msgstr, *entry.msgstr_plural.values()]:
            found = sorted(PLACEHOLDERS.findall(text))
            plural = sorted(PLACEHOLDERS.findall(entry.msgid_plural))
            assert not text or found in (wanted, plural), (entry.msgid, text)
            assert text.startswith(" ") == entry.msgid.startswith(" ") or not text, entry.msgid


def test_templates_have_no_text_outside_of_a_translation() -> None:
    """Words between tags, and in attributes that are shown or read aloud, are marked."""
    loose = {}
    for path in sorted((settings.BASE_DIR / "templates").rglob("*.html")):
        if path.parent.name == "api":
            continue
        source = re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", NOT_SHOWN.sub("", path.read_text()))
        texts = re.findall(r">([^<>]+)<", source)
        texts += re.findall(r'\b(?:title|aria-label|placeholder|alt)="([^"]*)"', source)
        words = [each.strip() for each in texts if re.search(r"[a-z]{4,}", re.sub(r"&\w+;", "", each))]
        if set(words) - NAMES:
            loose[path.name] = set(words) - NAMES
    assert loose == {}


def test_the_browser_names_the_language_until_the_user_does(client_of, dataset) -> None:
    client = client_of("member")
    english = client.get(reverse("jobs"))
    assert '<html lang="en"' in english.content.decode() and "Accept-Language" in english["Vary"]
    german = client.get(reverse("jobs"), **GERMAN).content.decode()
    assert '<html lang="de"' in german and "Warteschlange" in german
    user = dataset.people["m-okafor"]
    fields = {"full_name": "M. Okafor", "email": "", "timezone": "UTC"}
    assert client.post(reverse("account-name"), fields | {"language": "en"}, **GERMAN).status_code == 302
    assert '<html lang="en"' in client.get(reverse("jobs"), **GERMAN).content.decode()
    assert client.post(reverse("account-name"), fields | {"language": "de"}).status_code == 302
    assert '<html lang="de"' in client.get(reverse("jobs")).content.decode()
    wrong = client.post(reverse("account-name"), fields | {"language": "xx"})
    user.refresh_from_db()
    assert wrong.status_code == 400 and user.language == "de"
    assert translation.get_language() == "en"


def test_dates_are_german() -> None:
    """Words such as "May" have another meaning in our pages than in the calendar."""
    with translation.override("de"):
        assert format_date(dt.datetime(2026, 5, 1, 8, tzinfo=dt.UTC), "D j M Y") == "Fr 1 Mai 2026"
        assert [str(MONTHS[month]) for month in (3, 5, 12)] == ["März", "Mai", "Dezember"]


def test_rest_answers_in_english(client_of) -> None:
    answer = client_of("member").get("/api/v1/jobs/no-such-job/", **GERMAN)
    assert answer.status_code == 404 and "Language" not in answer.headers.get("Vary", "")
    assert re.search(r"\b(no|not|found)\b", answer.json()["detail"])


def test_numbers_are_written_alike_in_both_languages(client_of) -> None:
    """A width of ``12,5%`` in a style, or a value in a form, would be wrong."""
    page = client_of("member").get(reverse("home"), **GERMAN).content.decode()
    assert not re.search(r'data-css="[^"]*\d,\d', page)
    with translation.override("de"):
        assert localize(1234.5) == "1234.5"


def test_scripts_get_their_texts(client_of) -> None:
    member = client_of("member")
    page = member.get(reverse("home"), **GERMAN).content.decode()
    assert "/translations.js?language=de" in page
    assert "/translations.js" not in member.get(reverse("home")).content.decode()
    script = member.get("/translations.js?language=de", **GERMAN)
    assert script.status_code == 200 and '"Undo": "R\\u00fcckg\\u00e4ngig"' in script.content.decode()
