"""Adds nodes with a confirmed host key and a live test, and takes nodes into and out of service."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from agents.enrolment import ENGINE_ACCESS_MODES, RUNTIME_KINDS, EngineAccess
from portal.access import AccessPolicy, access_policy, require_user
from portal.domain.states import NodeState, NodeTransport, RuntimeKind
from portal.errors import FairwayError, InvalidRequest, NotFound
from portal.models import Gpu, Node, NodeOperation, NodePool
from portal.services.nodes import enrolment, nodes, operations
from portal.services.nodes.gpus import do_return_gpu_to_service
from portal.services.nodes.nodes import do_uncordon_node
from portal.services.nodes.quarantine import do_clear_node_quarantine
from portal.services.nodes.topologies import do_set_labels
from portal.web.actions import run_and_redirect
from portal.web.cluster import node_page
from portal.web.display.formatting import parse_whole_number

FIELDS = ("name", "pool", "new_pool", "host", "port", "account", "runtime", "engine")
ENGINE_TITLES: dict[EngineAccess, str] = {
    "auto": "automatic: rootless if the node can enforce limits without root, else rootful",
    "rootless": "always rootless (podman only)",
    "rootful": "always rootful, through a sudoers rule",
}
DEFAULTS = {"port": "22", "account": "fairway", "runtime": "podman", "engine": "auto"}


@access_policy(AccessPolicy.ADMIN)
@require_http_methods(["GET", "POST"])
def add_node(request: HttpRequest) -> HttpResponse:
    """Ask for an address, then show the host key to confirm with the script, then run the live test."""
    values = DEFAULTS | {key: request.POST[key].strip() for key in FIELDS if key in request.POST}
    if request.method == "GET":
        return _form(request, values)
    try:
        port = _port(values["port"])
        if not values.get("host"):
            raise InvalidRequest(fields={"host": "Enter the host name or address of the machine."})
        choices = {name: values[name] for name in ("engine", "runtime", "account")}
        enrolment.check_choices(**choices)
        if "confirmed" not in request.POST:
            key = enrolment.get_host_key(values.get("host", ""), port)
            script = enrolment.get_script(values.get("host", ""), **choices)
            return _form(request, values, host_key=key.line, fingerprint=key.fingerprint, script=script)
        node = nodes.do_create_node(
            require_user(request.user),
            name=values.get("name", ""),
            pool=_pool(request, values),
            link=NodeTransport.SSH,
            host=values.get("host", ""),
            port=port,
            ssh_user=values["account"],
            host_key=request.POST.get("host_key", ""),
            runtime=_runtime(values["runtime"]),
        )
    except InvalidRequest as refusal:
        return _form(request, values, problems=refusal.fields, message=refusal.message, status=400)
    return _enroll(request, node, engine=values["engine"])


@access_policy(AccessPolicy.ADMIN)
@require_POST
def return_gpu_to_service(request: HttpRequest, public_id: str, uuid: str) -> HttpResponse:
    """Return a lost or quarantined GPU to service."""
    gpu = Gpu.objects.filter(node__public_id=public_id, uuid=uuid).first()
    if gpu is None:
        raise NotFound
    do_return_gpu_to_service(require_user(request.user), gpu)
    messages.success(
        request, f"GPU {gpu.index} accepts jobs again." if gpu.present else "The GPU is removed."
    )
    return HttpResponseRedirect(reverse("node", args=[public_id]))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def test_node(request: HttpRequest, public_id: str) -> HttpResponse:
    """Start a connection test of a node."""
    return _enroll(request, _node(public_id))


@access_policy(AccessPolicy.ADMIN)
@require_GET
def node_check(request: HttpRequest, public_id: str, check_id: str) -> HttpResponse:
    """Show the finished steps of a test; the fragment polls until it is complete."""
    check = (
        NodeOperation.objects.select_related("node")
        .filter(public_id=check_id, node__public_id=public_id)
        .first()
    )
    if check is None:
        raise NotFound
    template = (
        "admin/node_operation_steps.html"
        if request.headers.get("HX-Request")
        else "admin/node_operation.html"
    )
    return render(request, template, {"check": check, "node": check.node})


@access_policy(AccessPolicy.ADMIN)
@require_POST
def set_node_state(request: HttpRequest, public_id: str) -> HttpResponse:
    """Cordon, drain, fence, retire or uncordon a node, or clear its quarantine."""
    node, user = _node(public_id), require_user(request.user)
    act, reason = request.POST.get("act", ""), request.POST.get("reason", "").strip()
    if act in ("uncordon", "force-uncordon") and reason == node.state_reason:
        reason = ""  # the reason explained why the node was out of service
    states = {
        "cordon": NodeState.CORDONED,
        "drain": NodeState.DRAINED,
        "retire": NodeState.RETIRED,
    }

    if act == "uncordon":
        return _start_return_check(request, node, reason)

    def change() -> str:
        if act == "force-uncordon":
            do_uncordon_node(user, node, reason=reason, force=True)
            return f"{node.name} is now ready."
        if act == "fence":
            ended = nodes.do_fence_node(user, node, reason=reason)
            return f"{node.name} is fenced; {ended} tasks ended and their GPUs are free."
        if act == "clear-quarantine":
            do_clear_node_quarantine(user, node, reason=reason)
            return f"The quarantine of {node.name} is cleared."
        if act not in states:
            raise NotFound
        nodes.do_set_node_state(user, node, states[act], reason=reason)
        return f"{node.name} is now {states[act].value}."

    back = reverse("cluster") if act == "retire" else reverse("node", args=[public_id])
    return run_and_redirect(request, change, back)


@access_policy(AccessPolicy.ADMIN)
@require_POST
def set_labels(request: HttpRequest, public_id: str) -> HttpResponse:
    """Replace the labels of a node by the posted ones, one key=value per line."""
    node, text = _node(public_id), request.POST.get("labels", "")
    try:
        do_set_labels(require_user(request.user), node, parse_labels(text))
    except InvalidRequest as refusal:
        messages.error(request, refusal.message)
        return node_page(request, node, typed_labels=text, status=400)
    messages.success(request, f"The labels of {node.name} are saved. The next cycle uses them.")
    return HttpResponseRedirect(reverse("node", args=[public_id]))


def parse_labels(text: str) -> dict[str, str]:
    """Parse lines of key=value. Raise InvalidRequest for a malformed line and for a duplicate key."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, sign, value = (part.strip() for part in line.partition("="))
        if not sign:
            raise InvalidRequest(fields={"labels": f"“{line[:40]}” is not key=value."})
        if key in found:
            raise InvalidRequest(fields={"labels": f"{key[:40]} occurs twice."})
        found[key] = value
    return found


