"""Change a waiting job in place: a form, a preview of the start, and the change."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, require_permission, visible_jobs
from portal.domain.formatting import format_gpu_models
from portal.domain.jobs.job_spec import JobSpec, job_fields
from portal.domain.states import LIVE_JOB_STATES, JobState
from portal.errors import Conflict, FairwayError, InvalidRequest, Unsatisfiable
from portal.models import Gpu, Job, NodePool, Project, User
from portal.selectors.jobs.jobs import get_job, visible_job_ids
from portal.selectors.nodes.gpu_states import COUNTED_GPU
from portal.selectors.nodes.resources_per_gpu import list_resources_per_gpu, typed_amounts_of_job
from portal.services.jobs.changes import (
    CHANGEABLE_FIELDS,
    WAITING_FIELDS,
    applicable_suggestion,
    build_changed_request,
    change_refusal,
    do_change_job,
    job_start_alternatives,
    parse_suggested_fields,
    preview_change,
)
from portal.services.jobs.start_alternatives import json_fields
from portal.web.display.job_rows import current_verdict
from portal.web.form_fields import add_service_errors, select_input
from portal.web.jobs.job.overview import job_page_context
from portal.web.jobs.launch.amounts import TYPED_FIELD, parse_typed, script_data, with_amounts
from portal.web.jobs.launch.form import GPU_FRACTIONS, LaunchForm, launchable_projects
from portal.web.jobs.launch.preview import (
    LaunchPreview,
    errors_by_form_field,
    preview_from_engine,
    preview_unsatisfiable,
)
from portal.web.jobs.launch.spec_fields import build_spec_fields, form_values, request_values
from portal.web.views import action, form_page, page, refusals_as_messages

MAX_DEPENDENCY_CHOICES = 20
LAUNCH_FIELDS = (
    "time_limit_s",
    "mig_profile",
    "milli_per_gpu",
    "pool",
    "project",
    "dependencies",
    TYPED_FIELD,
)
FIELD_ORDER = (
    "version", "priority", "time_limit_s", "project", "pool", "tasks", "min_tasks", "gpus_per_task", "milli_per_gpu",
    "gpu_model", "cores", "memory_gib", "shm_mib",
)  # fmt: skip
ROW_FIELDS = ("pool", "project", "dependencies")


class ChangeForm(forms.Form):
    """The fields of the launch form that can be changed now: all of ``CHANGEABLE_FIELDS`` but those refused."""

    version = forms.IntegerField(widget=forms.HiddenInput)

    def __init__(
        self, user: User, job: Job, data: Any = None, proposed: Mapping[str, Any] | None = None
    ) -> None:
        """``proposed``: values by API name that an unsubmitted form shows instead of the job's."""
        self.shares = list_resources_per_gpu(user)
        seen, present = visible_jobs(user), Job.objects.filter(dependents__job=job)
        named = visible_job_ids(user, [one.public_id for one in present])
        self.hidden_dependencies = [one for one in present if one.public_id not in named]
        initial = form_values(JobSpec, {name: getattr(job, name) for name in WAITING_FIELDS}) | {
            "version": job.version,
            "ignore_dependency_failure": job.ignore_dependency_failure,
            "pool": job.pool.public_id if job.pool else "",
            "project": job.project.public_id,
            "dependencies": [one.public_id for one in present],
        }
        initial |= form_values(JobSpec, proposed or {})
        initial |= {
            name: value or "" for name, value in (proposed or {}).items() if name in ("gpu_model", "pool")
        }
        typed = typed_amounts_of_job(job, self.shares)
        initial = with_amounts(
            initial, self.shares, typed, refresh=bool(proposed), fixed=(proposed or {}).keys()
        )
        super().__init__(data, initial=initial, label_suffix="")
        self.fields |= {name: copy.deepcopy(LaunchForm.base_fields[name]) for name in LAUNCH_FIELDS}
        self.fields |= build_spec_fields(JobSpec)
        older = seen.filter(owner=user, state__in=LIVE_JOB_STATES, pk__lt=job.pk).order_by("-pk")
        # As numbers: with both as subqueries PostgreSQL reads every job.
        chosen = {one.pk for one in present} | set(
            older.values_list("pk", flat=True)[:MAX_DEPENDENCY_CHOICES]
        )
        self.fields["dependencies"].queryset = seen.filter(pk__in=chosen)  # type: ignore[attr-defined]
        projects = launchable_projects(user) | Project.objects.filter(pk=job.project_id)
        self.fields["project"].queryset = projects  # type: ignore[attr-defined]
        self.fields["pool"].queryset = NodePool.objects.order_by("name")  # type: ignore[attr-defined]
        present_models = Gpu.objects.filter(COUNTED_GPU).order_by("model").values_list("model", flat=True)
        models = dict.fromkeys(
            [*present_models.distinct(), job.gpu_model, str(initial.get("gpu_model") or "")]
        )
        self.fields["gpu_model"] = forms.ChoiceField(
            label=_("GPU model"), required=False, widget=select_input(),
            choices=[("", _("Any")), *((each, format_gpu_models(each).strip()) for each in models if each)],
        )  # fmt: skip
        slices = Gpu.objects.filter(COUNTED_GPU).exclude(mig_profile="").order_by()
        profiles = sorted({*slices.values_list("mig_profile", flat=True).distinct(), job.mig_profile} - {""})
        self.fields["mig_profile"].choices = [("", _("Whole GPUs")), *((each, each) for each in profiles)]  # type: ignore[attr-defined]
        if job.milli_per_gpu not in dict(GPU_FRACTIONS):
            share = (
                job.milli_per_gpu,
                _("{milli_per_gpu:g} % of a GPU").format(milli_per_gpu=job.milli_per_gpu / 10),
            )
            self.fields["milli_per_gpu"].choices = [*GPU_FRACTIONS, share]  # type: ignore[attr-defined]
        if not profiles:
            del self.fields["mig_profile"]
        self.order_fields(FIELD_ORDER)
        names = {rule.form_name: name for name, rule in job_fields().items()}
        for name in list(self.fields):
            field = names.get(name, name)
            if name in ("version", TYPED_FIELD):
                continue
            if field not in CHANGEABLE_FIELDS or change_refusal(job, [field]):
                del self.fields[name]

    @property
    def changes(self) -> dict[str, Any]:
        """The values of a valid form, by name of ``CHANGEABLE_FIELDS``."""
        rows = {name: self.cleaned_data[name] for name in ROW_FIELDS if name in self.cleaned_data}
        if "dependencies" in rows:
            together = {*rows["dependencies"], *self.hidden_dependencies}
            rows["dependencies"] = tuple(sorted(together, key=lambda one: one.pk))
        return request_values(JobSpec, self.cleaned_data) | rows


