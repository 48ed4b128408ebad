"""Projects and their members: the list, one project, and invitations."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import (
    AccessPolicy,
    Permission,
    can,
    require_permission,
    visible_projects,
    visible_secrets,
    visible_users,
)
from portal.domain.states import Role
from portal.errors import FairwayError, InvalidRequest, PreconditionFailed
from portal.models import Project, Quota, User
from portal.selectors.nodes.network_policy import egress_allow_list
from portal.selectors.projects.projects import in_tree_order, live_job_counts, members_and_managers
from portal.selectors.storage.volumes import list_usage
from portal.services.accounts import users
from portal.services.lifecycle.rights_changes import ChoiceRequired
from portal.services.projects import projects
from portal.web.accounts.users import code_link, open_invitations, parse_role
from portal.web.jobs.affected_jobs import parse_choice, render_choice
from portal.web.projects.tree_pagination import MIN_ROWS_FOR_SEARCH, paginate_tree
from portal.web.scheduling.policy import ProjectPolicyPanel
from portal.web.views import action, find_row, page, posted_values, refusals_as_messages, render_form


@page(AccessPolicy.SIGNED_IN)
def project_list(request: HttpRequest, user: User) -> HttpResponse:
    """List the projects visible to the user as a tree."""
    return _list(request, user)


@action(AccessPolicy.ADMIN)
def add_project(request: HttpRequest, user: User) -> HttpResponse:
    values = posted_values(request, "name", "title", "parent")
    parent = Project.objects.filter(public_id=values["parent"]).first() if values["parent"] else None
    try:
        project = projects.do_create_project(user, name=values["name"], title=values["title"], parent=parent)
    except InvalidRequest as error:
        return _list(request, user, values, error)
    messages.success(request, _("{name} is created. Add members and a quota next.").format(name=project.name))
    return redirect("project", project.public_id)


@page(AccessPolicy.SIGNED_IN)
def project_page(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    return _page(request, user, _project(user, public_id))


@action(AccessPolicy.SIGNED_IN)
def set_member(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Give a user a role; the role "none" removes the member."""
    project = _project(user, public_id)
    require_permission(user, Permission.MANAGE, project)
    name = request.POST.get("username", "").strip()[:63]
    role = request.POST.get("role", "")
    everybody = User.objects.filter(username=name)
    who = (everybody if role == "none" else everybody.filter(is_active=True)).first()
    if who is None or (role != "none" and role not in set(Role)):
        problem = (
            _("There is no user called {name}.").format(name=name) if who is None else _("Choose a role.")
        )
        return _page(request, user, project, InvalidRequest(fields={"username": problem}), {"username": name})
    names = {"user": who.username, "role": _(role), "project": project.name}
    try:
        if role == "none":
            change = _("Remove {user} from {project}")
            projects.do_remove_member(user, project, who, choice=parse_choice(request))
            done = _("{user} is removed from {project}. Their open workspaces there are closed.")
        else:
            change = _("Make {user} {role} of {project}")
            projects.do_set_member(user, project, who, Role(role), choice=parse_choice(request))
            done = _("{user} is now {role} of {project}.")
    except ChoiceRequired as error:
        back = reverse("project", args=[public_id])
        return render_choice(request, error, change=change.format(**names), back=back)
    messages.success(request, done.format(**names))
    return redirect("project", public_id)


@action(AccessPolicy.SIGNED_IN)
def invite_into(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Create an invitation to this project; the link appears only in this response."""
    project = _project(user, public_id)
    try:
        invitation, code = users.do_create_invitation(
            user,
            full_name=request.POST.get("full_name", "").strip(),
            email=request.POST.get("email", "").strip(),
            project=project,
            role=parse_role(request.POST.get("role", "")),
        )
    except InvalidRequest as error:
        return _page(request, user, project, error)
    return _page(request, user, project, link=code_link("invitation", code), invitation=invitation)


@action(AccessPolicy.SIGNED_IN)
def change_project(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    project = _project(user, public_id)
    changes: dict[str, Any] = {"title": request.POST.get("title", "").strip()[:200]}
    message = _("Saved.")
    if "archive" in request.POST:
        changes = {"archived_at": timezone.now()}
        message = _("{name} is archived; no new jobs start in it.").format(name=project.name)
    elif "restore" in request.POST:
        changes, message = {"archived_at": None}, _("{name} is no longer archived.").format(name=project.name)
    elif "egress_allow" in request.POST:
        changes = {"egress_allow": request.POST["egress_allow"].replace(",", "\n").splitlines()}
        message = _("Saved. Applies to jobs that start from now on.")
    with refusals_as_messages(request):
        projects.do_change_project(user, project, **changes)
        messages.success(request, message)
    return redirect("project", public_id)


@action(AccessPolicy.SIGNED_IN)
def save_idle(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    project = _project(user, public_id)
    idle = ProjectPolicyPanel(project)
    try:
        changed = idle.save(user, request.POST)
    except (InvalidRequest, PreconditionFailed) as error:
        idle.error = error.message
        return _page(request, user, project, error, idle=idle)
    if changed:
        messages.success(request, _("Saved. Applies from the next idle check on."))
    return redirect("project", public_id)


# -- internal --------------------------------------------------------------------------------------


def _list(
    request: HttpRequest,
    user: User,
    values: dict[str, str] | None = None,
    refusal: InvalidRequest | None = None,
) -> HttpResponse:
    all_rows = in_tree_order(list(visible_projects(user).order_by("name")))
    listed, search = paginate_tree(all_rows, request.GET)
    shown = [row.project for row in listed]
    live = live_job_counts(shown)
    count, managers = members_and_managers(shown)
    context = {
        "rows": [
            (row, live.get(row.project.pk, 0), count[row.project.pk], managers.get(row.project.pk, []))
            for row in listed
        ],
        "page": listed,
        "to": reverse("projects"),
        "search": search,
        "total": len(all_rows),
        "searchable": len(all_rows) > MIN_ROWS_FOR_SEARCH,
        "parents": [row.project for row in all_rows if row.project.archived_at is None],
        "may_add": user.is_admin,
    }
    return render_form(request, "projects/projects.html", context, values or {}, refusal)


def _project(user: User, public_id: str) -> Project:
    return find_row(visible_projects(user).select_related("parent"), public_id=public_id)


def _page(
    request: HttpRequest,
    user: User,
    project: Project,
    refusal: FairwayError | None = None,
    values: dict[str, str] | None = None,
    **shown: Any,
) -> HttpResponse:
    """Render the page; ``shown`` is a new invitation with its link, or refused idle settings."""
    manages = can(user, Permission.MANAGE, project)
    context = {
        "project": project,
        "members": project.memberships.select_related("user").order_by("user__username"),
        "idle": shown.pop("idle", None) or ProjectPolicyPanel(project),
        "quotas": Quota.objects.filter(project=project).select_related("pool").order_by("pool__name"),
        "invitations": open_invitations().filter(project=project) if manages else [],
        "manages": manages,
        "allowed": egress_allow_list(project),
        "may_list": user.is_admin,
        "listed": "\n".join(project.egress_allow),
        "may_submit": can(user, Permission.SUBMIT, project),
        "secrets": visible_secrets(user).filter(project=project).order_by("name"),
        "known": visible_users(user).filter(is_active=True).order_by("username")[:500] if manages else [],
        "roles": list(Role),
        "folders": list_usage(user).filter(project=project),
    }
    return render_form(request, "projects/project.html", context | shown, values or {}, refusal)
