"""The page that shows the text with which a user asks for help with a job."""

from __future__ import annotations

from urllib.parse import quote

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from portal.access import AccessPolicy
from portal.models import User
from portal.selectors.jobs.failure_rules import identified_failure
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.support_text import support_text
from portal.web.display.rule_texts import translate_rule
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import page

MAX_MAIL_CHARACTERS = 1500
"""Mail programs cut longer addresses."""


@page(AccessPolicy.SIGNED_IN)
def help_page(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_job(user, public_id)
    text = support_text(user, found)
    subject = f"Help with job {found.name} ({found.public_id})"
    address = f"mailto:{quote(settings.SUPPORT_ADDRESS, safe='@')}?subject={quote(subject)}&body="
    context = job_page_context(user, found)
    failure = identified_failure(user, found, context["last"])
    context |= {
        "tab": "help",
        "rule": translate_rule(failure.rule) if failure else None,
        "text": text,
        "mail": address + quote(text[:MAX_MAIL_CHARACTERS]) if settings.SUPPORT_ADDRESS else "",
        "is_cut": len(text) > MAX_MAIL_CHARACTERS,
    }
    return render(request, "jobs/job/help.html", context)
