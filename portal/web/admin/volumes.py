"""The page of volumes: the folders that jobs may name, whether their limits are held, and their edit."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, policy, signed_in, visible_nodes, visible_projects
from portal.errors import Invalid
from portal.models import NodePool, Volume
from portal.selectors.volumes import disks, held_on, named_rows, volume_for, volumes_for
from portal.services.rights_changes import ChoiceNeeded
from portal.services.volumes import VolumeWords, do_remove_volume, do_save_volume
from portal.web.acts import act_and_return
from portal.web.admin.job_choice import ask_choice, choice_in
from portal.words.volumes import Reach, VolumeKind

TEXTS = ("name", "kind", "reach", "path", "description", "quota_gib", "pool", "nodes", "projects")
KINDS = {
    VolumeKind.DATASET: "data set: a folder that no job changes",
    VolumeKind.PATH: "folder: one that is there",
    VolumeKind.NFS: "NFS share: must be mounted there",
    VolumeKind.PROJECT: "project: a folder for each project",
    VolumeKind.SCRATCH: "scratch: empty, gone with its task",
    VolumeKind.HOME: "homes: where they are, and how large",
}


@policy(Policy.SIGNED_IN)
@require_safe
def volumes_page(request: HttpRequest) -> HttpResponse:
    """All that the person may see; ``edit`` names the one that stands in the form."""
    row = volume_for(request.user, request.GET["edit"]) if request.GET.get("edit") else None
    return _render(request, row, _values(row) if row else {"reach": "node"})


@policy(Policy.ADMIN)
@require_POST
def save_volume(request: HttpRequest) -> HttpResponse:
    """Declares one, or changes the one that ``row`` names."""
    row = volume_for(request.user, request.POST["row"]) if request.POST.get("row") else None
    values = {key: request.POST.get(key, "").strip() for key in TEXTS}
    values["read_only"] = request.POST.get("read_only", "")
    if row is not None:
        values |= {"name": row.name, "kind": row.kind}
    try:
        words = _words(request, values)
        saved = do_save_volume(signed_in(request.user), words, row, choice=choice_in(request))
    except ChoiceNeeded as needed:
        return ask_choice(
            request, needed, change=f"Save the volume {values['name']}", back=reverse("volumes")
        )
    except Invalid as refusal:
        return _render(request, row, values, problems=refusal.fields, status=400)
    messages.success(request, f"The volume {saved.name} is saved. Jobs that start from now on see it so.")
    return HttpResponseRedirect(reverse("volumes"))


@policy(Policy.ADMIN)
@require_POST
def remove_volume(request: HttpRequest, name: str) -> HttpResponse:
    """Forgets one that no live job names; its files stay."""
    row = volume_for(request.user, name)

    def remove() -> str:
        do_remove_volume(signed_in(request.user), row)
        return f"The volume {row.name} is forgotten. Its files stay where they are."

    return act_and_return(request, remove, reverse("volumes"))


# -- inside ----------------------------------------------------------------------------------------


def _words(request: HttpRequest, values: dict[str, str]) -> VolumeWords:
    kinds, reaches = {kind.value for kind in VolumeKind}, {reach.value for reach in Reach}
    if values["kind"] not in kinds or values["reach"] not in reaches:
        raise Invalid(fields={"kind": "Choose one."})
    try:
        quota = round(float(values["quota_gib"]) * 1024) if values["quota_gib"] else None
    except (ValueError, OverflowError):
        raise Invalid(fields={"quota_mib": "Must be a number of GiB."}) from None
    pools = _rows("pool", NodePool.objects.all(), values["pool"])
    return VolumeWords(
        name=values["name"],
        kind=VolumeKind(values["kind"]),
        reach=Reach(values["reach"]),
        path=values["path"],
        description=values["description"],
        read_only=bool(values["read_only"]),
        quota_mib=quota,
        pool=pools[0] if pools else None,
        nodes=_rows("nodes", visible_nodes(request.user), values["nodes"]),
        projects=_rows("projects", visible_projects(request.user), values["projects"]),
    )


def _rows(field: str, rows: QuerySet[Any], text: str) -> list[Any]:
    found, unknown = named_rows(rows, text.replace(",", " ").split())
    if unknown is not None:
        raise Invalid(fields={field: f"There is no {field.removesuffix('s')} called {unknown}."})
    return found


def _values(row: Volume) -> dict[str, str]:
    return {
        "name": row.name,
        "kind": row.kind,
        "reach": row.reach,
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
    row: Volume | None,
    values: dict[str, str],
    *,
    problems: dict[str, str] | None = None,
    status: int = 200,
) -> HttpResponse:
    may_edit = signed_in(request.user).is_admin
    told = disks() if may_edit else []
    context = {
        "volumes": [(each, held_on(each, told) if may_edit else None) for each in volumes_for(request.user)],
        "disks": told,
        "editing": row,
        "values": values,
        "problems": problems or {},
        "kinds": [(kind.value, words) for kind, words in KINDS.items()],
        "pools": NodePool.objects.order_by("name"),
        "may_edit": may_edit,
    }
    return render(request, "admin/volumes.html", context, status=status)
