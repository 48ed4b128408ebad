"""Users: list, invitations, sign-in links and deactivation."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.access import AccessPolicy
from portal.domain.states import Role
from portal.errors import InvalidRequest, NotFound
from portal.models import Invitation, Project, User
from portal.services.accounts import users
from portal.services.lifecycle.rights_changes import ChoiceRequired
from portal.web.jobs.affected_jobs import parse_choice, render_choice
from portal.web.views import action, find_row, page, posted_values, refusals_as_messages, render_form

CHANGES: dict[str, dict[str, bool]] = {
    "close": {"is_active": False},
    "open": {"is_active": True},
    "admin": {"is_admin": True},
    "no-admin": {"is_admin": False},
}
"""Changed fields of a user, by the value of the button."""
CONFIRMATIONS = {
    "admin": (
        gettext_lazy("Make {user} an administrator"),
        gettext_lazy(
            "{user} can then see and stop all jobs, and change quotas, scheduling policy, nodes, projects and users, "
            "including the rights of other administrators."
        ),
    ),
    "no-admin": (
        gettext_lazy("Revoke administrator rights of {user}"),
        gettext_lazy(
            "{user} can then change and see only what members of their own projects can. "
            "Their projects and jobs remain."
        ),
    ),
    "close": (
        gettext_lazy("Deactivate account of {user}"),
        gettext_lazy(
            "{user} cannot sign in any more. Their sessions and tokens end at once, and open workspaces are closed "
            "within seconds. If they have queued or running jobs, you choose next what happens to them. "
            "You can activate the account again."
        ),
    ),
}
"""Title and consequence of the changes that are confirmed first."""


@page(AccessPolicy.ADMIN)
def user_list(request: HttpRequest, user: User) -> HttpResponse:
    return _page(request)


@action(AccessPolicy.ADMIN)
def invite(request: HttpRequest, user: User) -> HttpResponse:
    """Create an invitation; its link appears only in this response."""
    values = posted_values(request, "full_name", "email", "project", "role")
    project = Project.objects.filter(public_id=values["project"]).first() if values["project"] else None
    try:
        invitation, code = users.do_create_invitation(
            user,
            full_name=values["full_name"],
            email=values["email"],
            project=project,
            role=parse_role(values["role"]) if project else None,
            grants_admin="grants_admin" in request.POST,
        )
    except InvalidRequest as error:
        return _page(request, error, values)
    return _page(request, link=code_link("invitation", code), invitation=invitation)


@action(AccessPolicy.SIGNED_IN)
def revoke_invitation(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    invitation = find_row(Invitation.objects.select_related("project"), public_id=public_id)
    users.do_revoke_invitation(user, invitation)
    messages.success(request, _("The invitation is revoked."))
    if invitation.project is not None and not user.is_admin:
        return redirect("project", invitation.project.public_id)
    return redirect("users")


@page(AccessPolicy.ADMIN)
def confirm_change(request: HttpRequest, user: User, public_id: str, act: str) -> HttpResponse:
    account = find_row(User.objects, public_id=public_id)
    if act not in CONFIRMATIONS:
        raise NotFound
    title, consequence = (text.format(user=account.username) for text in CONFIRMATIONS[act])
    context = {"account": account, "act": act, "title": title, "consequence": consequence}
    return render(request, "accounts/confirm_user_change.html", context)


@action(AccessPolicy.ADMIN)
def change_user(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Change activation or administrator rights of a user, or create a one-time sign-in link."""
    account = find_row(User.objects, public_id=public_id)
    act = request.POST.get("act", "")
    if act == "link":
        return _page(
            request,
            link=code_link("sign-in-link", users.do_create_magic_link(user, account)),
            link_for=account,
        )
    try:
        with refusals_as_messages(request):
            if act not in CHANGES:
                raise NotFound
            users.do_change_user(user, account, **CHANGES[act], choice=parse_choice(request))
            messages.success(request, _("Saved for {username}.").format(username=account.username))
    except ChoiceRequired as error:
        title = CONFIRMATIONS[act][0].format(user=account.username)
        return render_choice(request, error, change=title, back=reverse("users"))
    return redirect("users")


def code_link(view: str, code: str) -> str:
    """Return a link with a sign-in code at the portal's configured URL, regardless of the request's Host."""
    return f"{settings.PORTAL_URL.rstrip('/')}{reverse(view)}#{code}"


def parse_role(text: str) -> Role:
    """Return the posted role; member by default."""
    if text and text not in set(Role):
        raise InvalidRequest(fields={"role": _("Choose a role.")})
    return Role(text or Role.MEMBER)


def open_invitations() -> QuerySet[Invitation]:
    """Return the invitations that can still be accepted, newest first."""
    rows = Invitation.objects.filter(
        used_at__isnull=True, revoked_at__isnull=True, expires_at__gt=timezone.now()
    )
    return rows.select_related("created_by", "project").order_by("-id")


def _page(
    request: HttpRequest,
    refusal: InvalidRequest | None = None,
    values: dict[str, str] | None = None,
    **link: Any,
) -> HttpResponse:
    """Render the page; ``link`` is a new one-time link and its recipient."""
    search = request.GET.get("q", "").strip()
    everybody = User.objects.prefetch_related("memberships__project").order_by("username")
    if search:
        everybody = everybody.filter(
            Q(username__icontains=search) | Q(full_name__icontains=search) | Q(email__icontains=search)
        )
    context = link | {
        "users": Paginator(everybody, 50).get_page(request.GET.get("page")),
        "search": search,
        "invitations": open_invitations(),
        "projects": Project.objects.filter(archived_at__isnull=True).order_by("name"),
        "roles": list(Role),
    }
    return render_form(request, "accounts/users.html", context, values or {}, refusal)
