"""REST: templates and their versions."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import visible_environments, visible_projects
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import (
    NameField,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import ID_OR_NAME, get_referenced_row
from portal.api.serializers.references import Reference, UserReference
from portal.domain.jobs.template_parameters import MAX_NUMBER, ParameterType, TemplateCategory, TemplateScope
from portal.domain.states import JobKind
from portal.models import Template as TemplateRow
from portal.models import User
from portal.selectors.jobs.job_templates import get_template, list_templates
from portal.services.accounts.tokens import Scope
from portal.services.jobs.job_templates import (
    MAX_DESCRIPTION_LENGTH,
    MAX_TITLE_LENGTH,
    TemplateInput,
    do_save_template,
)

_read = partial(operation, tag="templates", scope=Scope.READ)
_write = partial(operation, tag="templates", scope=Scope.JOBS)
_KINDS = [kind.value for kind in JobKind]


class TemplateParameter(ResponseSerializer):
    """A parameter of a template."""

    optional_fields = frozenset({"label", "help", "minimum", "maximum", "choices"})

    name = serializers.CharField()
    type = serializers.ChoiceField(list(ParameterType))
    default = serializers.JSONField()
    label = serializers.CharField(allow_blank=True)  # type: ignore[assignment]
    help = serializers.CharField(allow_blank=True)
    minimum = serializers.FloatField(allow_null=True)
    maximum = serializers.FloatField(allow_null=True)
    choices = serializers.ListField(child=serializers.CharField(allow_blank=True))


class TemplateVersion(ResponseSerializer):
    """The content of a version of a template."""

    version = serializers.IntegerField()
    kind = serializers.ChoiceField(_KINDS)
    environment = Reference(allow_null=True)
    fields = serializers.DictField(  # type: ignore[assignment]
        help_text="Fields of the job, with placeholders {name}."
    )
    parameters = TemplateParameter(many=True)
    sweep = serializers.DictField(help_text="Fields of a sweep and its parameters; empty: for one job.")


class StoredTemplateVersion(TemplateVersion):
    """A version with its author."""

    created_by = serializers.CharField(allow_blank=True, help_text="User name; blank: shipped.")
    created_at = serializers.DateTimeField()


class Template(Reference, TemplateVersion):
    """A saved request for jobs, with parameters."""

    title = serializers.CharField()
    description = serializers.CharField(allow_blank=True)
    category = serializers.ChoiceField(list(TemplateCategory))
    scope = serializers.ChoiceField(list(TemplateScope), help_text="Who sees it.")
    project = Reference(allow_null=True)
    owner = UserReference(allow_null=True, help_text="null: shipped with Fairway.")
    enabled = serializers.BooleanField()


@extend_schema_field({"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]})
class ParameterDefaultField(serializers.JSONField):
    """The default of a parameter; its type decides which values are valid."""


class TemplateParameterBody(StrictSerializer):
    """A parameter. Its placeholder is {name}."""

    name = StrictCharField(max_length=40, help_text="Lower-case letters, digits and _.")
    type = serializers.ChoiceField(list(ParameterType))
    default = ParameterDefaultField(help_text="Of the type.")
    label = StrictCharField(required=False, allow_blank=True, max_length=1000)  # type: ignore[assignment]
    help = StrictCharField(required=False, allow_blank=True, max_length=1000)
    minimum = serializers.FloatField(
        required=False, allow_null=True, min_value=-MAX_NUMBER, max_value=MAX_NUMBER
    )
    maximum = serializers.FloatField(
        required=False, allow_null=True, min_value=-MAX_NUMBER, max_value=MAX_NUMBER
    )
    choices = serializers.ListField(
        child=StrictCharField(allow_blank=True, max_length=1000), required=False, max_length=1000
    )


class TemplateBody(StrictSerializer):
    """A template."""

    name = NameField()
    title = StrictCharField(max_length=MAX_TITLE_LENGTH)
    description = StrictCharField(required=False, allow_blank=True, max_length=MAX_DESCRIPTION_LENGTH)
    category = serializers.ChoiceField(list(TemplateCategory), required=False)
    scope = serializers.ChoiceField(
        list(TemplateScope), required=False, help_text="Who sees it; only administrators share with everyone."
    )
    project = StrictCharField(required=False, allow_null=True, max_length=63, help_text=ID_OR_NAME)
    kind = serializers.ChoiceField(_KINDS, required=False)
    environment = StrictCharField(
        required=False, allow_null=True, max_length=63, help_text=f"{ID_OR_NAME} null: chosen at launch."
    )
    fields = serializers.DictField(  # type: ignore[assignment]
        required=False, child=serializers.JSONField(allow_null=True), help_text="Fields of the job by name."
    )
    parameters = TemplateParameterBody(many=True, required=False)
    sweep = serializers.DictField(required=False, child=serializers.JSONField(allow_null=True))
    enabled = StrictBooleanField(required=False)


class TemplateChangeBody(TemplateBody):
    """Changes of a template; fields that are left out stay."""

    version = serializers.IntegerField(
        required=False, min_value=1, help_text="Refused with 409 if the template has another version."
    )


def _input(user: User, given: dict[str, Any], row: TemplateRow | None) -> TemplateInput:
    """Return the service's input: the body over the present values."""
    start = {name: getattr(row, name) for name in TemplateInput.__dataclass_fields__} if row else {}
    values = {name: value for name, value in given.items() if name != "version"}
    for name, rows in (("project", visible_projects(user)), ("environment", visible_environments(user))):
        if values.get(name):
            values[name] = get_referenced_row(rows, values[name], name)
    return TemplateInput(**start | values)


class TemplatesView(SignedInView):
    @_read("templates_list", "List templates", response=[Template])
    def get(self, request: Request) -> HttpResponse:
        """The templates that you may use now, by name."""
        return self.paginated_response(list_templates(self.user), Template.represent, Order("name"))

    @_write(
        "templates_create",
        "Create a template",
        body=TemplateBody,
        response=Template,
        status=201,
        idempotent=True,
        detail="By default only you see it (docs/templates.md).",
    )
    def post(self, request: Request) -> HttpResponse:

        def work() -> dict[str, Any]:
            row = do_save_template(self.user, _input(self.user, self.body, None))
            return Template.represent(get_template(self.user, row.public_id))

        return self.idempotent_response(work)


class TemplateView(SignedInView):
    @_read("templates_get", "Get a template", response=Template)
    def get(self, request: Request, template: str) -> HttpResponse:
        """A template by id or name."""
        return self.json_response(Template.represent(get_template(self.user, template)))

    @_write(
        "templates_change",
        "Change a template",
        body=TemplateChangeBody,
        partial=True,
        response=Template,
        error_statuses=[409],
        detail="A change of kind, environment, fields, parameters or sweep is a new version.",
    )
    def patch(self, request: Request, template: str) -> HttpResponse:
        row = get_template(self.user, template)
        version = self.body.get("version")
        do_save_template(self.user, _input(self.user, self.body, row), row, version=version)
        return self.json_response(Template.represent(get_template(self.user, row.public_id)))


class TemplateVersionsView(SignedInView):
    @_read("templates_versions", "List the versions of a template", response=[StoredTemplateVersion])
    def get(self, request: Request, template: str) -> HttpResponse:
        rows = get_template(self.user, template).versions.select_related("environment")
        return self.paginated_response(rows, StoredTemplateVersion.represent)


ROUTES = [
    path("templates/", TemplatesView.as_view()),
    path("templates/<slug:template>/", TemplateView.as_view()),
    path("templates/<slug:template>/versions/", TemplateVersionsView.as_view()),
]
