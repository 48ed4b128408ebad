"""The portal in German: pages, what scripts write into them, and the language that a user chooses."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_a_german_browser_gets_german_pages_and_scripts(open_as):
    page = open_as("m-okafor", language="de-DE")
    page.goto("/jobs/")
    assert page.evaluate("document.documentElement.lang") == "de"
    expect(page.get_by_role("link", name="Warteschlange").first).to_be_visible()
    expect(page.locator("[data-theme-switch]").first).to_have_attribute("title", "Farben: System")
    page.keyboard.press("Control+k")
    page.keyboard.type("nichts dieses Namens")
    expect(page.locator("#palette [role=status]")).to_have_text("Keine Ergebnisse, die Sie sehen dürfen.")


def test_the_language_of_the_account_is_used_instead_of_that_of_the_browser(open_as):
    page = open_as("m-okafor", language="de-DE")
    page.goto("/account/")
    page.get_by_label("Sprache").select_option("en")
    page.get_by_role("button", name="Speichern", exact=True).first.click()
    expect(page.get_by_role("heading", name="Your account")).to_be_visible()
    expect(page.locator("[data-theme-switch]").first).to_have_attribute("title", "Colours: system")


@pytest.mark.parametrize("address", ["/", "/launch/", "/jobs/", "/cluster/", "/quotas/", "/queue/"])
def test_german_pages_fit_a_phone(open_as, address):
    page = open_as("m-okafor", width=390, language="de-DE")
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
