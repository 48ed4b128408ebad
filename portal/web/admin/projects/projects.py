"""Projects and their members: the list, one project, and invitations."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from portal.access import (
    AccessPolicy,
    Permission,
    access_policy,
    can,
    require_permission,
    require_user,
    visible_projects,
    visible_secrets,
    visible_users,
)
from portal.domain.states import Role
from portal.errors import InvalidRequest, NotFound, PreconditionFailed
from portal.models import Invitation, Project, Quota, User
from portal.selectors.nodes.network_policy import egress_allow_list
from portal.selectors.projects.projects import in_tree_order, live_job_counts, members_and_managers
from portal.services.accounts import users
from portal.services.lifecycle.rights_changes import ChoiceRequired
from portal.services.projects import projects
from portal.web.actions import run_and_redirect
from portal.web.admin.affected_jobs import parse_choice, render_choice
from portal.web.admin.projects.project_policy import ProjectPolicyPanel
from portal.web.admin.projects.tree_pagination import MIN_ROWS_FOR_SEARCH, paginate_tree
from portal.web.admin.projects.users import code_link, parse_role


@access_policy(AccessPolicy.SIGNED_IN)
@require_GET
def project_list(request: HttpRequest) -> HttpResponse:
    """List the projects visible to the user as a tree."""
    return _list(request)


@access_policy(AccessPolicy.ADMIN)
@require_POST
def add_project(request: HttpRequest) -> HttpResponse:
    user = require_user(request.user)
    values = {key: request.POST.get(key, "").strip() for key in ("name", "title", "parent")}
    parent = Project.objects.filter(public_id=values["parent"]).first() if values["parent"] else None
    try:
        project = projects.do_create_project(user, name=values["name"], title=values["title"], parent=parent)
    except InvalidRequest as refusal:
        return _list(request, status=400, values=values, problems=refusal.fields)
    messages.success(request, f"{project.name} is created. Add members and a quota next.")
    return HttpResponseRedirect(reverse("project", args=[project.public_id]))


@access_policy(AccessPolicy.SIGNED_IN)
@require_GET
def project_page(request: HttpRequest, public_id: str) -> HttpResponse:
    """Show one project: members, quotas, open invitations."""
    return _page(request, _project(request, public_id))


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def set_member(request: HttpRequest, public_id: str) -> HttpResponse:
    """Give a user a role; the role "none" removes the member."""
    user = require_user(request.user)
    project = _project(request, public_id)
    require_permission(user, Permission.MANAGE, project)
    name = request.POST.get("username", "").strip()[:63]
    role = request.POST.get("role", "")
    everybody = User.objects.filter(username=name)
    who = (everybody if role == "none" else everybody.filter(is_active=True)).first()
    if who is None or (role != "none" and role not in {r.value for r in Role}):
        problem = f"There is no user called {name}." if who is None else "Choose a role."
        return _page(request, project, status=400, problems={"username": problem}, values={"username": name})
    back = reverse("project", args=[public_id])
    out = role == "none"
    try:
        if out:
            projects.do_remove_member(user, project, who, choice=parse_choice(request))
        else:
            projects.do_set_member(user, project, who, Role(role), choice=parse_choice(request))
    except ChoiceRequired as needed:
        change = f"Remove {who.username} from" if out else f"Make {who.username} {role} of"
        return render_choice(request, needed, change=f"{change} {project.name}", back=back)
    if out:
        messages.success(
            request, f"{who.username} is removed from {project.name}. Their open workspaces there are closed."
        )
    else:
        messages.success(request, f"{who.username} is now {role} of {project.name}.")
    return HttpResponseRedirect(back)


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def invite_into(request: HttpRequest, public_id: str) -> HttpResponse:
    """Create an invitation to this project; the link appears only in this response."""
    user = require_user(request.user)
    project = _project(request, public_id)
    try:
        invitation, code = users.do_create_invitation(
            user,
            full_name=request.POST.get("full_name", "").strip(),
            email=request.POST.get("email", "").strip(),
            project=project,
            role=parse_role(request.POST.get("role", "")),
        )
    except InvalidRequest as refusal:
        return _page(request, project, status=400, problems=refusal.fields)
    link = code_link("invitation", code)
    return _page(request, project, link=link, invitation=invitation)


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def change_project(request: HttpRequest, public_id: str) -> HttpResponse:
    """Change the title of a project, or archive it."""
    user = require_user(request.user)
    project = _project(request, public_id)

    def change() -> str:
        if "archive" in request.POST:
            projects.do_change_project(user, project, archived_at=timezone.now())
            return f"{project.name} is archived; no new jobs start in it."
        if "restore" in request.POST:
            projects.do_change_project(user, project, archived_at=None)
            return f"{project.name} is no longer archived."
        if "egress_allow" in request.POST:
            entries = request.POST["egress_allow"].replace(",", "\n").splitlines()
            projects.do_change_project(user, project, egress_allow=entries)
            return "Saved. Applies to jobs that start from now on."
        projects.do_change_project(user, project, title=request.POST.get("title", "").strip()[:200])
        return "Saved."

    return run_and_redirect(request, change, reverse("project", args=[public_id]))


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def save_idle(request: HttpRequest, public_id: str) -> HttpResponse:
    """Save the project's idle settings, all or none."""
    project = _project(request, public_id)
    idle = ProjectPolicyPanel(project)
    try:
        changed = idle.save(require_user(request.user), request.POST)
    except (InvalidRequest, PreconditionFailed) as refusal:
        idle.error = refusal.message
        return _page(
            request, project, status=409 if isinstance(refusal, PreconditionFailed) else 400, idle=idle
        )
    if changed:
        messages.success(request, "Saved. Applies from the next idle check on.")
    return HttpResponseRedirect(reverse("project", args=[public_id]))


