"""Actions on a job: its buttons, requests for more time, and idle workspaces."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.domain.requests.user_requests import RequestState
from portal.domain.states import JobState
from portal.errors import InvalidRequest
from portal.models import User, UserRequest
from portal.selectors.jobs.idle import get_exemption
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs.idle import do_exempt_from_idle, do_revoke_exemption, do_snooze
from portal.services.jobs.queue_order import MOVES, do_move_job
from portal.services.jobs.retries import do_retry_with_fix
from portal.services.jobs.signals import do_send_signal
from portal.services.jobs.submission import (
    do_cancel_job,
    do_hold_job,
    do_resubmit_job,
    do_resume_job,
    do_suspend_job,
)
from portal.services.jobs.time_limits import do_request_extension
from portal.services.workspaces import access
from portal.web.display.formatting import duration
from portal.web.parsing import parse_duration_s
from portal.web.views import action, refusals_as_messages


@action(AccessPolicy.SIGNED_IN)
def cancel(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = do_cancel_job(user, get_job(user, public_id))
    text = (
        _("{name} is stopped.")
        if job.state == JobState.CANCELLED
        else _("{name} is stopping; its GPUs are released once its node confirms it.")
    )
    messages.success(request, text.format(name=job.name))
    return redirect("home") if request.POST.get("from") == "home" else redirect("job", public_id)


@action(AccessPolicy.SIGNED_IN)
def suspend(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = do_suspend_job(user, get_job(user, public_id))
    text = (
        _("{name} is suspended.")
        if job.state == JobState.SUSPENDED
        else _("{name} is being suspended; its GPUs are released once its node confirms it.")
    )
    messages.success(request, text.format(name=job.name))
    return _back(request, public_id)


def _back(request: HttpRequest, public_id: str) -> HttpResponse:
    return redirect("home") if request.POST.get("back") == "home" else redirect("job", public_id)


@action(AccessPolicy.SIGNED_IN)
def hold(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    do_hold_job(user, get_job(user, public_id), request.POST.get("held") == "1")
    return redirect("job", public_id)


@action(AccessPolicy.SIGNED_IN)
def move(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Move a waiting job in the queue: up, down or front."""
    job, to = get_job(user, public_id), request.POST.get("to", "")
    if to not in MOVES:
        raise InvalidRequest(_("There is no such move."))
    with refusals_as_messages(request):
        job = do_move_job(user, job, to)
        if to == "front":
            messages.success(
                request,
                _("{name} is at the front of {project}, with priority {priority}.").format(
                    name=job.name, project=job.project.name, priority=job.priority
                ),
            )
    return redirect(f"{reverse('queue')}{request.POST.get('query', '')[:300]}#job-{public_id}")


@action(AccessPolicy.SIGNED_IN)
def resume(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = do_resume_job(user, get_job(user, public_id))
    messages.success(request, _("{name} is pending again.").format(name=job.name))
    return redirect("job", public_id)


@action(AccessPolicy.SIGNED_IN)
def resubmit(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Submit a new job with the same request."""
    fresh = do_resubmit_job(user, get_job(user, public_id))
    messages.success(request, _("{name} is submitted again.").format(name=fresh.name))
    return redirect("job", fresh.public_id)


@action(AccessPolicy.SIGNED_IN)
def retry(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Submit a failed job again with the action of its failure rule."""
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        job = do_retry_with_fix(user, job)
        messages.success(
            request, _("{name} is submitted again with the fix of its failure.").format(name=job.name)
        )
    return redirect("job", job.public_id)


@action(AccessPolicy.SIGNED_IN)
def open_workspace(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Return a page that posts a single-use ticket to the workspace's own origin."""
    job = get_job(user, public_id)
    address, ticket = access.do_open_workspace(user, job, request.session.session_key or "")
    context = {"job": job, "address": address, "ticket": ticket, "path": request.POST.get("path", "")}
    response = render(request, "jobs/job/open.html", context)
    response.headers["Referrer-Policy"] = access.HANDOVER_REFERRER_POLICY
    return response


@action(AccessPolicy.SIGNED_IN)
def send_signal(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job, name = get_job(user, public_id), request.POST.get("signal", "")
    with refusals_as_messages(request):
        do_send_signal(user, job, name)
        messages.success(
            request, _("{name} is being sent to {job_name}.").format(name=name, job_name=job.name)
        )
    return redirect("job", public_id)


@action(AccessPolicy.SIGNED_IN)
def request_extension(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        extra_s = int(parse_duration_s(request.POST.get("extra_s", ""), "extra_s"))
        extension = do_request_extension(user, job, extra_s, request.POST.get("reason", "").strip())
        messages.success(request, _extension_message(job.name, extra_s, extension))
    return _back(request, public_id)


def _extension_message(name: str, extra_s: int, extension: UserRequest) -> str:
    if extension.state == RequestState.APPROVED:
        return _("{name} is extended by {duration}: this delays no other job.").format(
            name=name, duration=duration(extra_s)
        )
    reason = (
        _("it would delay others")
        if extension.impact_known
        else _("the scheduler did not determine in time which jobs it delays")
    )
    return _(
        "An extension of {name} by {duration} is requested; it needs approval, because {reason}."
    ).format(name=name, duration=duration(extra_s), reason=reason)


@action(AccessPolicy.SIGNED_IN)
def snooze(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Restart the countdown of an idle workspace."""
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        do_snooze(user, job)
        messages.success(request, _("{name} is snoozed.").format(name=job.name))
    return _back(request, public_id)


@action(AccessPolicy.SIGNED_IN)
def exempt(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        do_exempt_from_idle(user, job, request.POST.get("reason", ""))
        text = _("{name} is exempt from idle suspension; the reason is visible to its project.").format(
            name=job.name
        )
        messages.success(request, text)
    return redirect("job", public_id)


@action(AccessPolicy.SIGNED_IN)
def revoke_exemption(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    exemption = get_exemption(user, public_id)
    with refusals_as_messages(request):
        do_revoke_exemption(user, exemption)
        messages.success(request, _("{name} is no longer exempt.").format(name=exemption.job.name))
    return redirect("approvals")
