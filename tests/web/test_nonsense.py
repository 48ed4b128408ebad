"""Invalid input in every form field and URL parameter is reported and never an error of the server."""

from __future__ import annotations

import itertools
from html.parser import HTMLParser

import pytest
from django.urls import reverse

from portal.models import Environment, Job, Node, Project

NONSENSE = (
    "x" * 5000,
    "9" * 5000,
    "²",
    "🚀 <script>alert(1)</script> שלום \u202eabc",
    "'; DROP TABLE portal_job; --",
    "-1",
    "1e999",
    "NaN",
)
FORM = "application/x-www-form-urlencoded"
PARAMETERS = {
    "jobs": ("state", "kind", "page", "q", "cursor", "project"),
    "audit": ("q", "page", "act"),
    "cluster": ("q",),
    "search": ("q",),
    "users": ("q",),
    "quotas": ("pool",),
    "topologies": ("edit",),
    "volumes": ("edit",),
    "calendar": ("edit", "pool"),
    "launch": (
        "like",
        "template",
        "kind",
        "tasks",
        "gpus_per_task",
        "cpu_milli",
        "memory_mib",
        "time_limit_s",
    ),
}
OF_A_JOB = {"job-log-lines": ("cursor", "rank", "attempt"), "job-logs": ("rank",), "job-series": ("span",)}


class Forms(HTMLParser):
    """Each form that is posted: its address and its fields with what stands in them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self._inside = False

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "form":
            self._inside = given.get("method", "").lower() == "post"
            if self._inside:
                self.found.append((given.get("action") or "", {}))
        elif self._inside and tag in ("input", "select", "textarea", "button") and given.get("name"):
            self.found[-1][1].setdefault(given["name"], given.get("value") or "")

    def handle_endtag(self, tag):
        if tag == "form":
            self._inside = False


def pages_with_forms() -> list[str]:
    job, node = Job.objects.order_by("id").first(), Node.objects.order_by("id").first()
    project, environment = Project.objects.order_by("id").first(), Environment.objects.order_by("id").first()
    return [
        *(reverse(name) for name in ("account", "launch", "quotas", "projects", "users", "add-node")),
        reverse("environments"),
        reverse("alerts"),
        reverse("topologies"),
        reverse("volumes"),
        reverse("calendar"),
        reverse("job", args=[job.public_id]),
        reverse("node", args=[node.public_id]),
        reverse("project", args=[project.public_id]),
        reverse("environment", args=[environment.public_id]),
    ]


def test_invalid_input_in_every_form_is_reported(dataset, client_of, pytestconfig):
    """All fields of a form at once, and each third field (with --long each) alone with one of the texts in turn."""
    step = 1 if pytestconfig.getoption("--long") else 3
    client, turn = client_of("admin"), itertools.cycle(NONSENSE)
    seen = set()
    for page in pages_with_forms():
        forms = Forms()
        forms.feed(client.get(page).content.decode())
        for action, fields in forms.found:
            where = action or page
            shape = (where.rstrip("/").rsplit("/", 1)[-1], tuple(sorted(fields)))
            if shape in seen or "sign-out" in where or "sessions" in where:
                continue
            seen.add(shape)
            names = [name for name in fields if name not in ("csrfmiddlewaretoken", "host_key", "confirmed")]
            tries = [dict.fromkeys(names, text) for text in NONSENSE[1::3]] + [
                {name: next(turn)} for name in names[::step]
            ]
            for typed in tries:
                if "host" in fields and "host" not in typed:
                    continue  # with a good address this asks a real machine
                answer = client.post(where, fields | typed)
                assert answer.status_code < 500, (where, typed)
                assert b"<script>alert(1)" not in answer.content
    assert len(seen) > 12


@pytest.mark.parametrize("number", range(len(NONSENSE)))
def test_invalid_parameters_in_every_url_are_reported(dataset, client_of, number, pytestconfig):
    """Each text in every third parameter, in turn; with --long in all."""
    step = 1 if pytestconfig.getoption("--long") else 3
    client, text = client_of("admin"), NONSENSE[number]
    job = Job.objects.order_by("id").first()
    asked = [(reverse(page), name) for page, names in PARAMETERS.items() for name in names]
    asked += [
        (reverse(page, args=[job.public_id]), name) for page, names in OF_A_JOB.items() for name in names
    ]
    for address, name in asked[number % step :: step]:
        answer = client.get(address, {name: text})
        assert answer.status_code < 500, (address, name)
        body = answer.getvalue() if answer.streaming else answer.content
        assert b"<script>alert(1)" not in body


def test_the_summary_names_the_invalid_field(client_of):
    page = (
        client_of("member").post(reverse("launch-check"), {"memory_gib": "-3", "tasks": "x"}).content.decode()
    )
    assert "Memory for each task, GiB: Must be at least 0.1." in page
    assert "Tasks: Must be a number." in page


def test_a_form_that_is_too_large_is_reported(client_of):
    answer = client_of("member").post(reverse("launch"), "name=" + "x" * 3_000_000, content_type=FORM)
    assert answer.status_code == 413
    assert "exceeds the size limit" in answer.content.decode()
