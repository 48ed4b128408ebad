"""Every page with 100,000 jobs, 200 users and 1,000 nodes, as an administrator and as a member.

    DATABASE_URL=... REDIS_URL=... python -m bench html_pages [--jobs N] [--rounds N] [--only PART] [--lists]

Complete pages as a browser requests them, through the whole Django stack; ``--lists`` adds the lists of the
API on the same database.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from bench.portal_dataset import BenchDataset
from bench.rest_lists import HOST, RequestCase, rest_requests, run_requests

LISTS = (
    "/jobs/?state=waiting",
    "/jobs/?q=run-777",
    "/jobs/?sort=gpus",
    "/jobs/?group=0",
    "/jobs/?state=failed",
    "/audit/?q=run-777",
    "/inbox/?show=unread",
    "/usage/?days=90",
    "/launch/?kind=workspace",
)
"""Filters and orders of lists, beside every page of the access table."""


def main(arguments: list[str]) -> int:
    """Print a line for each page and kind of user."""
    both = "--lists" in arguments
    rest = [word for word in arguments if word != "--lists"]
    run_requests("pages", rest, page_requests, *([rest_requests] if both else []))
    return 0


def page_requests(scene: BenchDataset) -> list[RequestCase]:
    """Return the requests of the pages, with a session: every page of the access table whose rows exist here."""
    from django.test import Client

    from portal.models import Job, Sweep, Template
    from tests.access.pages import PAGES

    looks: list[RequestCase] = []
    for name, user in scene.users.items():
        client = Client(SERVER_NAME=HOST)
        client.force_login(user)
        mine = Job.objects.filter(project__memberships__user=user)
        rows = {
            "running": mine.filter(state="RUNNING", kind="training").first(),
            "running_workspace": mine.filter(state="RUNNING", kind="workspace", owner=user).first(),
            "workspace": mine.filter(kind="workspace").first(),
            "job": mine.filter(state="PENDING").first(),
            "ended": mine.filter(state="COMPLETED").first(),
            "node": scene.nodes[0],
            "project": scene.projects[7],
            "lab": scene.lab,
            "sweep": Sweep.objects.filter(project=scene.projects[7]).first(),
            "template": Template.objects.first(),
            "schedule": scene.schedule,
            "service": scene.service,
            "person": scene.persons[9],
        }
        names = {key: row.public_id for key, row in rows.items() if row is not None}
        for path in dict.fromkeys([*LISTS, *(row.path for row in PAGES if row.method == "get")]):
            try:
                address = path.format(**names)
            except KeyError:
                continue
            answer = client.get(address)
            if answer.status_code == HTTPStatus.OK and not answer.streaming:
                looks.append((name, path, partial(client.get, address)))
    return looks
