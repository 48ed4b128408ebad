"""Environments: approved images, and the nodes that have each."""

from __future__ import annotations

import shlex
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from portal.access import (
    AccessPolicy,
    Permission,
    access_policy,
    can,
    nameable_projects,
    require_user,
    visible_environments,
    visible_nodes,
    visible_projects,
)
from portal.domain.driver_versions import is_cuda_sufficient, is_driver_sufficient
from portal.domain.states import CONTAINER_RUNTIMES, RuntimeKind
from portal.errors import InvalidRequest, NotFound
from portal.models import Environment, ImagePresence, Node
from portal.selectors.environments import launchable_environments, nodes_by_pin, tag_claims
from portal.selectors.lookup import get_rows_by_key
from portal.services.images.environments import EnvironmentInput, compatible_nodes, do_save_environment
from portal.services.images.pins import do_check_tag, do_update_image
from portal.services.images.prefetch import do_cancel_prefetch, do_prefetch_image
from portal.services.lifecycle.rights_changes import ChoiceRequired
from portal.web.actions import run_and_redirect
from portal.web.admin.affected_jobs import parse_choice, render_choice
from portal.web.display.formatting import parse_whole_number, plural

TEXT_FIELDS = (
    "name",
    "title",
    "description",
    "runtime",
    "image",
    "archive",
    "prefix",
    "min_driver",
    "min_cuda",
    "tool",
    "tool_command",
    "tool_port",
)


@access_policy(AccessPolicy.SIGNED_IN)
@require_GET
def environment_list(request: HttpRequest) -> HttpResponse:
    """List environments with the number of nodes that have each image."""
    user = require_user(request.user)
    offers = sorted(launchable_environments(user), key=lambda offer: offer.environment.name)
    return render(request, "admin/environments.html", {"offers": offers, "may_add": user.is_admin})


@access_policy(AccessPolicy.SIGNED_IN)
@require_GET
def environment_page(request: HttpRequest, public_id: str) -> HttpResponse:
    """Show one environment with its edit form for administrators ("new": an empty form), or its live part."""
    if public_id == "new":
        return _form(request, None, {"runtime": RuntimeKind.PODMAN.value, "enabled": "on"})
    row = _environment(request, public_id)
    if request.headers.get("HX-Request"):
        return render(request, "admin/environment_nodes.html", _node_images(request, row))
    values = {key: getattr(row, key) or "" for key in TEXT_FIELDS}
    values |= {"tool_command": shlex.join(row.tool_command), "enabled": "on" if row.enabled else ""}
    values["projects"] = ", ".join(project.name for project in row.projects.order_by("name"))
    return _form(request, row, values)


@access_policy(AccessPolicy.ADMIN)
@require_POST
def save_environment(request: HttpRequest, public_id: str = "") -> HttpResponse:
    """Create or change an environment."""
    row = _environment(request, public_id) if public_id else None
    values = {key: request.POST.get(key, "").strip() for key in (*TEXT_FIELDS, "projects")}
    values["enabled"] = request.POST.get("enabled", "")
    try:
        changes = _build_input(request, values)
        saved = do_save_environment(require_user(request.user), changes, row, choice=parse_choice(request))
    except ChoiceRequired as needed:
        back = reverse("environment", args=[public_id])
        return render_choice(request, needed, change=f"Save {values['name']}", back=back)
    except InvalidRequest as refusal:
        return _form(request, row, values, problems=refusal.fields, status=400)
    messages.success(
        request, f"{saved.name} is saved. Nodes without its image pull it before the first start."
    )
    return HttpResponseRedirect(reverse("environment", args=[saved.public_id]))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def prefetch_image(request: HttpRequest, public_id: str) -> HttpResponse:
    """Start to pull the image on the node that ``node`` names, else on all."""
    row = _environment(request, public_id)
    key = request.POST.get("node", "")
    node = visible_nodes(request.user).filter(public_id=key).first()
    if key and node is None:
        raise NotFound

    def act() -> str:
        nodes = do_prefetch_image(require_user(request.user), row, node)
        if not nodes:
            return f"{row.title} is already present."
        return f"{row.title} is being pulled on {plural(nodes, 'node')}."

    return run_and_redirect(request, act, reverse("environment", args=[public_id]))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def change_image(request: HttpRequest, public_id: str) -> HttpResponse:
    """Check the tag for another image, or use one that nodes report under the tag."""
    row = _environment(request, public_id)

    def act() -> str:
        user = require_user(request.user)
        if request.POST.get("act") == "update":
            pin = do_update_image(user, row, request.POST.get("image", "")).image_digest
            return f"New jobs run {pin}. Submitted jobs keep their image."
        name = do_check_tag(user, row).name
        return f"{name} pulls {row.image}. This page shows when the tag refers to another image."

    return run_and_redirect(request, act, reverse("environment", args=[public_id]))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def cancel_prefetch(request: HttpRequest, public_id: str) -> HttpResponse:
    """Cancel pulls that no node has started."""
    row = _environment(request, public_id)

    def act() -> str:
        nodes = do_cancel_prefetch(require_user(request.user), row)
        return f"Queued pulls on {plural(nodes, 'node')} are cancelled. Pulls in progress continue."

    return run_and_redirect(request, act, reverse("environment", args=[public_id]))


