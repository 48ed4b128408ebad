"""Adds nodes with a confirmed host key and a live test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from agents.enrolment import ENGINE_ACCESS_MODES, RUNTIME_KINDS, EngineAccess
from portal.access import AccessPolicy
from portal.domain.states import NodeTransport, RuntimeKind
from portal.errors import InvalidRequest
from portal.models import Node, NodePool, User
from portal.services.nodes import enrolment, nodes, operations
from portal.web.display.formatting import parse_whole_number
from portal.web.views import action, find_row, form_page, refusals_as_messages, render_form

if TYPE_CHECKING:
    pass


FIELDS = ("name", "pool", "new_pool", "host", "port", "account", "runtime", "engine")
ENGINE_TITLES: dict[EngineAccess, str] = {
    "auto": gettext_noop("automatic: rootless if the node can enforce limits without root, else rootful"),
    "rootless": gettext_noop("always rootless (podman only)"),
    "rootful": gettext_noop("always rootful, through a sudoers rule"),
}
DEFAULTS = {"port": "22", "account": "fairway", "runtime": "podman", "engine": "auto"}


@form_page(AccessPolicy.ADMIN)
def add_node(request: HttpRequest, user: User) -> HttpResponse:
    """Ask for an address, then show the host key to confirm with the script, then run the live test."""
    values = DEFAULTS | {key: request.POST[key].strip() for key in FIELDS if key in request.POST}
    if request.method == "GET":
        return _form(request, values)
    try:
        port = parse_port(values["port"])
        if not values.get("host"):
            raise InvalidRequest(fields={"host": _("Enter the host name or address of the machine.")})
        choices = {name: values[name] for name in ("engine", "runtime", "account")}
        enrolment.check_choices(**choices)
        if "confirmed" not in request.POST:
            key = enrolment.get_host_key(values.get("host", ""), port)
            script = enrolment.get_script(values.get("host", ""), **choices)
            return _form(request, values, host_key=key, script=script)
        node = nodes.do_create_node(
            user,
            name=values.get("name", ""),
            pool=_pool(user, values),
            link=NodeTransport.SSH,
            host=values.get("host", ""),
            port=port,
            ssh_user=values["account"],
            host_key=request.POST.get("host_key", ""),
            runtime=_runtime(values["runtime"]),
        )
    except InvalidRequest as error:
        return _form(request, values, error)
    return _enroll(request, user, node, values["engine"])


@action(AccessPolicy.ADMIN)
def test_node(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Test the connection of a node; with a sudo login, set it up before."""
    node = find_row(Node.objects, public_id=public_id)
    answer: HttpResponse | None = None
    with refusals_as_messages(request):
        answer = _enroll(request, user, node, request.POST.get("engine", DEFAULTS["engine"]))
    return answer or redirect("enrol-node", public_id)


# -- internal --------------------------------------------------------------------------------------


def _enroll(request: HttpRequest, user: User, node: Node, engine: str) -> HttpResponse:
    password = request.POST.get("sudo_password", "")
    if password:
        account = request.POST.get("sudo_account", "").strip()
        login = enrolment.SudoLogin(account, password, engine)
        check = enrolment.do_enrol_by_sudo(user, node, login)
    else:
        check = operations.do_start_connection_test(user, node)
    return redirect("node-operation", node.public_id, check.public_id)


def parse_port(text: str) -> int:
    """Raise InvalidRequest for a text that is no port."""
    port = parse_whole_number(text)
    if port is None or not 1 <= port <= 65_535:
        raise InvalidRequest(fields={"port": _("Must be between 1 and 65535.")})
    return port


def _runtime(text: str) -> RuntimeKind:
    if text not in set(RuntimeKind):
        raise InvalidRequest(fields={"runtime": _("Choose one of the options.")})
    return RuntimeKind(text)


def _pool(user: User, values: dict[str, str]) -> NodePool:
    if values.get("new_pool"):
        existing = NodePool.objects.filter(name=values["new_pool"]).first()
        return existing or nodes.do_create_pool(user, values["new_pool"])
    pool = NodePool.objects.filter(public_id=values.get("pool", "")).first()
    if pool is None:
        raise InvalidRequest(fields={"pool": _("Choose a pool, or name a new one.")})
    return pool


def _form(
    request: HttpRequest, values: dict[str, str], refusal: InvalidRequest | None = None, **found: Any
) -> HttpResponse:
    """Render the form; ``found`` is the host key and the script, once the machine answered."""
    context = found | {
        "pools": NodePool.objects.order_by("name"),
        "runtimes": RUNTIME_KINDS,
        "engines": [(engine, _(ENGINE_TITLES[engine])) for engine in ENGINE_ACCESS_MODES],
    }
    return render_form(request, "nodes/node_add.html", context, values, refusal)
