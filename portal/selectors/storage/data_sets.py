"""Reads data sets and their versions."""

from __future__ import annotations

from django.db.models import Exists, OuterRef, Prefetch, Q, QuerySet
from django.utils.translation import gettext as _

from portal.access import Requester, visible_data_set_versions, visible_data_sets
from portal.models import DataSet, DataSetVersion
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
