"""Name, address and host key of a node, and its repeated enrolment."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from agents.enrolment import ENGINE_ACCESS_MODES
from agents.keys import fingerprint
from portal.access import AccessPolicy
from portal.errors import FairwayError, NotFound
from portal.models import Node, User
from portal.selectors.nodes.host_keys import list_host_key_changes
from portal.services.nodes import enrolment, identity
from portal.web.nodes.nodes import DEFAULTS, ENGINE_TITLES, parse_port
from portal.web.views import (
    action,
    find_row,
    form_page,
    page,
    posted_values,
    refusals_as_messages,
    render_form,
)

_KEY_FILES = {"ssh-ed25519": "ed25519", "ecdsa-sha2-nistp256": "ecdsa", "ssh-rsa": "rsa"}


@form_page(AccessPolicy.ADMIN)
def host_key(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show the confirmed host key and the one that the node presents; confirm the latter by its fingerprint."""
    node = find_row(Node.objects, public_id=public_id)
    values = posted_values(request, "fingerprint", "reason")
    refusal: FairwayError | None = None
    if request.method == "POST":
        try:
            operation = identity.do_confirm_host_key(
                user, node, fingerprint=values["fingerprint"], reason=values["reason"]
            )
        except FairwayError as error:
            refusal = error
            node.refresh_from_db()
        else:
            return redirect("node-operation", public_id, operation.public_id)
    keys = identity.get_host_keys(user, node)
    context = {
        "node": node,
        "keys": keys,
        "key_file": _KEY_FILES.get(keys.presented.key_type, "ed25519") if keys.presented else "",
        "changes": list_host_key_changes(node),
    }
    return render_form(request, "nodes/node_host_key.html", context, values, refusal)


@action(AccessPolicy.ADMIN)
def rename_node(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    node, values = find_row(Node.objects, public_id=public_id), posted_values(request, "name", "reason")
    with refusals_as_messages(request):
        renamed = identity.do_rename_node(user, node, **values)
        text = _("{old} is now called {name}.").format(old=node.name, name=renamed.name)
        messages.success(request, text)
    return redirect("node", public_id)


@action(AccessPolicy.ADMIN)
def move_node(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Test the connection at the posted address and show the steps; the address is saved if it succeeds."""
    node = find_row(Node.objects, public_id=public_id)
    values = posted_values(request, "host", "port", "reason")
    shown: tuple[str, ...] = ("node", public_id)
    with refusals_as_messages(request):
        port = parse_port(values["port"])
        operation = identity.do_move_node(user, node, host=values["host"], port=port, reason=values["reason"])
        shown = ("node-operation", public_id, operation.public_id)
    return redirect(*shown)


@page(AccessPolicy.ADMIN)
def enrol_node(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show the script and the sudo login that set up a known node again, such as after a reinstallation."""
    node = find_row(Node.objects, public_id=public_id)
    engine = request.GET.get("engine", DEFAULTS["engine"])
    if engine not in ENGINE_ACCESS_MODES:
        raise NotFound
    context = {
        "node": node,
        "engine": engine,
        "engines": [(mode, _(ENGINE_TITLES[mode])) for mode in ENGINE_ACCESS_MODES],
        "script": enrolment.get_node_script(user, node, engine=engine),
        "fingerprint": fingerprint(node.host_key),
    }
    return render(request, "nodes/node_enrol.html", context)
