"""Every page of a researcher passes axe's WCAG 2.2 AA rules, in light and, where colours differ most, in dark."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def test_pages_pass_axe(open_as, scene):
    page = open_as("m-okafor")
    names = ("vit-h-pretrain", "depth-anything-ft", "dino-abl-b128")
    jobs = [f"/jobs/{scene.jobs[name].public_id}/" for name in names]
    addresses = ["/", "/jobs/", "/launch/?kind=training", "/account/", *jobs]
    addresses += [f"{jobs[0]}logs/", f"{jobs[0]}metrics/", f"{jobs[0]}run/"]
    assert look_at(page, addresses) == ""


def test_dark_pages_pass_axe(open_as, scene):
    page = open_as("m-okafor", dark=True)
    job = f"/jobs/{scene.jobs['depth-anything-ft'].public_id}/"
    assert look_at(page, ["/", "/launch/?kind=training", job]) == ""


def test_the_door_passes_axe(open_as):
    assert look_at(open_as(), ["/sign-in/", "/sign-in/link/", "/invitation/"]) == ""


def look_at(page, addresses: list[str]) -> str:
    """What axe finds on these pages, one line a rule and place; empty when nothing."""
    found = []
    for address in addresses:
        page.goto(address)
        page.wait_for_load_state("networkidle")
        page.evaluate(AXE.read_text())
        answer = page.evaluate("(tags) => axe.run({ runOnly: { type: 'tag', values: tags } })", RULES)
        found += [
            f"{address}: {rule['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
            for rule in answer["violations"]
            for node in rule["nodes"][:3]
        ]
    return "\n".join(found)
