"""Pages of data sets: the catalogue, one data set with its versions, and changes."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.access import AccessPolicy, Permission, can, require_permission
from portal.domain.storage.data_sets import (
    MAX_DESCRIPTION_LENGTH,
    MAX_LABEL_LENGTH,
    MAX_NOTE_LENGTH,
    MAX_PATH_LENGTH,
    DataSetVisibility,
    variable_name,
)
from portal.errors import FairwayError
from portal.models import DataSet, Project, User
from portal.models.public_id import MAX_NAME_LENGTH
from portal.selectors.storage.data_sets import get_data_set, get_version, list_data_sets
from portal.services.storage.data_sets import (
    VersionInput,
    data_volumes,
    do_add_version,
    do_change_data_set,
    do_create_data_set,
    do_delete_data_set,
    do_delete_version,
    do_measure_version,
)
from portal.web.form_fields import add_service_errors, select_input, text_area, text_input
from portal.web.jobs.launch.form import PublicIdChoiceField, launchable_projects
from portal.web.views import action, form_page, page, refusals_as_messages, render_live

PAGE_SIZE = 20
MAX_LISTED_VERSIONS = 3
"""Versions of each data set in the list; its page has all."""


class DataSetForm(forms.Form):
    """The fields of a data set that can change."""

    description = forms.CharField(
        label=gettext_lazy("Description"),
        max_length=MAX_DESCRIPTION_LENGTH,
        required=False,
        widget=text_area(3),
    )
    visibility = forms.ChoiceField(
        label=gettext_lazy("Who sees it"),
        choices=[
            (DataSetVisibility.PROJECT.value, gettext_lazy("Its project")),
            (DataSetVisibility.EVERYONE.value, gettext_lazy("Everyone who may use the volume")),
        ],
        widget=select_input(),
    )

    def __init__(self, data: QueryDict | None = None, **options: Any) -> None:
        super().__init__(data, label_suffix="", **options)


class NewDataSetForm(DataSetForm):
    """A new data set."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=MAX_NAME_LENGTH,
        widget=text_input(),
        help_text=gettext_lazy("Lower-case letters, digits and hyphens. It cannot be changed."),
    )
    project = PublicIdChoiceField(
        label=gettext_lazy("Project"),
        queryset=Project.objects.none(),
        widget=select_input(),
        empty_label=None,
    )
    field_order = ("name", "project", "description", "visibility")

    def __init__(self, user: User, data: QueryDict | None) -> None:
        super().__init__(data)
        self.fields["project"].queryset = launchable_projects(user)  # type: ignore[attr-defined]


class VersionForm(forms.Form):
    """A new version of a data set."""

    label = forms.CharField(
        label=gettext_lazy("Version"),
        max_length=MAX_LABEL_LENGTH,
        widget=text_input(placeholder="2027-03"),
        help_text=gettext_lazy("Letters, digits and . _ + -"),
    )
    volume = forms.CharField(label=gettext_lazy("Volume"), widget=select_input())
    path = forms.CharField(
        label=gettext_lazy("Path"),
        max_length=MAX_PATH_LENGTH,
        required=False,
        widget=text_input(spellcheck="false"),
        help_text=gettext_lazy("Directory or file below the volume. Empty: all of the volume."),
    )
    note = forms.CharField(
        label=gettext_lazy("Note"), max_length=MAX_NOTE_LENGTH, required=False, widget=text_area(2)
    )

    def __init__(self, project: Project, data: QueryDict | None = None) -> None:
        super().__init__(data, label_suffix="")
        names = [(row.name, row.name) for row in data_volumes(project)]
        self.fields["volume"].widget.choices = names


@page(AccessPolicy.SIGNED_IN)
def data_sets(request: HttpRequest, user: User) -> HttpResponse:
    text = request.GET.get("q", "").replace("\0", "").strip()[:100]
    shown = Paginator(list_data_sets(user, text), PAGE_SIZE).get_page(request.GET.get("page"))
    rows = []
    for row in shown.object_list:
        versions = list(row.versions.all())
        rows.append(
            {
                "data_set": row,
                "versions": versions[:MAX_LISTED_VERSIONS],
                "more": max(0, len(versions) - MAX_LISTED_VERSIONS),
            }
        )
    context = {
        "rows": rows,
        "page": shown,
        "search": text,
        "may_create": launchable_projects(user).exists(),
    }
    return render(request, "storage/data_sets/list.html", context)


