"""Environments: the allow-list of images, with where each already is."""

from __future__ import annotations

import shlex

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from portal.access import Policy, Verb, can, policy, signed_in, visible_environments
from portal.errors import Invalid, NotThere
from portal.models import Environment, EnvironmentOnNode, Node
from portal.services.catalogue import EnvironmentWords, do_save_environment, nodes_for
from portal.web.words import whole_number
from portal.words.driver import driver_will_do
from portal.words.states import RuntimeKind

TEXTS = (
    "name",
    "title",
    "description",
    "runtime",
    "image",
    "archive",
    "prefix",
    "min_driver",
    "tool",
    "tool_command",
    "tool_port",
)


@policy(Policy.SIGNED_IN)
@require_GET
def environment_list(request: HttpRequest) -> HttpResponse:
    """What can be launched, and on how many nodes each image already is."""
    user = signed_in(request.user)
    rows = visible_environments(user).order_by("name")
    present: dict[int, int] = {}
    for row in EnvironmentOnNode.objects.filter(state="present").values_list("environment_id", flat=True):
        present[row] = present.get(row, 0) + 1
    shown = [
        {"environment": row, "present": present.get(row.pk, 0), "nodes": len(nodes_for(row))} for row in rows
    ]
    return render(request, "admin/environments.html", {"rows": shown, "may_add": user.is_admin})


@policy(Policy.SIGNED_IN)
@require_GET
def environment_page(request: HttpRequest, public_id: str) -> HttpResponse:
    """One environment; admins change it here. "new" is an empty form."""
    if public_id == "new":
        return _form(request, None, {"runtime": RuntimeKind.PODMAN.value, "enabled": "on"})
    row = _environment(request, public_id)
    values = {key: getattr(row, key) or "" for key in TEXTS}
    values |= {"tool_command": shlex.join(row.tool_command), "enabled": "on" if row.enabled else ""}
    return _form(request, row, values)


@policy(Policy.ADMIN)
@require_POST
def save_environment(request: HttpRequest, public_id: str = "") -> HttpResponse:
    """Adds or changes an environment."""
    row = _environment(request, public_id) if public_id else None
    values = {key: request.POST.get(key, "").strip() for key in TEXTS} | {
        "enabled": request.POST.get("enabled", "")
    }
    try:
        saved = do_save_environment(signed_in(request.user), _words(values), row)
    except Invalid as refusal:
        return _form(request, row, values, problems=refusal.fields, status=400)
    messages.success(
        request, f"{saved.name} is saved. Nodes that lack its image fetch it before the first start."
    )
    return HttpResponseRedirect(reverse("environment", args=[saved.public_id]))


def _words(values: dict[str, str]) -> EnvironmentWords:
    try:
        command = tuple(shlex.split(values["tool_command"]))
    except ValueError:
        raise Invalid(fields={"tool_command": "A quotation mark is not closed."}) from None
    port = whole_number(values["tool_port"])
    if values["tool_port"] and port is None:
        raise Invalid(fields={"tool_port": "Must be between 1 and 65535."})
    if values["runtime"] not in {kind.value for kind in RuntimeKind}:
        raise Invalid(fields={"runtime": "Choose one."})
    return EnvironmentWords(
        name=values["name"],
        title=values["title"],
        description=values["description"],
        runtime=RuntimeKind(values["runtime"]),
        image=values["image"],
        archive=values["archive"],
        prefix=values["prefix"],
        min_driver=values["min_driver"],
        tool=values["tool"],
        tool_command=command,
        tool_port=port,
        enabled=bool(values["enabled"]),
    )


def _environment(request: HttpRequest, public_id: str) -> Environment:
    row = visible_environments(request.user).filter(public_id=public_id).first()
    if row is None:
        raise NotThere
    return row


def _too_old(node: Node, environment: Environment) -> str:
    """Why jobs with GPUs cannot run on a node; blank when its driver will do, or it has no GPUs."""
    driver = node.hello.get("driver")
    if not node.hello.get("gpus") or driver_will_do(driver, environment.min_driver):
        return ""
    return f"Its driver is {driver}." if driver else "It tells no driver."


def _form(
    request: HttpRequest,
    row: Environment | None,
    values: dict[str, str],
    *,
    problems: dict[str, str] | None = None,
    status: int = 200,
) -> HttpResponse:
    user = signed_in(request.user)
    if row is None and not user.is_admin:
        raise NotThere
    states = (
        {state.node_id: state for state in EnvironmentOnNode.objects.filter(environment=row)} if row else {}
    )
    nodes = [(node, states.get(node.pk), _too_old(node, row)) for node in nodes_for(row)] if row else []
    context = {
        "environment": row,
        "values": values,
        "problems": problems or {},
        "nodes": nodes,
        "may_edit": row is None or can(user, Verb.CHANGE, row),
        "runtimes": list(RuntimeKind),
    }
    return render(request, "admin/environment.html", context, status=status)
