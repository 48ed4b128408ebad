"""Help in the portal: every page of the sidebar has its section, links lead somewhere, and searches find sections."""

from __future__ import annotations

import re

import pytest
from django.urls import reverse

from portal.web.display.navigation import NAVIGATION
from portal.web.documentation import PAGES, find_section, search_help

ITEMS = [item for items in NAVIGATION.values() for item in items]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.view)
def test_the_section_of_each_page_exists_and_starts_with_a_sentence(item):
    name, _, anchor = item.help.partition("#")
    section = find_section(name, anchor)
    assert section is not None, item.help
    assert len(section.summary) > 30 and section.summary.rstrip().endswith((".", ":", ")")), section.summary


def test_every_document_is_rendered_and_its_links_resolve(client_of):
    client = client_of("member")
    anchors, links = {}, []
    for name in PAGES:
        page = client.get(reverse("help-page", args=[name])).content.decode()
        anchors[name] = set(re.findall(r'<h[123] id="([^"]+)"', page))
        links += re.findall(r'href="/help/([a-z-]+)/(?:#([^"]+))?"', page)
    assert len(links) > 100
    assert [link for link in links if link[1] and link[1] not in anchors[link[0]]] == []


def test_search_finds_titles_first_and_then_text():
    assert [each.title for each in search_help("idle jobs")][:2] == [
        "Time limits, idle jobs, suspension",
        "Idle jobs",
    ]
    assert search_help("elastic jobs")[0].title == "Elastic jobs"
    assert search_help("no such words anywhere at all") == []


def test_the_palette_finds_actions_templates_and_help(client_of):
    def names(kind, text):
        return {
            row["name"]: row["url"]
            for row in client_of(kind).get(reverse("search"), {"q": text}).json()["found"]
        }

    assert names("admin", "add a node")["Add a node"] == reverse("add-node")
    assert "Add a node" not in names("member", "add a node")
    assert names("member", "elastic")["Elastic jobs"] == "/help/jobs/#elastic-jobs"


def test_the_dialog_gets_title_and_first_paragraph(client_of):
    answer = client_of("member").get(reverse("help-section", args=["time"]), {"section": "idle-jobs"}).json()
    assert answer["title"] == "Idle jobs" and answer["url"] == "/help/time/#idle-jobs"
    assert (
        client_of("member").get(reverse("help-section", args=["time"]), {"section": "x"}).status_code == 404
    )
    assert client_of("member").get(reverse("help-page", args=["nothing"])).status_code == 404
