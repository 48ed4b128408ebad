"""The gallery of templates, and the page on which people make and change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy

from portal.access import AccessPolicy, Permission, can, visible_environments
from portal.domain.jobs.template_parameters import (
    NOT_IN_TEMPLATES,
    TemplateCategory,
    TemplateScope,
    fill_fields,
    placeholders,
    read_template_parameters,
)
from portal.domain.states import JobKind
from portal.errors import FairwayError, NotFound
from portal.hidden_fields import private_fields
from portal.models import Environment, Project, Template, User
from portal.selectors.cluster import cluster_overview
from portal.selectors.cluster.cluster_overview import GpuModelSummary, matching_summaries
from portal.selectors.jobs.job_templates import gallery_templates, get_template
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.pipeline_plans import get_plan
from portal.services.jobs.job_document import request_body
from portal.services.jobs.job_templates import CONTENT, TemplateInput, do_save_template
from portal.services.jobs.submission import request_from_job
from portal.services.yaml_input import MAX_BYTES, dump_yaml, load_yaml
from portal.web.display.formatting import parse_whole_number
from portal.web.form_fields import add_service_errors, select_input, text_area, text_input
from portal.web.jobs.launch.form import PublicIdChoiceField, launchable_projects, parameter_field_name
from portal.web.jobs.launch.initial_values import plan_fields
from portal.web.jobs.launch.spec_fields import build_field
from portal.web.views import form_page, page

PAGE_SIZE = 24
OWNERS = {
    "": gettext_lazy("All"),
    "shipped": gettext_lazy("Shipped"),
    "project": gettext_lazy("Project"),
    "mine": gettext_lazy("Mine"),
}
CATEGORIES = {
    "": gettext_lazy("All"),
    TemplateCategory.VISION.value: gettext_lazy("Vision"),
    TemplateCategory.LANGUAGE.value: gettext_lazy("Language"),
    TemplateCategory.SEARCH.value: pgettext_lazy("category of templates", "Search"),
    TemplateCategory.ROBOTICS.value: gettext_lazy("Robotics"),
    TemplateCategory.TABULAR.value: gettext_lazy("Tabular"),
    TemplateCategory.DEPLOY.value: pgettext_lazy("category of templates", "Deploy"),
    TemplateCategory.OTHER.value: gettext_lazy("Other"),
}
NOT_FROM_JOBS = frozenset({"name", "project", "environment", "pool", "dependencies", "volumes", "secrets"})
SCOPE_LABELS = {
    TemplateScope.SELF.value: gettext_lazy("Only me"),
    TemplateScope.PROJECT.value: gettext_lazy("A project"),
    TemplateScope.EVERYONE.value: gettext_lazy("Everyone"),
}


@page(AccessPolicy.SIGNED_IN)
def templates(request: HttpRequest, user: User) -> HttpResponse:
    """The gallery; ``template`` names the one whose parameters are shown."""
    query = request.GET
    rows = gallery_templates(user)
    owner = query["owner"] if query.get("owner") in OWNERS else ""
    category = query["category"] if query.get("category") in set(TemplateCategory) else ""
    if text := query.get("q", "").strip()[:100]:
        names = Q(name__icontains=text) | Q(title__icontains=text) | Q(description__icontains=text)
        rows = rows.filter(names | Q(fields__launcher=text) | Q(parameters__contains=[{"name": text}]))
    counts = _filter_counts(rows, user)
    if owner:
        mine = {"shipped": Q(owner=None), "project": Q(project__isnull=False), "mine": Q(owner=user)}
        rows = rows.filter(mine[owner])
    if category:
        rows = rows.filter(category=category)
    paginator = Paginator(rows, PAGE_SIZE)
    paginator.count = counts[owner, category]
    shown = paginator.get_page(query.get("page"))
    strips = cluster_overview.free_capacity(user)
    chosen = get_template(user, query["template"]) if query.get("template") else None
    context: dict[str, Any] = {
        "rows": [_card(row, strips) for row in shown.object_list],
        "page": shown,
        "owners": [(key, label, counts[key, category]) for key, label in OWNERS.items()],
        "owner": owner,
        "categories": [
            (key, label, counts[owner, key])
            for key, label in CATEGORIES.items()
            if counts[owner, key] or not key
        ],
        "category": category,
        "search": text,
        "chosen": chosen,
        "form": _parameter_form(chosen) if chosen else None,
        "may_change": chosen is not None and can(user, Permission.CHANGE, chosen),
    }
    return render(request, "jobs/job_templates/page.html", context)


def _filter_counts(rows: QuerySet[Template], user: User) -> Counter[tuple[str, str]]:
    """Return the number of templates for each owner and category; blank: of all."""
    counts: Counter[tuple[str, str]] = Counter()
    for category, owner, project in rows.order_by().values_list("category", "owner", "project"):
        fits = {"": True, "shipped": owner is None, "project": project is not None, "mine": owner == user.pk}
        counts.update((key, each) for key, does_fit in fits.items() if does_fit for each in ("", category))
    return counts


def _card(row: Template, strips: list[GpuModelSummary]) -> dict[str, Any]:
    """Return a template with its size at the defaults, and whether so many GPUs are free now."""
    defaults = {each.name: each.default for each in read_template_parameters(row.parameters)}
    fields = fill_fields(row.fields, defaults)
    per_task = fields.get("gpus_per_task", 1)
    tasks = fields.get("min_tasks") or fields.get("tasks", 1)
    gpus = per_task * tasks
    if roles := fields.get("roles"):
        gpus = sum(each.get("tasks", 1) * each.get("gpus_per_task", per_task) for each in roles)
    fitting = matching_summaries(strips, fields.get("gpu_model", ""), fields.get("mig_profile", ""))
    free = any(strip.largest_free >= per_task and strip.free >= gpus for strip in fitting)
    return {
        "template": row,
        "category": CATEGORIES[row.category],
        "launcher": "" if fields.get("launcher", "none") == "none" else fields["launcher"],
        "gpus": gpus,
        "is_free": free,
        "parameter_count": len(row.parameters),
    }


def _parameter_form(row: Template) -> forms.Form:
    form = forms.Form(label_suffix="")
    declared = read_template_parameters(row.parameters)
    form.fields = {parameter_field_name(each.name): build_field(each.rule) for each in declared}
    return form


class TemplateForm(forms.Form):
    """A template as its author writes it; fields, parameters and sweep are YAML."""

    title = forms.CharField(label=gettext_lazy("Title"), max_length=200, widget=text_input())
    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=63,
        widget=text_input(),
        help_text=gettext_lazy("Lower-case letters, digits and hyphens; for scripts."),
    )
    description = forms.CharField(
        label=gettext_lazy("Description"), max_length=5000, required=False, widget=text_area(2)
    )
    category = forms.ChoiceField(
        label=gettext_lazy("Category"),
        choices=[(key, label) for key, label in CATEGORIES.items() if key],
        widget=select_input(),
    )
    kind = forms.ChoiceField(
        label=gettext_lazy("Kind"),
        choices=[
            (JobKind.TRAINING.value, gettext_lazy("Job")),
            (JobKind.WORKSPACE.value, gettext_lazy("Notebook")),
        ],
        widget=select_input(),
    )
    environment = PublicIdChoiceField(
        label=gettext_lazy("Environment"),
        queryset=Environment.objects.none(),
        required=False,
        empty_label=gettext_lazy("Chosen at launch"),
        widget=select_input(),
    )
    scope = forms.ChoiceField(label=gettext_lazy("Who sees it"), widget=select_input())
    project = PublicIdChoiceField(
        label=gettext_lazy("Project"),
        queryset=Project.objects.none(),
        required=False,
        empty_label=gettext_lazy("None"),
        widget=select_input(),
        help_text=gettext_lazy("With which it is shared."),
    )
    fields_yaml = forms.CharField(
        label=gettext_lazy("Job fields"), max_length=MAX_BYTES, widget=text_area(18, spellcheck="false"),
        help_text=gettext_lazy("As in the body of a job (REST), with {name} for parameters."),
    )  # fmt: skip
    parameters_yaml = forms.CharField(
        label=gettext_lazy("Parameters"),
        max_length=MAX_BYTES,
        required=False,
        widget=text_area(14, spellcheck="false"),
        help_text=gettext_lazy(
            "A list; each has name, type (integer, number, text, choice, boolean) and default, and may have "
            "label, help, minimum, maximum and choices."
        ),
    )
    sweep_yaml = forms.CharField(
        label=gettext_lazy("Sweep"), max_length=MAX_BYTES, required=False, widget=text_area(4, spellcheck="false"),
        help_text=gettext_lazy("searcher, metric, max_trials and so on, with parameters; blank: for one job."),
    )  # fmt: skip
    enabled = forms.BooleanField(
        label=gettext_lazy("Offered in the gallery"),
        required=False,
        widget=forms.CheckboxInput({"class": "form-check-input"}),
    )
    version = forms.IntegerField(required=False, widget=forms.HiddenInput)

    def __init__(
        self, user: User, row: Template | None, data: QueryDict | None = None, **options: Any
    ) -> None:
        super().__init__(data, label_suffix="", **options)
        allowed = {TemplateScope.PROJECT}
        if row is None or row.owner_id == user.pk:
            allowed.add(TemplateScope.SELF)  # others do not make a template private
        if user.is_admin:
            allowed.add(TemplateScope.EVERYONE)
        scopes = [
            each for each in TemplateScope if each in allowed or (row is not None and each == row.scope)
        ]
        self.fields["scope"].choices = [(each.value, SCOPE_LABELS[each]) for each in scopes]  # type: ignore[attr-defined]
        self.fields["environment"].queryset = visible_environments(user).order_by("title")  # type: ignore[attr-defined]
        self.fields["project"].queryset = launchable_projects(user)  # type: ignore[attr-defined]

    def to_input(self) -> TemplateInput:
        """Return the service's input. Raise InvalidRequest for YAML that cannot be read."""
        data = {
            name: value
            for name, value in self.cleaned_data.items()
            if name in TemplateInput.__dataclass_fields__
        }
        content = {
            "fields": load_yaml(self.cleaned_data["fields_yaml"], "fields_yaml"),
            "parameters": load_yaml(self.cleaned_data["parameters_yaml"], "parameters_yaml") or [],
            "sweep": load_yaml(self.cleaned_data["sweep_yaml"], "sweep_yaml") or {},
        }
        return TemplateInput(**data, **content)