def _build_input(request: HttpRequest, values: dict[str, str]) -> EnvironmentInput:
    try:
        command = tuple(shlex.split(values["tool_command"]))
    except ValueError:
        raise InvalidRequest(fields={"tool_command": "A quotation mark is not closed."}) from None
    port = parse_whole_number(values["tool_port"])
    if values["tool_port"] and port is None:
        raise InvalidRequest(fields={"tool_port": "Must be between 1 and 65535."})
    if values["runtime"] not in {kind.value for kind in RuntimeKind}:
        raise InvalidRequest(fields={"runtime": "Choose one."})
    projects, unknown = get_rows_by_key(
        visible_projects(request.user), values["projects"].replace(",", " ").split()
    )
    if unknown is not None:
        raise InvalidRequest(fields={"projects": f"There is no project called {unknown}."})
    return EnvironmentInput(
        name=values["name"],
        title=values["title"],
        description=values["description"],
        runtime=RuntimeKind(values["runtime"]),
        image=values["image"],
        archive=values["archive"],
        prefix=values["prefix"],
        min_driver=values["min_driver"],
        min_cuda=values["min_cuda"],
        tool=values["tool"],
        tool_command=command,
        tool_port=port,
        enabled=bool(values["enabled"]),
        projects=projects,
    )


def _environment(request: HttpRequest, public_id: str) -> Environment:
    row = visible_environments(request.user).filter(public_id=public_id).first()
    if row is None:
        raise NotFound
    return row


def _driver_problem(node: Node, environment: Environment) -> str:
    """Return why jobs with GPUs cannot run on a node; blank when its driver suffices or it has no GPUs."""
    driver, cuda = node.agent_info.get("driver"), node.agent_info.get("max_cuda_version")
    if not node.agent_info.get("gpus"):
        return ""
    if not is_driver_sufficient(driver, environment.min_driver):
        return f"Its driver is {driver}." if driver else "It reports no driver."
    return "" if is_cuda_sufficient(cuda, environment.cuda) else f"Its driver supports CUDA {cuda}."


def _form(
    request: HttpRequest,
    row: Environment | None,
    values: dict[str, str],
    *,
    problems: dict[str, str] | None = None,
    status: int = 200,
) -> HttpResponse:
    user = require_user(request.user)
    if row is None and not user.is_admin:
        raise NotFound
    context = {
        "values": values,
        "problems": problems or {},
        "may_edit": True,
        "runtimes": list(RuntimeKind),
    }
    if row is not None:
        context |= _node_images(request, row)
        context["projects"] = nameable_projects(user).filter(environments=row).order_by("name")
    return render(request, "admin/environment.html", context, status=status)


def _node_images(request: HttpRequest, row: Environment) -> dict[str, Any]:
    """Return the state of the image on each node, and the available actions."""
    states = {state.node_id: state for state in ImagePresence.objects.filter(environment=row)}
    nodes = [(node, states.get(node.pk), _driver_problem(node, row)) for node in compatible_nodes(row)]
    found = [state for _, state, _ in nodes if state is not None]
    may_edit = can(require_user(request.user), Permission.CHANGE, row)
    lacking = len(nodes) - sum(state.state == "present" for state in found)
    return {
        "environment": row,
        "nodes": nodes,
        "claims": nodes_by_pin(tag_claims().filter(environment=row)),
        "lacking": lacking,
        "waiting": any(state.pull_requested_at and state.state != "loading" for state in found),
        "moves": any(state.pull_requested_at or state.state == "loading" for state in found),
        "may_edit": may_edit,
        "may_pull": may_edit and lacking and row.runtime in CONTAINER_RUNTIMES,
        "may_check_tag": may_edit
        and row.runtime in CONTAINER_RUNTIMES
        and row.image
        and "@" not in row.image,
    }
