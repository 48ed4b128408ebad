"""Reads data sets and their versions."""

from __future__ import annotations

from django.db.models import Exists, OuterRef, Prefetch, Q, QuerySet
from django.utils.translation import gettext as _

from portal.access import (
    Permission,
    Requester,
    can,
    project_ids,
    project_parents,
    require_user,
    visible_data_set_versions,
    visible_data_sets,
)
from portal.domain.project_tree import path_to_root
from portal.domain.states import Role
from portal.models import DataSet, DataSetVersion, Project, User
from portal.selectors.lookup import get_first


def list_data_sets(requester: Requester, search: str = "") -> QuerySet[DataSet]:
    """Return the visible data sets by name, with their visible versions, newest first.

    Each word of ``search`` is in the name, the description, the project, or the volume or label of a version.
    """
    versions = _versions(requester)
    rows = visible_data_sets(requester).select_related("project", "created_by")
    for word in search.split():
        in_version = versions.filter(data_set=OuterRef("pk")).filter(
            Q(label__icontains=word) | Q(volume__name__icontains=word)
        )
        of_set = Q(name__icontains=word) | Q(description__icontains=word) | Q(project__name__icontains=word)
        rows = rows.filter(of_set | Exists(in_version))
    return rows.prefetch_related(Prefetch("versions", versions)).order_by("name", "id")


def get_data_set(requester: Requester, public_id: str) -> DataSet:
    """Return the data set with its visible versions. Raise NotFound if the user may not see it."""
    rows = list_data_sets(requester).filter(public_id=public_id)
    return get_first(rows, _("There is no such data set."))


def get_version(requester: Requester, public_id: str) -> DataSetVersion:
    rows = _versions(requester).filter(public_id=public_id)
    return get_first(rows, _("There is no such version of a data set."))


def _versions(requester: Requester) -> QuerySet[DataSetVersion]:
    rows = visible_data_set_versions(requester)
    return rows.select_related("data_set__project", "volume", "created_by", "node").order_by("-id")


def launch_project(user: User, version: DataSetVersion) -> Project | None:
    """Return a project in which the user may submit a job with the version: its own, or the first by name."""
    if can(user, Permission.SUBMIT, version.data_set.project):
        return version.data_set.project
    rows = Project.objects.filter(archived_at__isnull=True)
    if not user.is_admin:
        rows = rows.filter(pk__in=project_ids(require_user(user), Role.MEMBER))
    allowed, parents = set(version.volume.projects.values_list("pk", flat=True)), project_parents()
    for project in rows.order_by("name"):
        if not allowed or allowed.intersection(path_to_root(project.pk, parents.get)):
            return project
    return None
