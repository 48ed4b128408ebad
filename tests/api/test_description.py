"""The description: no warnings, what it must say, and a page that runs under its own strict policy."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr

import pytest
from django.test import Client
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.validation import validate_schema

from portal.api.schema import DOCS_CSP, openapi_document
from tests import factories


def test_the_schema_is_generated_without_warnings():
    openapi_document.cache_clear()
    GENERATOR_STATS.reset()
    said = io.StringIO()
    with redirect_stderr(said):
        made = openapi_document()
    assert said.getvalue() == ""
    assert not GENERATOR_STATS
    assert made["openapi"].startswith("3.1")
    validate_schema(made)


def test_every_field_has_a_description():
    for path, operations in openapi_document()["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            assert operation["security"] == [{"token": []}, {"session": []}], (method, path)
            for status, answer in operation["responses"].items():
                if status[0] in "45":
                    assert list(answer["content"]) == ["application/problem+json"], (method, path, status)


def test_input_and_output_schemas_differ():
    names = set(openapi_document()["components"]["schemas"])
    assert {"JobBodyRequest", "Job"} <= names
    sent = openapi_document()["components"]["schemas"]["JobBodyRequest"]["properties"]
    assert not {"id", "state", "owner", "reason", "version"} & set(sent)


@pytest.mark.django_db
def test_the_docs_page_satisfies_its_content_policy():
    client = Client()
    assert client.get("/api/docs/").status_code == 302
    assert client.get("/api/schema/").status_code == 401
    client.force_login(factories.user("ada"))
    page = client.get("/api/docs/")
    assert page["Content-Security-Policy"] == DOCS_CSP
    assert "unsafe" not in DOCS_CSP
    text = page.content.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=", text)
    start = client.get("/api/docs/start.js")
    assert start["Content-Type"].startswith("text/javascript")
    assert b"/api/schema/" in start.content


@pytest.mark.long  # the test above makes the same document without a process of its own
def test_the_command_prints_no_warnings():
    """What a build runs: drf-spectacular's own command, failing on any warning."""
    made = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    assert "Warning" not in made.stderr


COMMAND = """
import os, django
os.environ["DJANGO_SETTINGS_MODULE"] = "portal.config.settings"
django.setup()
from django.core.management import call_command
call_command("spectacular", "--fail-on-warn", "--validate", "--file", os.devnull)
"""