# -- internal --------------------------------------------------------------------------------------


def _start_return_check(request: HttpRequest, node: Node, reason: str) -> HttpResponse:
    """Start the check after which the node returns to service, and show it."""
    there = reverse("node", args=[node.public_id])
    try:
        check = do_uncordon_node(require_user(request.user), node, reason=reason)
    except FairwayError as refusal:
        messages.error(request, refusal.message)
    else:
        if check is not None:
            there = reverse("node-operation", args=[node.public_id, check.public_id])
    return HttpResponseRedirect(there)


def _enroll(request: HttpRequest, node: Node, engine: str = DEFAULTS["engine"]) -> HttpResponse:
    user = require_user(request.user)
    password = request.POST.get("sudo_password", "")
    if password:
        account = request.POST.get("sudo_account", "").strip()
        login = enrolment.SudoLogin(account, password, engine)
        check = enrolment.do_enrol_by_sudo(user, node, login)
    else:
        check = operations.do_start_connection_test(user, node)
    return HttpResponseRedirect(reverse("node-operation", args=[node.public_id, check.public_id]))


def _node(public_id: str) -> Node:
    node = Node.objects.filter(public_id=public_id).first()
    if node is None:
        raise NotFound
    return node


def _port(text: str) -> int:
    port = parse_whole_number(text)
    if port is None or not 1 <= port <= 65_535:
        raise InvalidRequest(fields={"port": "Must be between 1 and 65535."})
    return port


def _runtime(text: str) -> RuntimeKind:
    if text not in set(RuntimeKind):
        raise InvalidRequest(fields={"runtime": "Choose one of the options."})
    return RuntimeKind(text)


def _pool(request: HttpRequest, values: dict[str, str]) -> NodePool:
    if values.get("new_pool"):
        existing = NodePool.objects.filter(name=values["new_pool"]).first()
        return existing or nodes.do_create_pool(require_user(request.user), values["new_pool"])
    pool = NodePool.objects.filter(public_id=values.get("pool", "")).first()
    if pool is None:
        raise InvalidRequest(fields={"pool": "Choose a pool, or name a new one."})
    return pool


def _form(
    request: HttpRequest,
    values: dict[str, str],
    *,
    host_key: str = "",
    fingerprint: str = "",
    script: str = "",
    problems: dict[str, str] | None = None,
    message: str = "",
    status: int = 200,
) -> HttpResponse:
    context = {
        "values": values,
        "pools": NodePool.objects.order_by("name"),
        "runtimes": RUNTIME_KINDS,
        "engines": [(engine, ENGINE_TITLES[engine]) for engine in ENGINE_ACCESS_MODES],
        "host_key": host_key,
        "fingerprint": fingerprint,
        "script": script,
        "problems": problems or {},
        "message": message if not problems else "",
    }
    return render(request, "admin/node_add.html", context, status=status)
