"""Environments: approved images, and the nodes that have each."""

from __future__ import annotations

import shlex
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _

from portal.access import (
    AccessPolicy,
    Permission,
    can,
    nameable_projects,
    visible_environments,
    visible_nodes,
    visible_projects,
)
from portal.domain.nodes.driver_versions import is_cuda_sufficient, is_driver_sufficient
from portal.domain.states import CONTAINER_RUNTIMES, RuntimeKind
from portal.errors import InvalidRequest, NotFound
from portal.models import Environment, ImagePresence, Node, User
from portal.selectors.environments.environments import launchable_environments, nodes_by_pin, tag_claims
from portal.selectors.lookup import get_rows_by_key
from portal.services.environments.environments import EnvironmentInput, compatible_nodes, do_save_environment
from portal.services.environments.pins import do_check_tag, do_update_image
from portal.services.environments.prefetch import do_cancel_prefetch, do_prefetch_image
from portal.services.lifecycle.rights_changes import ChoiceRequired
from portal.web.display.formatting import parse_whole_number, plural
from portal.web.jobs.affected_jobs import parse_choice, render_choice
from portal.web.views import action, find_row, page, posted_values, refusals_as_messages, render_form

PLAIN_FIELDS = (
    "name", "title", "description", "image", "archive", "prefix", "min_driver", "min_cuda", "tool",
)  # fmt: skip
"""Fields that a user types as they are stored."""
TEXT_FIELDS = (*PLAIN_FIELDS, "runtime", "tool_command", "tool_port")

NODES_PER_PAGE = 50


@page(AccessPolicy.SIGNED_IN)
def environment_list(request: HttpRequest, user: User) -> HttpResponse:
    offers = sorted(launchable_environments(user), key=lambda offer: offer.environment.name)
    return render(request, "environments/environments.html", {"offers": offers, "may_add": user.is_admin})