@form_page(AccessPolicy.SIGNED_IN)
def new_data_set(request: HttpRequest, user: User) -> HttpResponse:
    form = NewDataSetForm(user, request.POST if request.method == "POST" else None)
    if form.is_valid():
        try:
            row = do_create_data_set(user, **form.cleaned_data)
        except FairwayError as error:
            add_service_errors(form, error)
        else:
            messages.success(request, _("{name} is created. Add its first version.").format(name=row.name))
            return redirect("data-set", row.public_id)
    return render(request, "storage/data_sets/new.html", {"form": form}, status=400 if form.is_bound else 200)


@page(AccessPolicy.SIGNED_IN)
def data_set(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    return _render_data_set(request, user, get_data_set(user, public_id))


def _render_data_set(
    request: HttpRequest,
    user: User,
    row: DataSet,
    *,
    form: DataSetForm | None = None,
    version_form: VersionForm | None = None,
) -> HttpResponse:
    versions = list(row.versions.all())
    may_change = can(user, Permission.CHANGE, row)
    context = {
        "data_set": row,
        "versions": versions,
        "variable": variable_name(row.name),
        "measuring": any(version.measure_requested_at for version in versions),
        "may_change": may_change,
        "may_delete": can(user, Permission.MANAGE, row),
    }
    if may_change and not request.headers.get("HX-Request"):
        initial = {"description": row.description, "visibility": row.visibility}
        context["form"] = form or DataSetForm(initial=initial)
        context["version_form"] = version_form or VersionForm(row.project)
    status = 400 if form or version_form else 200
    return render_live(
        request, "storage/data_sets/page.html", "storage/data_sets/versions.html", context, status
    )


@action(AccessPolicy.SIGNED_IN)
def change_data_set(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_data_set(user, public_id)
    require_permission(user, Permission.CHANGE, row)
    form = DataSetForm(request.POST)
    if form.is_valid():
        try:
            do_change_data_set(user, row, **form.cleaned_data)
        except FairwayError as error:
            add_service_errors(form, error)
        else:
            messages.success(request, _("{name} is changed.").format(name=row.name))
            return redirect("data-set", public_id)
    return _render_data_set(request, user, row, form=form)


@action(AccessPolicy.SIGNED_IN)
def add_version(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_data_set(user, public_id)
    require_permission(user, Permission.CHANGE, row)
    form = VersionForm(row.project, request.POST)
    if form.is_valid():
        try:
            do_add_version(user, row, VersionInput(**form.cleaned_data))
        except FairwayError as error:
            add_service_errors(form, error)
        else:
            label = form.cleaned_data["label"]
            messages.success(request, _("Version {label} is added.").format(label=label))
            return redirect("data-set", public_id)
    return _render_data_set(request, user, row, version_form=form)


@action(AccessPolicy.SIGNED_IN)
def measure_version(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    version = get_version(user, public_id)
    with refusals_as_messages(request):
        do_measure_version(user, version)
    return redirect("data-set", version.data_set.public_id)


@form_page(AccessPolicy.SIGNED_IN)
def delete_data_set(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Ask for a confirmation, then delete the data set."""
    row = get_data_set(user, public_id)
    require_permission(user, Permission.MANAGE, row)
    if request.method == "POST":
        do_delete_data_set(user, row)
        messages.success(request, _("{name} is deleted. Its files stay.").format(name=row.name))
        return redirect("data-sets")
    context = {
        "data_set": row,
        "title": _("Delete {name}").format(name=row.name),
        "back": reverse("data-set", args=[public_id]),
    }
    return render(request, "storage/data_sets/delete.html", context)


@form_page(AccessPolicy.SIGNED_IN)
def delete_version(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Ask for a confirmation, then delete the version."""
    version = get_version(user, public_id)
    row = version.data_set
    require_permission(user, Permission.MANAGE, row)
    if request.method == "POST":
        do_delete_version(user, version)
        messages.success(
            request, _("Version {label} is deleted. Its files stay.").format(label=version.label)
        )
        return redirect("data-set", row.public_id)
    context = {
        "data_set": row,
        "version": version,
        "is_newest": row.versions.order_by("-id").first() == version,
        "title": _("Delete version {label} of {name}").format(label=version.label, name=row.name),
        "back": reverse("data-set", args=[row.public_id]),
    }
    return render(request, "storage/data_sets/delete.html", context)
