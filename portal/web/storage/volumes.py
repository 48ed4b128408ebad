"""The volumes page: volumes, whether their limits are enforced, and their edit form."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.access import AccessPolicy, visible_nodes, visible_projects
from portal.domain.storage.volumes import VolumeKind, VolumeScope
from portal.errors import InvalidRequest
from portal.models import NodePool, User, Volume
from portal.selectors.lookup import get_rows_by_key
from portal.selectors.storage.volumes import (
    NODE_HOMES,
    get_volume,
    list_usage,
    list_volumes,
    node_disks,
    quota_enforcement_message,
    storage_problems,
)
from portal.services.lifecycle.rights_changes import ChoiceRequired
from portal.services.storage.volumes import VolumeInput, do_delete_volume, do_save_volume
from portal.web.jobs.affected_jobs import parse_choice, render_choice
from portal.web.views import action, page, posted_values, refusals_as_messages, render_form

TEXT_FIELDS = ("name", "kind", "reach", "path", "description", "quota_gib", "pool", "nodes", "projects")
FOLDERS_PER_PAGE = 25
KIND_LABELS = {
    VolumeKind.HOST_PATH: gettext_lazy("folder: an existing folder"),
    VolumeKind.NFS: gettext_lazy("NFS share: must be mounted on the nodes"),
    VolumeKind.PROJECT: gettext_lazy("project: a folder for each project"),
    VolumeKind.SCRATCH: gettext_lazy("scratch: empty, deleted when its task ends"),
    VolumeKind.HOME: gettext_lazy("homes: their location and size limit"),
}


@page(AccessPolicy.SIGNED_IN)
def volumes_page(request: HttpRequest, user: User) -> HttpResponse:
    """List visible volumes; ``edit`` names the one shown in the form."""
    row = get_volume(user, request.GET["edit"]) if request.GET.get("edit") else None
    return _render(request, user, row, _values(row) if row else {"reach": "node"})


@action(AccessPolicy.ADMIN)
def save_volume(request: HttpRequest, user: User) -> HttpResponse:
    """Create a volume, or change the one that ``row`` names."""
    row = get_volume(user, request.POST["row"]) if request.POST.get("row") else None
    values = posted_values(request, *TEXT_FIELDS, "read_only")
    if row is not None:
        values |= {"name": row.name, "kind": row.kind}
    try:
        saved = do_save_volume(user, _build_input(user, values), row, choice=parse_choice(request))
    except ChoiceRequired as error:
        change = _("Save the volume {name}").format(name=values["name"])
        return render_choice(request, error, change=change, back=reverse("volumes"))
    except InvalidRequest as error:
        return _render(request, user, row, values, error)
    messages.success(
        request,
        _("The volume {name} is saved. Applies to jobs that start from now on.").format(name=saved.name),
    )
    return redirect("volumes")


@action(AccessPolicy.ADMIN)
def remove_volume(request: HttpRequest, user: User, name: str) -> HttpResponse:
    """Remove a volume that no live job refers to; its files stay."""
    row = get_volume(user, name)
    with refusals_as_messages(request):
        do_delete_volume(user, row)
        messages.success(
            request, _("The volume {name} is deleted. Its files are kept.").format(name=row.name)
        )
    return redirect("volumes")


# -- internal --------------------------------------------------------------------------------------


def _build_input(user: User, values: dict[str, str]) -> VolumeInput:
    if values["kind"] not in set(VolumeKind) or values["reach"] not in set(VolumeScope):
        raise InvalidRequest(fields={"kind": _("Choose one.")})
    try:
        quota = round(float(values["quota_gib"]) * 1024) if values["quota_gib"] else None
    except (ValueError, OverflowError):
        raise InvalidRequest(fields={"quota_mib": _("Must be a number of GiB.")}) from None
    pools = _rows("pool", NodePool.objects.all(), values["pool"])
    return VolumeInput(
        name=values["name"],
        kind=VolumeKind(values["kind"]),
        scope=VolumeScope(values["reach"]),
        path=values["path"],
        description=values["description"],
        read_only=bool(values["read_only"]),
        quota_mib=quota,
        pool=pools[0] if pools else None,
        nodes=_rows("nodes", visible_nodes(user), values["nodes"]),
        projects=_rows("projects", visible_projects(user), values["projects"]),
    )


def _rows(field: str, rows: QuerySet[Any], text: str) -> list[Any]:
    found, unknown = get_rows_by_key(rows, text.replace(",", " ").split())
    if unknown is not None:
        texts = {
            "pool": _("There is no pool called {name}."),
            "nodes": _("There is no node called {name}."),
            "projects": _("There is no project called {name}."),
        }
        raise InvalidRequest(fields={field: texts[field].format(name=unknown)})
    return found


def _values(row: Volume) -> dict[str, str]:
    return {
        "name": row.name,
        "kind": row.kind,
        "reach": row.scope,
        "path": row.path,
        "description": row.description,
        "quota_gib": "" if row.quota_mib is None else f"{row.quota_mib / 1024:g}",
        "pool": row.pool.name if row.pool else "",
        "nodes": ", ".join(node.name for node in row.nodes.all()),
        "projects": ", ".join(project.name for project in row.projects.all()),
        "read_only": "on" if row.read_only else "",
    }


def _render(
    request: HttpRequest,
    user: User,
    row: Volume | None,
    values: dict[str, str],
    refusal: InvalidRequest | None = None,
) -> HttpResponse:
    may_edit = user.is_admin
    reported = node_disks() if may_edit else []
    context = {
        "volumes": [
            (each, quota_enforcement_message(each, reported) if may_edit else None)
            for each in list_volumes(user)
        ],
        "disks": reported,
        "editing": row,
        "kinds": [(kind.value, label) for kind, label in KIND_LABELS.items()],
        "pools": NodePool.objects.order_by("name"),
        "may_edit": may_edit,
        **(_usage(request, user) if may_edit else {}),
    }
    return render_form(request, "storage/volumes.html", context, values, refusal)


def _usage(request: HttpRequest, user: User) -> dict[str, Any]:
    volume, search = request.GET.get("volume", ""), request.GET.get("q", "").strip()
    measured = Volume.objects.filter(usage__isnull=False).order_by("name").distinct()
    return {
        "page": Paginator(list_usage(user, volume=volume, search=search), FOLDERS_PER_PAGE).get_page(
            request.GET.get("page")
        ),
        "search": search,
        "volume_filter": volume,
        "measured_volumes": [
            (NODE_HOMES, _("homes on the nodes")),
            *((row.name, row.name) for row in measured),
        ],
        "storage_problems": storage_problems(),
    }
