"""After a restore: what each node runs that the record forgot, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from portal.access import Policy, policy, signed_in
from portal.errors import FairwayError, NotThere
from portal.models import Node, UnknownContainer, User
from portal.selectors.restored import NodeLeft, held_of, restored
from portal.services.nodes import do_fence_node
from portal.services.restored import do_keep_unknown, do_stop_unknown


@policy(Policy.ADMIN)
@require_safe
def restored_page(request: HttpRequest) -> HttpResponse:
    """What is missing before jobs start again, node by node; or its live part for htmx."""
    template = "admin/restored_live.html" if request.headers.get("HX-Request") else "admin/restored.html"
    return render(request, template, {"restored": restored()})


@policy(Policy.ADMIN)
@require_http_methods(["GET", "POST"])
def keep(request: HttpRequest, public_id: str) -> HttpResponse:
    """Asks once, then takes the container into the record as a job."""
    return _once_confirmed(request, public_id, "keep", _kept)


@policy(Policy.ADMIN)
@require_http_methods(["GET", "POST"])
def stop(request: HttpRequest, public_id: str) -> HttpResponse:
    """Asks once, then has the container stopped on its node."""
    return _once_confirmed(request, public_id, "stop", _stopped)


@policy(Policy.ADMIN)
@require_http_methods(["GET", "POST"])
def fence(request: HttpRequest, public_id: str) -> HttpResponse:
    """Asks how one knows, then declares an unreachable node fenced."""
    node = Node.objects.filter(public_id=public_id).first()
    if node is None:
        raise NotThere
    reason, refusal = request.POST.get("reason", ""), None
    if request.method == "POST":
        try:
            ended = do_fence_node(signed_in(request.user), node, reason=reason)
        except FairwayError as refused:
            refusal = refused
        else:
            messages.success(request, f"{node.name} is fenced; {ended} tasks ended and their GPUs are free.")
            return redirect("restored")
    rows = UnknownContainer.objects.filter(node=node, gone_at__isnull=True).exclude(wanted="keep")
    context = {
        "left": NodeLeft(node, held_of(list(rows.select_related("node").order_by("id")))),
        "reason": reason,
        "refusal": refusal,
        "tasks": node.task_rows.filter(gone=False).count(),
    }
    return render(request, "admin/restored_fence.html", context, status=refusal.status if refusal else 200)


# -- inside ----------------------------------------------------------------------------------------


def _kept(person: User, row: UnknownContainer) -> str:
    job = do_keep_unknown(person, row)
    return f"{row.name} is kept: it is the job {job.name} of {job.owner.username} now."


def _stopped(person: User, row: UnknownContainer) -> str:
    do_stop_unknown(person, row)
    return f"{row.name} is being stopped; it leaves this page once {row.node.name} says so."


def _once_confirmed(
    request: HttpRequest, public_id: str, act: str, do: Callable[[User, UnknownContainer], str]
) -> HttpResponse:
    """The question, or what came of the act: the sentence of ``do`` on the page, or the refusal."""
    row = UnknownContainer.objects.select_related("node").filter(public_id=public_id).first()
    if row is None:
        raise NotThere
    if request.method == "GET":
        return _confirm(request, row, act)
    try:
        messages.success(request, do(signed_in(request.user), row))
    except FairwayError as refusal:
        return _confirm(request, row, act, refusal)
    return redirect("restored")


def _confirm(
    request: HttpRequest, row: UnknownContainer, act: str, refusal: FairwayError | None = None
) -> HttpResponse:
    ranks = UnknownContainer.objects.filter(job=row.job, attempt=row.attempt, gone_at__isnull=True)
    others = held_of(list(ranks.exclude(pk=row.pk).select_related("node").order_by("rank")))
    context = {"held": held_of([row])[0], "others": others, "act": act, "refusal": refusal}
    return render(request, "admin/restored_act.html", context, status=refusal.status if refusal else 200)