# -- internal --------------------------------------------------------------------------------------


def _list(
    request: HttpRequest,
    *,
    status: int = 200,
    values: dict[str, str] | None = None,
    problems: dict[str, str] | None = None,
) -> HttpResponse:
    all_rows = in_tree_order(list(visible_projects(request.user).order_by("name")))
    page, search = paginate_tree(all_rows, request.GET)
    shown = [row.project for row in page]
    live = live_job_counts(shown)
    count, managers = members_and_managers(shown)
    context = {
        "rows": [
            (row, live.get(row.project.pk, 0), count[row.project.pk], managers.get(row.project.pk, []))
            for row in page
        ],
        "page": page,
        "to": reverse("projects"),
        "search": search,
        "total": len(all_rows),
        "searchable": len(all_rows) > MIN_ROWS_FOR_SEARCH,
        "parents": [row.project for row in all_rows if row.project.archived_at is None],
        "may_add": require_user(request.user).is_admin,
        "values": values or {},
        "problems": problems or {},
    }
    return render(request, "admin/projects.html", context, status=status)


def _project(request: HttpRequest, public_id: str) -> Project:
    project = visible_projects(request.user).select_related("parent").filter(public_id=public_id).first()
    if project is None:
        raise NotFound
    return project


def _page(
    request: HttpRequest,
    project: Project,
    *,
    status: int = 200,
    problems: dict[str, str] | None = None,
    values: dict[str, str] | None = None,
    link: str = "",
    invitation: Invitation | None = None,
    idle: ProjectPolicyPanel | None = None,
) -> HttpResponse:
    user = require_user(request.user)
    manages = can(user, Permission.MANAGE, project)
    members = project.memberships.select_related("user").order_by("user__username")
    waiting = Invitation.objects.filter(
        project=project, used_at__isnull=True, revoked_at__isnull=True, expires_at__gt=timezone.now()
    )
    return render(
        request,
        "admin/project.html",
        {
            "project": project,
            "members": members,
            "idle": idle or ProjectPolicyPanel(project),
            "quotas": Quota.objects.filter(project=project).select_related("pool").order_by("pool__name"),
            "invitations": waiting.select_related("created_by").order_by("-id") if manages else [],
            "manages": manages,
            "allowed": egress_allow_list(project),
            "may_list": user.is_admin,
            "listed": "\n".join(project.egress_allow),
            "may_submit": can(user, Permission.SUBMIT, project),
            "secrets": visible_secrets(user).filter(project=project).order_by("name"),
            "known": visible_users(user).filter(is_active=True).order_by("username")[:500] if manages else [],
            "roles": list(Role),
            "problems": problems or {},
            "values": values or {},
            "link": link,
            "invitation": invitation,
        },
        status=status,
    )