@form_page(AccessPolicy.SIGNED_IN)
def change(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show the form; return the preview to htmx; save the change of a submitted form.

    With ``?suggested=1`` the form is filled with the change that the scheduler suggests.
    """
    job = get_job(user, public_id)
    require_permission(user, Permission.CONTROL, job)
    if refusal := change_refusal(job):
        messages.error(
            request,
            _("Not changed. {refusal}").format(refusal=refusal) if request.method == "POST" else refusal,
        )
        return redirect("job", public_id)
    posted = request.POST if request.method == "POST" else None
    proposed = applicable_suggestion(job, current_verdict(job)) if "suggested" in request.GET else {}
    form, status = ChangeForm(user, job, posted, proposed), 200
    if request.headers.get("HX-Request"):
        context = {"job": job, "check": _preview(user, job, form), "verdict": current_verdict(job)}
        return render(request, "jobs/job/change_preview.html", context)
    if posted is not None:
        if form.is_valid() and _save(request, user, job, form):
            return redirect("job", public_id)
        status = 400
    context = job_page_context(user, job) | {"form": form, "verdict": current_verdict(job), "tab": "change"}
    context["amounts"] = script_data(form.shares)
    return render(request, "jobs/job/change.html", context, status=status)


@page(AccessPolicy.SIGNED_IN)
def alternatives(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Return the changes that would start a waiting job sooner, each with a button, or why there are none."""
    job = get_job(user, public_id)
    if job.state != JobState.PENDING.value:  # it started while the page asked
        return render(request, "jobs/job/alternatives_load.html", {"job": job})
    found = job_start_alternatives(user, job)
    rows = [(each, json.dumps(json_fields(each))) for each in found.alternatives]
    return render(request, "jobs/job/alternatives.html", {"job": job, "rows": rows, "reason": found.reason})


@action(AccessPolicy.SIGNED_IN)
def apply_suggestion(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Make a suggested change of a waiting job; ``values`` are its fields as JSON."""
    job = get_job(user, public_id)
    require_permission(user, Permission.CONTROL, job)
    with refusals_as_messages(request):
        try:
            values = json.loads(request.POST.get("values", "")[:1000])
            version = int(request.POST.get("version", ""))
        except (ValueError, RecursionError):
            values = version = None
        if not isinstance(values, dict) or not values or version is None:
            raise InvalidRequest(_("There is no such change."))
        do_change_job(
            user,
            job,
            parse_suggested_fields(values),
            version=version,
            typed_amounts=job.typed_amounts,  # nobody typed those of a suggestion
        )
        messages.success(
            request, _("{name} is changed; the next cycle considers it anew.").format(name=job.name)
        )
    if request.POST.get("back") == "queue":
        return redirect(f"{reverse('queue')}#job-{public_id}")
    return redirect("job", public_id)


def _save(request: HttpRequest, user: User, job: Job, form: ChangeForm) -> bool:
    """Save the change, or add what is wrong to the form. A job that started meanwhile is left as it is."""
    try:
        do_change_job(
            user,
            job,
            form.changes,
            version=form.cleaned_data["version"],
            typed_amounts=parse_typed(form.cleaned_data[TYPED_FIELD]),
        )
    except Conflict as error:
        messages.error(request, error.message)
        return True
    except FairwayError as error:
        if isinstance(error, InvalidRequest):
            error.fields = errors_by_form_field(error.fields)
        add_service_errors(form, error)
    else:
        messages.success(
            request, _("{name} is changed; the next cycle considers it anew.").format(name=job.name)
        )
        return True
    return False


def _preview(user: User, job: Job, form: ChangeForm) -> LaunchPreview:
    if not form.is_valid():
        errors = {name: " ".join(map(str, found)) for name, found in form.errors.items()}
        return LaunchPreview("wrong", _("Not ready yet"), " ".join(errors.values()), field_errors=errors)
    try:
        answer = preview_change(job, build_changed_request(user, job, form.changes))
    except Unsatisfiable as error:
        return preview_unsatisfiable(error)
    except FairwayError as error:
        return LaunchPreview("wrong", _("Not possible"), error.message)
    if answer is None:
        return LaunchPreview("unknown", _("No preview"), _("The scheduler did not answer in time."))
    return preview_from_engine(user, answer)
