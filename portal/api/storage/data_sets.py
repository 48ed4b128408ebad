"""REST: data sets and their versions."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import visible_projects
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import NameField, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.jobs.job_requests import ID_OR_NAME, get_referenced_row
from portal.api.serializers.references import Reference, UserReference
from portal.domain.storage.data_sets import (
    MAX_DESCRIPTION_LENGTH,
    MAX_LABEL_LENGTH,
    MAX_NOTE_LENGTH,
    MAX_PATH_LENGTH,
    DataSetVisibility,
    container_path,
    variable_name,
)
from portal.models import DataSet as DataSetRow
from portal.models import DataSetVersion as VersionRow
from portal.models import User
from portal.selectors.storage.data_sets import get_data_set, get_version, list_data_sets
from portal.services.accounts.tokens import Scope
from portal.services.storage.data_sets import (
    VersionInput,
    do_add_version,
    do_change_data_set,
    do_create_data_set,
    do_delete_data_set,
    do_delete_version,
    do_measure_version,
)

_read = partial(operation, tag="data-sets", scope=Scope.READ)
_write = partial(operation, tag="data-sets", scope=Scope.JOBS)


class DataSetVersion(ResponseSerializer):
    """A version of a data set: a directory or file of a volume."""

    id = serializers.CharField(source="public_id")
    label = serializers.CharField()  # type: ignore[assignment]
    volume = serializers.CharField(source="volume.name", help_text="Name by which jobs request it.")
    path = serializers.CharField(allow_blank=True, help_text="Below the volume; blank: all of it.")
    container_path = serializers.CharField(help_text="Path in a job with the default mount path.")
    note = serializers.CharField(allow_blank=True)
    created_by = UserReference()
    created_at = serializers.DateTimeField()
    size_bytes = serializers.IntegerField(allow_null=True, help_text="null: not measured.")
    file_count = serializers.IntegerField(allow_null=True)
    measured_at = serializers.DateTimeField(allow_null=True)
    measuring = serializers.BooleanField(help_text="A node measures it now.")
    measure_problem = serializers.CharField(
        allow_blank=True, help_text="Why it could not be measured the last time; blank: it could."
    )

    @staticmethod
    def get_container_path(row: VersionRow, context: Any) -> str:
        return container_path(row.volume.name, row.path)

    @staticmethod
    def get_measuring(row: VersionRow, context: Any) -> bool:
        return row.measure_requested_at is not None


class DataSet(Reference):
    """A data set. Its first version is the newest and the default."""

    project = Reference()
    description = serializers.CharField(allow_blank=True)
    visibility = serializers.ChoiceField(
        list(DataSetVisibility),
        help_text="everyone: all users with a project that may use the volume of a version.",
    )
    variable = serializers.CharField(help_text="Variable that the launch page sets to its path.")
    created_by = UserReference()
    created_at = serializers.DateTimeField()
    versions = DataSetVersion(many=True, help_text="Newest first.")

    @staticmethod
    def get_variable(row: DataSetRow, context: Any) -> str:
        return variable_name(row.name)


class DataSetsQuery(ListQuery):
    """Filters of the list of data sets."""

    search = StrictCharField(
        required=False,
        max_length=100,
        help_text="Words, each in the name, description, project, volume or version.",
    )


class DataSetChangeBody(StrictSerializer):
    """Changes of a data set; fields that are left out stay."""

    description = StrictCharField(required=False, allow_blank=True, max_length=MAX_DESCRIPTION_LENGTH)
    visibility = serializers.ChoiceField(list(DataSetVisibility), required=False)


class DataSetBody(DataSetChangeBody):
    """A new data set."""

    name = NameField()
    project = StrictCharField(max_length=63, help_text=ID_OR_NAME)


class DataSetVersionBody(StrictSerializer):
    """A new version of a data set."""

    label = StrictCharField(max_length=MAX_LABEL_LENGTH, help_text="Letters, digits and . _ + -")  # type: ignore[assignment]
    volume = StrictCharField(max_length=63, help_text="Name of a declared volume, not a home or scratch.")
    path = StrictCharField(
        required=False,
        allow_blank=True,
        max_length=MAX_PATH_LENGTH,
        help_text="Relative path below the volume; blank: all of it.",
    )
    note = StrictCharField(required=False, allow_blank=True, max_length=MAX_NOTE_LENGTH)


def _represent(user: User, row: DataSetRow) -> dict[str, Any]:
    return DataSet.represent(get_data_set(user, row.public_id))


def _represent_version(user: User, _: Any, row: VersionRow) -> dict[str, Any]:
    return DataSetVersion.represent(get_version(user, row.public_id))


def _add_version(user: User, row: DataSetRow, **given: str) -> VersionRow:
    return do_add_version(user, row, VersionInput(**given))


class DataSetsView(SignedInView):
    @_read("data_sets_list", "List data sets", query=DataSetsQuery, response=[DataSet])
    def get(self, request: Request) -> HttpResponse:
        rows = list_data_sets(self.user, self.query.get("search", ""))
        return self.paginated_response(rows, DataSet.represent, Order("name"))

    @_write(
        "data_sets_create",
        "Create a data set",
        body=DataSetBody,
        response=DataSet,
        status=201,
        idempotent=True,
        error_statuses=[409],
        detail="For users who may submit jobs to its project. Add a version to it.",
    )
    def post(self, request: Request) -> HttpResponse:
        def work() -> dict[str, Any]:
            project = get_referenced_row(visible_projects(self.user), self.body["project"], "project")
            given = {name: value for name, value in self.body.items() if name != "project"}
            return _represent(self.user, do_create_data_set(self.user, project, **given))

        return self.idempotent_response(work)


class DataSetView(SignedInView):
    @_read("data_sets_get", "Get a data set", response=DataSet)
    def get(self, request: Request, data_set: str) -> HttpResponse:
        return self.json_response(DataSet.represent(get_data_set(self.user, data_set)))

    @_write(
        "data_sets_change",
        "Change a data set",
        body=DataSetChangeBody,
        partial=True,
        response=DataSet,
        detail="Its name and versions do not change.",
    )
    def patch(self, request: Request, data_set: str) -> HttpResponse:
        row = do_change_data_set(self.user, get_data_set(self.user, data_set), **self.body)
        return self.json_response(_represent(self.user, row))

    @_write(
        "data_sets_delete",
        "Delete a data set",
        response=None,
        status=204,
        detail="With its versions, by managers of its project. Files and jobs stay.",
    )
    def delete(self, request: Request, data_set: str) -> HttpResponse:
        do_delete_data_set(self.user, get_data_set(self.user, data_set))
        return self.no_content()


class DataSetVersionView(SignedInView):
    @_read("data_set_versions_get", "Get a version of a data set", response=DataSetVersion)
    def get(self, request: Request, version: str) -> HttpResponse:
        return self.json_response(DataSetVersion.represent(get_version(self.user, version)))

    @_write(
        "data_set_versions_delete",
        "Delete a version of a data set",
        response=None,
        status=204,
        detail="By managers of its project. Files and jobs stay.",
    )
    def delete(self, request: Request, version: str) -> HttpResponse:
        do_delete_version(self.user, get_version(self.user, version))
        return self.no_content()


_version_action = partial(
    action_route,
    represent=_represent_version,
    response=DataSetVersion,
    base=SignedInView,
    tag="data-sets",
    scope=Scope.JOBS,
)

ROUTES = [
    path("data-sets/", DataSetsView.as_view()),
    path("data-sets/<slug:data_set>/", DataSetView.as_view()),
    _version_action(
        "data-sets/<slug:data_set>/",
        get_data_set,
        "versions",
        "data_set_versions_create",
        "Add a version to a data set",
        "It becomes the default, and a node with the volume measures its size.",
        _add_version,
        body=DataSetVersionBody,
        status=201,
        error_statuses=[409],
    ),
    path("data-set-versions/<slug:version>/", DataSetVersionView.as_view()),
    _version_action(
        "data-set-versions/<slug:version>/",
        get_version,
        "measure",
        "data_set_versions_measure",
        "Measure a version of a data set again",
        "A node with the volume counts its regular files; `measuring` is true until it has ended.",
        do_measure_version,
    ),
]
