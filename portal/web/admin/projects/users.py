"""Users: list, invitations, sign-in links and deactivation."""

from __future__ import annotations

from django.conf import settings
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from portal.access import AccessPolicy, access_policy, require_user
from portal.domain.states import Role
from portal.errors import InvalidRequest, NotFound
from portal.models import Invitation, Project, User
from portal.services.accounts import users
from portal.services.lifecycle.rights_changes import ChoiceRequired
from portal.web.actions import run_and_redirect
from portal.web.admin.affected_jobs import parse_choice, render_choice


@access_policy(AccessPolicy.ADMIN)
@require_GET
def user_list(request: HttpRequest) -> HttpResponse:
    """List users with their projects, and open invitations."""
    return _page(request)


@access_policy(AccessPolicy.ADMIN)
@require_POST
def invite(request: HttpRequest) -> HttpResponse:
    """Create an invitation; its link appears only in this response."""
    values = {key: request.POST.get(key, "").strip() for key in ("full_name", "email", "project", "role")}
    project = Project.objects.filter(public_id=values["project"]).first() if values["project"] else None
    try:
        invitation, code = users.do_create_invitation(
            require_user(request.user),
            full_name=values["full_name"],
            email=values["email"],
            project=project,
            role=parse_role(values["role"]) if project else None,
            grants_admin="grants_admin" in request.POST,
        )
    except InvalidRequest as refusal:
        return _page(request, status=400, problems=refusal.fields, values=values)
    link = code_link("invitation", code)
    return _page(request, link=link, invitation=invitation)


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def revoke_invitation(request: HttpRequest, public_id: str) -> HttpResponse:
    invitation = Invitation.objects.filter(public_id=public_id).select_related("project").first()
    if invitation is None:
        raise NotFound
    users.do_revoke_invitation(require_user(request.user), invitation)
    messages.success(request, "The invitation is revoked.")
    if invitation.project is not None and not require_user(request.user).is_admin:
        return HttpResponseRedirect(reverse("project", args=[invitation.project.public_id]))
    return HttpResponseRedirect(reverse("users"))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def change_user(request: HttpRequest, public_id: str) -> HttpResponse:
    """Change activation or administrator rights of a user, or create a one-time sign-in link."""
    admin = require_user(request.user)
    user = User.objects.filter(public_id=public_id).first()
    if user is None:
        raise NotFound
    act = request.POST.get("act", "")
    if act == "link":
        link = code_link("sign-in-link", users.do_create_magic_link(admin, user))
        return _page(request, link=link, link_for=user)

    def change() -> str:
        is_active = {"close": False, "open": True}.get(act)
        is_admin = {"admin": True, "no-admin": False}.get(act)
        if is_active is None and is_admin is None:
            raise NotFound
        users.do_change_user(
            admin, user, is_active=is_active, is_admin=is_admin, choice=parse_choice(request)
        )
        return f"Saved for {user.username}."

    try:
        return run_and_redirect(request, change, reverse("users"))
    except ChoiceRequired as needed:
        name = "Deactivate account of" if act == "close" else "Revoke administrator rights of"
        return render_choice(request, needed, change=f"{name} {user.username}", back=reverse("users"))


def code_link(view: str, code: str) -> str:
    """Return a link with a sign-in code at the portal's configured URL, regardless of the request's Host."""
    return f"{settings.PORTAL_URL.rstrip('/')}{reverse(view)}#{code}"


def parse_role(text: str) -> Role:
    """Return the posted role; member by default."""
    if text and text not in set(Role):
        raise InvalidRequest(fields={"role": "Choose a role."})
    return Role(text or Role.MEMBER)


def _page(
    request: HttpRequest,
    *,
    status: int = 200,
    problems: dict[str, str] | None = None,
    values: dict[str, str] | None = None,
    link: str = "",
    invitation: Invitation | None = None,
    link_for: User | None = None,
) -> HttpResponse:
    search = request.GET.get("q", "").strip()
    everybody = User.objects.prefetch_related("memberships__project").order_by("username")
    if search:
        everybody = everybody.filter(
            Q(username__icontains=search) | Q(full_name__icontains=search) | Q(email__icontains=search)
        )
    waiting = Invitation.objects.filter(
        used_at__isnull=True, revoked_at__isnull=True, expires_at__gt=timezone.now()
    )
    return render(
        request,
        "admin/users.html",
        {
            "users": Paginator(everybody, 50).get_page(request.GET.get("page")),
            "search": search,
            "invitations": waiting.select_related("created_by", "project").order_by("-id"),
            "projects": Project.objects.filter(archived_at__isnull=True).order_by("name"),
            "roles": list(Role),
            "problems": problems or {},
            "values": values or {},
            "link": link,
            "invitation": invitation,
            "link_for": link_for,
        },
        status=status,
    )
