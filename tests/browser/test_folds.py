"""What folds away says so: one mark on every page, which turns, is reached by keyboard and can keep still."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, expect

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

MARK = """(summary) => {
  const mark = getComputedStyle(summary, "::before");
  return { size: mark.width, edge: mark.borderRightStyle, turned: mark.transform, takes: mark.transitionDuration };
}"""


def mark_of(fold: Locator) -> dict[str, str]:
    """How the mark of a fold is drawn now."""
    found: dict[str, str] = fold.evaluate(MARK)
    return found


@pytest.mark.parametrize("address", ["/launch/?kind=training&defaults=1", "/queue/", "/users/"])
def test_each_details_element_has_a_rotating_marker(open_as, address):
    page = open_as("r-castellan")
    page.emulate_media(reduced_motion="reduce")
    page.goto(address)
    folds = [
        fold for fold in page.locator("details:not(.fw-step__fold) > summary").all() if fold.is_visible()
    ]
    assert folds
    for fold in folds:
        closed = mark_of(fold)
        assert (closed["size"], closed["edge"], closed["takes"]) == ("6px", "solid", "0s")
        box = fold.bounding_box()
        assert box is not None and box["height"] >= 24
        fold.click()
        assert mark_of(fold)["turned"] != closed["turned"]
        fold.click()


def test_a_details_element_has_visible_focus_and_opens_by_keyboard(open_as):
    page = open_as("m-okafor")
    page.goto("/launch/?kind=training&defaults=1")
    fold, field = page.locator("summary", has_text="Variables, shared memory"), page.locator("[name=env]")
    fold.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    expect(fold).to_be_focused()
    assert fold.evaluate("(summary) => getComputedStyle(summary).outlineStyle") == "solid"
    assert mark_of(fold)["takes"] == "0.12s"
    expect(field).to_be_hidden()
    page.keyboard.press("Enter")
    expect(field).to_be_visible()