@page(AccessPolicy.SIGNED_IN)
def environment_page(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show one environment with its edit form for administrators ("new": an empty form), or its live part."""
    if public_id == "new":
        return _form(request, user, None, {"runtime": RuntimeKind.PODMAN.value, "enabled": "on"})
    row = find_row(visible_environments(user), public_id=public_id)
    if request.headers.get("HX-Request"):
        context = _node_images(user, row, request.GET.get("page"))
        return render(request, "environments/environment_nodes.html", context)
    values = {key: getattr(row, key) or "" for key in TEXT_FIELDS}
    values |= {"tool_command": shlex.join(row.tool_command), "enabled": "on" if row.enabled else ""}
    values["projects"] = ", ".join(project.name for project in row.projects.order_by("name"))
    return _form(request, user, row, values)


@action(AccessPolicy.ADMIN)
def save_environment(request: HttpRequest, user: User, public_id: str = "") -> HttpResponse:
    """Create or change an environment."""
    row = find_row(visible_environments(user), public_id=public_id) if public_id else None
    values = posted_values(request, *TEXT_FIELDS, "projects", "enabled")
    try:
        saved = do_save_environment(user, _build_input(user, values), row, choice=parse_choice(request))
    except ChoiceRequired as error:
        back = reverse("environment", args=[public_id])
        return render_choice(request, error, change=_("Save {name}").format(name=values["name"]), back=back)
    except InvalidRequest as error:
        return _form(request, user, row, values, error)
    messages.success(
        request,
        _("{name} is saved. Nodes without its image pull it before the first start.").format(name=saved.name),
    )
    return redirect("environment", saved.public_id)


@action(AccessPolicy.ADMIN)
def prefetch_image(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Start to pull the image on the node that ``node`` names, else on all."""
    row = find_row(visible_environments(user), public_id=public_id)
    key = request.POST.get("node", "")
    node = find_row(visible_nodes(user), public_id=key) if key else None
    with refusals_as_messages(request):
        nodes = do_prefetch_image(user, row, node)
        text = _("{title} is being pulled on {nodes}.") if nodes else _("{title} is already present.")
        messages.success(request, text.format(title=row.title, nodes=plural(nodes, "node")))
    return redirect("environment", public_id)


@action(AccessPolicy.ADMIN)
def change_image(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Check the tag for another image, or use one that nodes report under the tag."""
    row = find_row(visible_environments(user), public_id=public_id)
    with refusals_as_messages(request):
        if request.POST.get("act") == "update":
            pin = do_update_image(user, row, request.POST.get("image", "")).image_digest
            message = _("New jobs run {pin}. Submitted jobs keep their image.").format(pin=pin)
        else:
            name = do_check_tag(user, row).name
            message = _("{name} pulls {image}. This page shows when the tag refers to another image.").format(
                name=name, image=row.image
            )
        messages.success(request, message)
    return redirect("environment", public_id)


@action(AccessPolicy.ADMIN)
def cancel_prefetch(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Cancel pulls that no node has started."""
    row = find_row(visible_environments(user), public_id=public_id)
    with refusals_as_messages(request):
        nodes = plural(do_cancel_prefetch(user, row), "node")
        messages.success(
            request,
            _("Queued pulls on {nodes} are cancelled. Pulls in progress continue.").format(nodes=nodes),
        )
    return redirect("environment", public_id)


def _build_input(user: User, values: dict[str, str]) -> EnvironmentInput:
    try:
        command = tuple(shlex.split(values["tool_command"]))
    except ValueError:
        raise InvalidRequest(fields={"tool_command": _("A quotation mark is not closed.")}) from None
    port = parse_whole_number(values["tool_port"])
    if values["tool_port"] and port is None:
        raise InvalidRequest(fields={"tool_port": _("Must be between 1 and 65535.")})
    if values["runtime"] not in set(RuntimeKind):
        raise InvalidRequest(fields={"runtime": _("Choose one.")})
    projects, unknown = get_rows_by_key(visible_projects(user), values["projects"].replace(",", " ").split())
    if unknown is not None:
        raise InvalidRequest(
            fields={"projects": _("There is no project called {unknown}.").format(unknown=unknown)}
        )
    return EnvironmentInput(
        **{name: values[name] for name in PLAIN_FIELDS},
        runtime=RuntimeKind(values["runtime"]),
        tool_command=command,
        tool_port=port,
        enabled=bool(values["enabled"]),
        projects=projects,
    )


def _driver_problem(node: Node, environment: Environment) -> str:
    """Return why jobs with GPUs cannot run on a node; blank when its driver suffices or it has no GPUs."""
    driver, cuda = node.agent_info.get("driver"), node.agent_info.get("max_cuda_version")
    if not node.agent_info.get("gpus"):
        return ""
    if not is_driver_sufficient(driver, environment.min_driver):
        return _("Its driver is {driver}.").format(driver=driver) if driver else _("It reports no driver.")
    return (
        ""
        if is_cuda_sufficient(cuda, environment.cuda)
        else _("Its driver supports CUDA {cuda}.").format(cuda=cuda)
    )


def _form(
    request: HttpRequest,
    user: User,
    row: Environment | None,
    values: dict[str, str],
    refusal: InvalidRequest | None = None,
) -> HttpResponse:
    if row is None and not user.is_admin:
        raise NotFound
    context: dict[str, Any] = {"may_edit": True, "runtimes": list(RuntimeKind)}
    if row is not None:
        context |= _node_images(user, row, request.GET.get("page"))
        context["projects"] = nameable_projects(user).filter(environments=row).order_by("name")
    return render_form(request, "environments/environment.html", context, values, refusal)


def _node_images(user: User, row: Environment, number: str | None) -> dict[str, Any]:
    """Return the state of the image on the nodes of one page, and the available actions on all nodes."""
    states = {state.node_id: state for state in ImagePresence.objects.filter(environment=row)}
    nodes = compatible_nodes(row)
    shown = Paginator(nodes, NODES_PER_PAGE).get_page(number)
    found = [state for node in nodes if (state := states.get(node.pk)) is not None]
    may_edit = can(user, Permission.CHANGE, row)
    lacking = len(nodes) - sum(state.state == "present" for state in found)
    return {
        "environment": row,
        "nodes": [(node, states.get(node.pk), _driver_problem(node, row)) for node in shown],
        "shown": shown,
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
