"""REST: the notebooks of a workspace, and the template that runs one as a batch job."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import EmptyBody, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_templates import Template
from portal.api.serializers.workspaces import get_workspace
from portal.domain.jobs.template_parameters import ParameterType
from portal.models import NotebookListing
from portal.selectors.jobs.job_templates import get_template
from portal.services.accounts.tokens import Scope
from portal.services.jobs.notebooks import (
    do_create_notebook_template,
    do_request_notebooks,
    get_listing,
)


class NotebookParameter(ResponseSerializer):
    """A parameter of a notebook, as the template declares it."""

    name = serializers.CharField()
    type = serializers.ChoiceField(list(ParameterType))
    default = serializers.JSONField(help_text="Of the type.")
    label = serializers.CharField(help_text="Its name in the notebook.")  # type: ignore[assignment]


class Notebook(ResponseSerializer):
    """A notebook of the home."""

    path = serializers.CharField(help_text="Below the home.")
    size_bytes = serializers.IntegerField()
    modified_at = serializers.DateTimeField()
    parameters = NotebookParameter(many=True)
    fixed = serializers.ListField(
        child=serializers.CharField(), help_text="Parameters that a template cannot hold."
    )
    problem = serializers.CharField(allow_blank=True, help_text="Why its parameters are unknown.")


class NotebookList(ResponseSerializer):
    """The latest listing of the notebooks of a workspace, newest first."""

    requested_at = serializers.DateTimeField(allow_null=True, help_text="null: never.")
    listed_at = serializers.DateTimeField(allow_null=True, help_text="null: its node has not answered yet.")
    problem = serializers.CharField(allow_blank=True, help_text="Why some may be missing.")
    notebooks = Notebook(many=True)


class NotebookBody(StrictSerializer):
    """A notebook of the last listing."""

    path = StrictCharField(max_length=400)


def represent_listing(row: NotebookListing | None) -> dict[str, Any]:
    if row is None:
        return NotebookList.compose(requested_at=None, listed_at=None, problem="", notebooks=[])
    notebooks = []
    for each in row.notebooks:
        known = {name: value for name, value in each.items() if name != "modified_s"}
        modified_at = dt.datetime.fromtimestamp(each["modified_s"], dt.UTC)
        notebooks.append(Notebook.compose(**known, modified_at=modified_at))
    return NotebookList.compose(
        requested_at=row.requested_at, listed_at=row.listed_at, problem=row.problem, notebooks=notebooks
    )


_operation = partial(operation, tag="workspaces", response=NotebookList)


class NotebooksView(SignedInView):
    @_operation("workspaces_notebooks", "Get the latest listing of notebooks", scope=Scope.READ)
    def get(self, request: Request, workspace: str) -> HttpResponse:
        row = get_listing(self.user, get_workspace(self.user, workspace))
        return self.json_response(represent_listing(row))

    @_operation(
        "workspaces_list_notebooks",
        "List the notebooks of a workspace",
        scope=Scope.WORKSPACES,
        body=EmptyBody,
        status=202,
        idempotent=True,
        error_statuses=[409],
        detail="Its node lists the files of the home that end with .ipynb; `listed_at` is set when it has answered. "
        "Only for the owner of the workspace.",
    )
    def post(self, request: Request, workspace: str) -> HttpResponse:
        """The listing, which has no answer yet."""
        row = get_workspace(self.user, workspace)
        return self.idempotent_response(lambda: represent_listing(do_request_notebooks(self.user, row)), 202)


ROUTES = [
    path("workspaces/<slug:workspace>/notebooks/", NotebooksView.as_view()),
    action_route(
        "workspaces/<slug:workspace>/",
        get_workspace,
        "notebook-template",
        "workspaces_notebook_template",
        "Save a notebook as the template of a batch job",
        "Your template has the environment, volumes, secrets and amounts of the workspace, and the parameters "
        "of the notebook; a second call saves a new version if something changed. Submit it with `template` and "
        "`parameters`.",
        do_create_notebook_template,
        represent=lambda user, _job, row: Template.represent(get_template(user, row.public_id)),
        response=Template,
        base=SignedInView,
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=NotebookBody,
        status=201,
    ),
]