@form_page(AccessPolicy.SIGNED_IN)
def new_template(request: HttpRequest, user: User) -> HttpResponse:
    """Make a template, from a job if ``job`` names one, or from a division of a ``plan``."""
    initial: dict[str, Any] = {
        "kind": JobKind.TRAINING.value,
        "scope": TemplateScope.SELF.value,
        "enabled": True,
    }
    initial["fields_yaml"] = _as_yaml(
        {"command": ["python", "train.py", "--epochs", "{epochs}"], "gpus_per_task": 1}
    )
    initial["parameters_yaml"] = _as_yaml(
        [{"name": "epochs", "type": "integer", "default": 10, "minimum": 1}]
    )
    if request.GET.get("job"):
        initial |= _initial_from_job(user, request.GET["job"])
    elif request.GET.get("plan"):
        initial |= _initial_from_plan(user, request.GET)
    return _edit(request, user, None, initial)


@form_page(AccessPolicy.SIGNED_IN)
def edit_template(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Change a template; ``version`` opens the content of an earlier version."""
    row = get_template(user, public_id)
    initial = {name: getattr(row, name) for name in TemplateForm.base_fields if hasattr(row, name)}
    number = parse_whole_number(request.GET.get("version", ""))
    content = row.versions.filter(version=number or 0).first() or row
    initial |= {name: getattr(content, name) for name in ("kind", "environment")}
    for name in ("environment", "project"):
        initial[name] = initial[name].public_id if initial[name] else ""
    initial |= {
        f"{name}_yaml": _as_yaml(getattr(content, name)) for name in ("fields", "parameters", "sweep")
    }
    return _edit(request, user, row, initial)


def _edit(request: HttpRequest, user: User, row: Template | None, initial: dict[str, Any]) -> HttpResponse:
    posted = request.POST if request.method == "POST" else None
    form = TemplateForm(user, row, posted, initial=initial)
    if form.is_valid():
        try:
            saved = do_save_template(user, form.to_input(), row, version=form.cleaned_data["version"])
        except FairwayError as error:
            fields = getattr(error, "fields", {})
            for name in CONTENT:
                if name in fields and f"{name}_yaml" in form.fields:
                    fields[f"{name}_yaml"] = fields.pop(name)
            add_service_errors(form, error)
        else:
            messages.success(
                request,
                _("{title} is saved as version {version}.").format(title=saved.title, version=saved.version),
            )
            return redirect(f"{reverse('templates')}?template={saved.public_id}")
    context = {
        "form": form,
        "template": row,
        "may_change": row is None or can(user, Permission.CHANGE, row),
        "versions": row.versions.all()[:PAGE_SIZE] if row else [],
    }
    return render(request, "jobs/job_templates/edit.html", context, status=400 if posted is not None else 200)


def _initial_from_job(user: User, public_id: str) -> dict[str, Any]:
    """Return a job as initial values; variables only where the user may read them, volumes and secrets never."""
    job = get_job(user, public_id)
    body = request_body(request_from_job(job))
    if private_fields(user, job).env is None:
        body = {name: value for name, value in body.items() if name not in ("env", "rank_overrides")}
    skipped = NOT_FROM_JOBS | NOT_IN_TEMPLATES
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in body.items()
        if name not in skipped
    }
    return {
        "title": job.name,
        "kind": job.kind,
        "environment": job.environment.public_id,
    } | _initial_content(fields)


def _initial_from_plan(user: User, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the job that runs a plan as initial values, without the nodes that are free for it now."""
    plan = get_plan(user, query["plan"])
    fields = plan_fields(plan, query)
    if fields is None:
        raise NotFound(_("The plan has no such division."))
    name, profile = fields.pop("name"), plan.profile.name
    text = _("A plan of the profile {profile} for {nodes} × {gpus} GPUs.")
    return {
        "title": f"{name}, {profile}",
        "name": f"{name[:40]}-{plan.public_id.lower()}",
        "description": text.format(profile=profile, nodes=plan.nodes, gpus=plan.gpus_per_node)
        + (" " + _("It was computed for the pool {pool}.").format(pool=plan.pool.name) if plan.pool else ""),
    } | _initial_content(fields)


def _initial_content(fields: Mapping[str, Any]) -> dict[str, str]:
    hint = "# The command has braces: declare {name}, or write {{name}}.\n" if placeholders(fields) else ""
    return {"fields_yaml": _as_yaml(fields), "parameters_yaml": hint}


def _as_yaml(value: Any) -> str:
    return dump_yaml(value) if value else ""
