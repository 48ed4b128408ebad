"""After a restore: running containers that the restored database does not contain, and decisions on them."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.errors import FairwayError
from portal.models import Node, OrphanContainer, User
from portal.selectors.cluster.recovery import UnreconciledNode, orphan_views, recovery_status
from portal.services.cluster.recovery import do_adopt_orphan, do_stop_orphan
from portal.services.nodes.nodes import do_fence_node
from portal.web.nodes.node_operations import fenced_message
from portal.web.views import find_row, form_page, page, render_live


@page(AccessPolicy.ADMIN)
def recovery_page(request: HttpRequest, user: User) -> HttpResponse:
    """Show what is missing before jobs start again, by node."""
    context = {"recovery": recovery_status()}
    return render_live(request, "cluster/recovery.html", "cluster/recovery_live.html", context)


@form_page(AccessPolicy.ADMIN)
def decide(request: HttpRequest, user: User, public_id: str, act: str) -> HttpResponse:
    """Ask for confirmation, then adopt the container as a job, or stop it on its node."""
    row = find_row(OrphanContainer.objects.select_related("node"), public_id=public_id)
    refusal = None
    if request.method == "POST":
        try:
            message = _adopt(user, row) if act == "adopt" else _stop(user, row)
        except FairwayError as error:
            refusal = error
        else:
            messages.success(request, message)
            return redirect("recovery")
    ranks = OrphanContainer.objects.filter(job=row.job, attempt=row.attempt, removed_at__isnull=True)
    others = orphan_views(list(ranks.exclude(pk=row.pk).select_related("node").order_by("rank")))
    context = {"held": orphan_views([row])[0], "others": others, "act": act, "refusal": refusal}
    return render(
        request, "cluster/recovery_decision.html", context, status=refusal.status if refusal else 200
    )


def _adopt(user: User, row: OrphanContainer) -> str:
    job = do_adopt_orphan(user, row)
    return _("{name} is adopted as the job {job_name} of {username}.").format(
        name=row.name, job_name=job.name, username=job.owner.username
    )


def _stop(user: User, row: OrphanContainer) -> str:
    do_stop_orphan(user, row)
    return _("{name} is being stopped; it disappears from this page once {node} confirms it.").format(
        name=row.name, node=row.node.name
    )


@form_page(AccessPolicy.ADMIN)
def fence(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Ask how the administrator verified it, then fence an unreachable node."""
    node = find_row(Node.objects, public_id=public_id)
    reason, refusal = request.POST.get("reason", ""), None
    if request.method == "POST":
        try:
            ended = do_fence_node(user, node, reason=reason)
        except FairwayError as error:
            refusal = error
        else:
            messages.success(request, fenced_message(node, ended))
            return redirect("recovery")
    rows = OrphanContainer.objects.filter(node=node, removed_at__isnull=True).exclude(decision="adopt")
    context = {
        "left": UnreconciledNode(node, orphan_views(list(rows.select_related("node").order_by("id")))),
        "reason": reason,
        "refusal": refusal,
        "tasks": node.task_rows.filter(container_removed=False).count(),
    }
    return render(request, "cluster/recovery_fence.html", context, status=refusal.status if refusal else 200)
