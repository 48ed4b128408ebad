"""Pages with 100,000 jobs: home, jobs, one job, cluster and quotas, as an administrator and as a member.

    DATABASE_URL=... REDIS_URL=... python -m bench html_pages [--jobs N] [--rounds N] [--only PART] [--lists]

Complete pages as a browser requests them, through the whole Django stack; ``--lists`` adds the lists of the
API on the same database.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.rest_lists import HOST, RequestCase, rest_requests, run_requests


def main(arguments: list[str]) -> int:
    """Print a line for each page and kind of user."""
    both = "--lists" in arguments
    rest = [word for word in arguments if word != "--lists"]
    run_requests("pages", rest, page_requests, *([rest_requests] if both else []))
    return 0


def page_requests(users: dict[str, Any]) -> list[RequestCase]:
    """Return the requests of the pages, with a session."""
    from django.test import Client

    from portal.models import Job

    looks: list[RequestCase] = []
    for name, user in users.items():
        client = Client(SERVER_NAME=HOST)
        client.force_login(user)
        job = Job.objects.filter(project__memberships__user=user, state="RUNNING").first()
        assert job is not None
        pages = {
            "/": "/",
            "/jobs/": "/jobs/",
            "/jobs/?state=waiting": "/jobs/?state=waiting",
            "/jobs/?q=run-777": "/jobs/?q=run-777",
            "/jobs/?sort=gpus": "/jobs/?sort=gpus",
            "/jobs/?group=0": "/jobs/?group=0",
            "/jobs/JOB/": f"/jobs/{job.public_id}/",
            "/cluster/": "/cluster/",
            "/quotas/": "/quotas/",
            "/projects/": "/projects/",
        }
        looks += [(name, row, partial(client.get, path)) for row, path in pages.items()]
    return looks
