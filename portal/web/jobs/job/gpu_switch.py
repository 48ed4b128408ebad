"""The page that switches a workspace to other GPUs, with when it would start again."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, require_permission
from portal.errors import Conflict, InvalidRequest
from portal.models import NodePool, User
from portal.selectors.cluster.cluster_overview import free_capacity
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs.gpu_switch import build_switch_request, do_switch_gpus
from portal.web.display.formatting import parse_whole_number
from portal.web.jobs.job.overview import job_page_context
from portal.web.jobs.launch.preview import preview_launch
from portal.web.views import form_page, refusals_as_messages, render_live


@form_page(AccessPolicy.SIGNED_IN)
def switch_gpus(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show the choice with its start interval, which follows the form; a posted form switches."""
    job = get_job(user, public_id)
    require_permission(user, Permission.CONTROL, job)
    if job.kind != "workspace":
        raise Conflict(_("Only workspaces switch their GPUs."), code="not_a_workspace")
    given = request.POST if request.method == "POST" else request.GET
    gpus = parse_whole_number(given.get("gpus_per_task", ""))
    if gpus is None:
        gpus = 0 if job.gpus_per_task else 1
    model = given.get("gpu_model", "" if given else job.gpu_model)
    pools = NodePool.objects.order_by("name")
    pool = pools.filter(public_id=given.get("pool", "")).first() if given else job.pool
    if request.method == "POST":
        target = "job-switch"
        with refusals_as_messages(request):
            try:
                do_switch_gpus(user, job, gpus_per_task=gpus, gpu_model=model, pool=pool)
            except InvalidRequest as error:
                messages.error(request, " ".join(error.fields.values()) or error.message)
            else:
                text = _("{name} restarts with {gpus} GPU.") if gpus else _("{name} restarts with no GPU.")
                messages.success(request, text.format(name=job.name, gpus=gpus))
                target = "job"
        return redirect(target, public_id)
    strips = free_capacity(user)
    wanted = build_switch_request(job.owner, job, gpus, model, pool)
    context = {
        "job": job,
        "tab": "switch",
        "gpus": gpus,
        "model": model,
        "pool": pool,
        "pools": pools,
        "models": list(dict.fromkeys(strip.model for strip in strips)),
        "wanted": wanted,
        "check": preview_launch(job.owner, wanted, strips, query_engine=True),
    }
    whole = {} if request.headers.get("HX-Request") else job_page_context(user, job)
    return render_live(request, "jobs/job/switch.html", "jobs/job/switch_preview.html", whole | context)
