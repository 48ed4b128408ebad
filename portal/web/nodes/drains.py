"""Drain of a node: what it stops, what each job would lose, and what happens to them."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from portal.access import AccessPolicy
from portal.domain.nodes.drains import SAVE_WAIT_S, DrainChoice
from portal.errors import FairwayError, InvalidRequest
from portal.models import Node, User
from portal.selectors.nodes.drains import drained_jobs
from portal.services.nodes.drains import NodeAsSeen, do_drain_node
from portal.web.views import find_row, form_page, posted_values, render_form

DRAIN_TITLES: dict[DrainChoice, str] = {
    DrainChoice.WAIT: gettext_noop("Wait until it ends"),
    DrainChoice.MOVE: gettext_noop("Save, then move"),
    DrainChoice.END: gettext_noop("End now and requeue"),
}
_OWN = "job-"
"""Beginning of the fields that choose for a single job."""


@form_page(AccessPolicy.ADMIN)
def drain_node(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """List the jobs of a node with the work that each would lose, and drain it as chosen."""
    node = find_row(Node.objects.select_related("pool"), public_id=public_id)
    values = posted_values(request, "jobs", "reason") | {"signal": request.POST.get("signal", "")}
    own: dict[str, str] = {
        name.removeprefix(_OWN): request.POST[name]
        for name in request.POST
        if name.startswith(_OWN) and request.POST[name] != ""
    }
    refusal: FairwayError | None = None
    if request.method == "POST":
        try:
            exceptions = {job: _choice(value) for job, value in own.items()}
            do_drain_node(
                user,
                node,
                jobs=_choice(values["jobs"]),
                exceptions=exceptions,
                signal=bool(values["signal"]),
                reason=values["reason"],
                seen=_seen(request.POST.get("seen", "")),
            )
        except FairwayError as error:
            refusal = error
        else:
            messages.success(request, _drained_message(node))
            return redirect("node", public_id)
    node.refresh_from_db(fields=["state"])
    jobs = drained_jobs(node)
    context = {
        "node": node,
        "seen": " ".join([node.state, *(row.job.public_id for row in jobs)]),
        "rows": [(row, own.get(row.job.public_id, "")) for row in jobs],
        "choices": [(choice.value, _(title)) for choice, title in DRAIN_TITLES.items()],
        "lost_gpu_seconds": sum(row.lost_gpu_seconds for row in jobs),
        "save_wait_s": SAVE_WAIT_S,
    }
    values["jobs"] = values["jobs"] or DrainChoice.WAIT.value
    return render_form(request, "nodes/node_drain.html", context, values, refusal)


def _seen(text: str) -> NodeAsSeen | None:
    state, *jobs = text.split() or [""]
    return NodeAsSeen(state, frozenset(jobs)) if state else None


def _choice(text: str) -> DrainChoice:
    if text not in set(DrainChoice):
        raise InvalidRequest(fields={"jobs": _("Choose one of the options.")})
    return DrainChoice(text)


def _drained_message(node: Node) -> str:
    left = sum(not row.is_stopping for row in drained_jobs(node))
    if not left:
        return _("{name} is drained: it accepts no new jobs.").format(name=node.name)
    return ngettext(
        "{name} accepts no new jobs; {count} job still runs there.",
        "{name} accepts no new jobs; {count} jobs still run there.",
        left,
    ).format(name=node.name, count=left)
