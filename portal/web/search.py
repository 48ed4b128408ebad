"""Search of the command palette: actions, visible jobs, projects, users, nodes and templates, and help."""

from __future__ import annotations

from django.db.models import Q
from django.http import HttpRequest, JsonResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import (
    AccessPolicy,
    visible_nodes,
    visible_projects,
    visible_users,
)
from portal.models import User
from portal.selectors.jobs.job_templates import list_templates
from portal.selectors.jobs.jobs import JobFilter, list_jobs
from portal.web.documentation import search_help
from portal.web.views import page

RESULTS_PER_KIND = 6
ACTIONS = (
    (gettext_noop("Add a node"), "add-node", True),
    (gettext_noop("Invite a user"), "users", True),
    (gettext_noop("New template"), "new-template", False),
    (gettext_noop("New pipeline plan"), "plans", False),
    (gettext_noop("Import an experiment of Determined"), "import-sweep", False),
    (gettext_noop("Change your name, e-mail or time zone"), "account", False),
    (gettext_noop("Create an API token"), "account", False),
)
"""Name, view, and whether only administrators see it."""


@page(AccessPolicy.SIGNED_IN)
def search(request: HttpRequest, user: User) -> JsonResponse:
    text = request.GET.get("q", "").strip()[:100]
    if len(text) < 2:
        return JsonResponse({"found": []})
    found = [
        {"name": _(name), "note": _("action"), "url": reverse(view)}
        for name, view, admin_only in ACTIONS
        if text.lower() in _(name).lower() and (user.is_admin or not admin_only)
    ]
    found += [
        {
            "name": job.name,
            "note": _("job {id}, {state}").format(id=job.public_id, state=_(job.state.lower())),
            "url": reverse("job", args=[job.public_id]),
        }
        for job in list_jobs(user, JobFilter(search=text)).order_by("-id")[:RESULTS_PER_KIND]
    ]
    projects = (
        visible_projects(user).filter(Q(name__icontains=text) | Q(title__icontains=text)).order_by("name")
    )
    found += [
        {"name": row.name, "note": _("jobs of the project"), "url": f"{reverse('jobs')}?project={row.name}"}
        for row in projects[:RESULTS_PER_KIND]
    ]
    users = visible_users(user).filter(Q(username__icontains=text) | Q(full_name__icontains=text))
    found += [
        {
            "name": row.display_name,
            "note": _("jobs of this user"),
            "url": f"{reverse('jobs')}?owner={row.username}",
        }
        for row in users.order_by("username")[:RESULTS_PER_KIND]
    ]
    nodes = visible_nodes(user).filter(name__icontains=text).order_by("name")
    found += [
        {"name": row.name, "note": _("node"), "url": reverse("node", args=[row.public_id])}
        for row in nodes[:RESULTS_PER_KIND]
    ]
    templates = (
        list_templates(user).filter(Q(name__icontains=text) | Q(title__icontains=text)).order_by("title")
    )
    found += [
        {
            "name": row.title,
            "note": _("launch this template"),
            "url": f"{reverse('launch')}?template={row.public_id}",
        }
        for row in templates[:RESULTS_PER_KIND]
    ]
    found += [
        {"name": each.title, "note": _("help, {document}").format(document=each.document), "url": each.url}
        for each in search_help(text)
    ]
    return JsonResponse({"found": found})
