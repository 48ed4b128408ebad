"""After a restore: running containers that the restored database does not contain, and decisions on them."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from portal.access import AccessPolicy, access_policy, require_user
from portal.errors import FairwayError, NotFound
from portal.models import Node, OrphanContainer, User
from portal.selectors.nodes.recovery import UnreconciledNode, orphan_views, recovery_status
from portal.services.cluster.recovery import do_adopt_orphan, do_stop_orphan
from portal.services.nodes.nodes import do_fence_node


@access_policy(AccessPolicy.ADMIN)
@require_safe
def recovery_page(request: HttpRequest) -> HttpResponse:
    """Show what is missing before jobs start again, by node; or the live part for htmx."""
    template = "admin/recovery_live.html" if request.headers.get("HX-Request") else "admin/recovery.html"
    return render(request, template, {"recovery": recovery_status()})


@access_policy(AccessPolicy.ADMIN)
@require_http_methods(["GET", "POST"])
def adopt(request: HttpRequest, public_id: str) -> HttpResponse:
    """Ask for confirmation, then adopt the container as a job."""
    return _confirm_and_run(request, public_id, "adopt", _adopt_message)


@access_policy(AccessPolicy.ADMIN)
@require_http_methods(["GET", "POST"])
def stop(request: HttpRequest, public_id: str) -> HttpResponse:
    """Ask for confirmation, then stop the container on its node."""
    return _confirm_and_run(request, public_id, "stop", _stop_message)


@access_policy(AccessPolicy.ADMIN)
@require_http_methods(["GET", "POST"])
def fence(request: HttpRequest, public_id: str) -> HttpResponse:
    """Ask how the administrator verified it, then fence an unreachable node."""
    node = Node.objects.filter(public_id=public_id).first()
    if node is None:
        raise NotFound
    reason, refusal = request.POST.get("reason", ""), None
    if request.method == "POST":
        try:
            ended = do_fence_node(require_user(request.user), node, reason=reason)
        except FairwayError as refused:
            refusal = refused
        else:
            messages.success(request, f"{node.name} is fenced; {ended} tasks ended and their GPUs are free.")
            return redirect("recovery")
    rows = OrphanContainer.objects.filter(node=node, removed_at__isnull=True).exclude(decision="adopt")
    context = {
        "left": UnreconciledNode(node, orphan_views(list(rows.select_related("node").order_by("id")))),
        "reason": reason,
        "refusal": refusal,
        "tasks": node.task_rows.filter(container_removed=False).count(),
    }
    return render(request, "admin/recovery_fence.html", context, status=refusal.status if refusal else 200)


# -- internal --------------------------------------------------------------------------------------


def _adopt_message(user: User, row: OrphanContainer) -> str:
    job = do_adopt_orphan(user, row)
    return f"{row.name} is adopted as the job {job.name} of {job.owner.username}."


def _stop_message(user: User, row: OrphanContainer) -> str:
    do_stop_orphan(user, row)
    return f"{row.name} is being stopped; it disappears from this page once {row.node.name} confirms it."


def _confirm_and_run(
    request: HttpRequest, public_id: str, act: str, do: Callable[[User, OrphanContainer], str]
) -> HttpResponse:
    """Render the confirmation, or run ``do`` and show its message or the refusal."""
    row = OrphanContainer.objects.select_related("node").filter(public_id=public_id).first()
    if row is None:
        raise NotFound
    if request.method == "GET":
        return _render_confirmation(request, row, act)
    try:
        messages.success(request, do(require_user(request.user), row))
    except FairwayError as refusal:
        return _render_confirmation(request, row, act, refusal)
    return redirect("recovery")


def _render_confirmation(
    request: HttpRequest, row: OrphanContainer, act: str, refusal: FairwayError | None = None
) -> HttpResponse:
    ranks = OrphanContainer.objects.filter(job=row.job, attempt=row.attempt, removed_at__isnull=True)
    others = orphan_views(list(ranks.exclude(pk=row.pk).select_related("node").order_by("rank")))
    context = {"held": orphan_views([row])[0], "others": others, "act": act, "refusal": refusal}
    return render(request, "admin/recovery_decision.html", context, status=refusal.status if refusal else 200)
