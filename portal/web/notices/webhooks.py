"""The webhooks of a project and of the cluster, with the log of their deliveries."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.debug import sensitive_post_parameters

from portal.access import AccessPolicy, visible_projects
from portal.domain.notices.notices import (
    CHANNEL_LABELS,
    CLUSTER_EVENTS,
    EVENTS,
    PROJECT_EVENTS,
    WEBHOOK_CHANNELS,
)
from portal.errors import InvalidRequest
from portal.models import Project, User
from portal.selectors.notices.notices import list_webhook_deliveries
from portal.services.notices.inbox import do_retry_delivery
from portal.services.notices.webhooks import (
    do_remove_webhook,
    do_save_webhook,
    do_test_webhook,
    require_webhook_right,
)
from portal.services.notices.write import set_up_webhooks
from portal.web.notices.inbox import WEBHOOK_HINTS, delivery_rows, parse_channel
from portal.web.views import find_row, form_page, refusals_as_messages


@form_page(AccessPolicy.ADMIN)
def cluster_webhooks(request: HttpRequest, user: User) -> HttpResponse:
    return _respond(request, user, None)


@form_page(AccessPolicy.SIGNED_IN)
def project_webhooks(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    return _respond(request, user, find_row(visible_projects(user), public_id=public_id))


@sensitive_post_parameters("url")
def _respond(request: HttpRequest, user: User, project: Project | None) -> HttpResponse:
    """Show the page, or save, remove or test a webhook, or try a delivery again."""
    require_webhook_right(user, project)
    if request.method != "POST":
        return _page(request, project)
    key = ""
    if delivery := request.POST.get("retry"):
        with refusals_as_messages(request):
            do_retry_delivery(user, delivery)
            messages.success(request, _("It is tried again now."))
        return redirect(request.path)
    channel = parse_channel(request.POST.get("channel", ""))
    label, url, events = (
        _(CHANNEL_LABELS[channel]),
        request.POST.get("url", ""),
        request.POST.getlist("events"),
    )
    try:
        if "remove" in request.POST:
            do_remove_webhook(user, project, channel)
            messages.success(request, _("{label} is removed.").format(label=label))
        elif "test" in request.POST:
            do_test_webhook(user, project, channel)
            messages.success(request, _("The test is on its way. Deliveries shows its result."))
        else:
            key = do_save_webhook(user, project, channel, url.strip(), events)[1]
            messages.success(
                request, _("{label} is saved. It applies to events from now on.").format(label=label)
            )
    except InvalidRequest as error:
        return _page(request, project, 400, problem=(channel, error.message), url=url, chosen=events)
    return _page(request, project, key=key) if key else redirect(request.path)


def _page(request: HttpRequest, project: Project | None, status: int = 200, **given: Any) -> HttpResponse:
    hooks = {hook.channel: hook for hook in set_up_webhooks(project)}
    refused = given.get("problem", ("", ""))[0]
    rows = []
    for channel in WEBHOOK_CHANNELS:
        hook = hooks.get(channel.value)
        chosen = given["chosen"] if channel == refused else hook.events if hook else []
        events = [
            (kind.value, _(EVENTS[kind].label), kind.value in chosen)
            for kind in (PROJECT_EVENTS if project else CLUSTER_EVENTS)
        ]
        rows.append((channel.value, _(CHANNEL_LABELS[channel]), WEBHOOK_HINTS[channel], hook, events))
    context = {
        "project": project,
        "rows": rows,
        "deliveries": delivery_rows(list_webhook_deliveries(set_up_webhooks(project))),
        "shared": True,
    }
    return render(request, "notices/webhooks.html", context | given, status=status)
