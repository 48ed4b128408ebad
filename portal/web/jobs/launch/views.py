"""The launch page: one form with a live preview."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.access import (
    AccessPolicy,
    Permission,
    can,
    project_parents,
    visible_secrets,
)
from portal.domain.formatting import format_gpu_models
from portal.domain.jobs.job_spec import PROPORTIONAL_AMOUNTS, job_fields, placement_fields
from portal.domain.jobs.kubernetes import DEFAULT, TRAINJOB, NotExportable
from portal.domain.jobs.scaling import cheaper_size, point_of
from portal.domain.jobs.template_parameters import field_parameters
from portal.domain.projects.project_tree import path_to_root
from portal.domain.serving.model_servers import ServiceSpec
from portal.domain.states import JobKind
from portal.domain.storage.volumes import VolumeKind
from portal.domain.sweeps.sweeps import Searcher, SweepSpec
from portal.errors import FairwayError, InvalidRequest, Unsatisfiable
from portal.models import Environment, Job, Node, NodePool, Project, Schedule, Service, Sweep, User
from portal.selectors.cluster import cluster_overview
from portal.selectors.cluster.cluster_overview import GpuModelSummary, matching_summaries
from portal.selectors.environments.environments import LaunchableEnvironment, launchable_environments
from portal.selectors.jobs.job_templates import gallery_templates, list_templates
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.progress import MeasuredProgram, measure_program
from portal.selectors.nodes.resources_per_gpu import (
    ResourcesPerGpu,
    list_resources_per_gpu,
    typed_amounts_of_job,
)
from portal.selectors.projects.quota_usage import QuotaUsage, project_quota_usage, user_quota_usage
from portal.selectors.serving.model_servers import get_service
from portal.selectors.storage.volumes import list_full_homes, list_volumes
from portal.services.jobs.gang_rules import gang_network_text
from portal.services.jobs.job_document import (
    JOBS_PATH,
    command_line,
    curl_command,
    kubernetes_yaml,
    request_body,
    to_yaml,
)
from portal.services.jobs.launching import preview_ranks
from portal.services.jobs.right_size import right_size_advice
from portal.services.jobs.schedules import do_create_schedule
from portal.services.jobs.submission import JobRequest, do_submit_job, possible_pools, validate_request
from portal.services.serving.model_servers import do_deploy_service, do_update_service
from portal.services.sweeps.sweeps import do_create_sweep
from portal.services.yaml_input import MAX_BYTES
from portal.web.display.idle_text import IdleRuleText, idle_rule_texts
from portal.web.display.quota_bars import QuotaBar
from portal.web.form_fields import add_service_errors
from portal.web.jobs.launch.amounts import (
    GPU_FIELDS,
    TYPED_FIELD,
    format_typed,
    present_amounts,
    script_data,
    with_amounts,
)
from portal.web.jobs.launch.form import LaunchForm, launchable_projects, parameter_field_name
from portal.web.jobs.launch.import_yaml import initial_from_yaml
from portal.web.jobs.launch.initial_values import (
    initial_from_api_fields,
    initial_from_data_set,
    initial_from_job,
    initial_from_last_launch,
    initial_from_model,
    initial_from_plan,
    initial_from_profile,
    initial_from_service,
    initial_from_sweep,
    initial_from_template,
)
from portal.web.jobs.launch.preview import (
    LaunchPreview,
    Suggestion,
    errors_by_form_field,
    form_fields,
    preview_launch,
    preview_unsatisfiable,
    start_suggestions,
)
from portal.web.jobs.launch.summaries import step_summaries
from portal.web.views import action, form_page

PREVIEW_RANKS = 16
MAX_TEMPLATES = 5
GPU_COUNTS = (1, 2, 4, 8, 16, 32)
QUERY_FIELDS = tuple(name for name in placement_fields() if name not in ("name", "kind"))
NAME_PREFIXES = {
    JobKind.WORKSPACE.value: "notebook",
    JobKind.TRAINING.value: "run",
    JobKind.SERVICE.value: "service",
}


@dataclass(frozen=True)
class SizePreset:
    """A preset GPU count: its availability, and why it is disabled."""

    count: int
    availability: str
    fits_now: bool = False
    is_disabled: bool = False
    is_selected: bool = False


@dataclass(frozen=True)
class EnvironmentChoice:
    """An environment; ``project_ids`` are public ids of projects that may run it, None for all."""

    availability: LaunchableEnvironment
    project_ids: list[str] | None


@form_page(AccessPolicy.SIGNED_IN)
def launch(request: HttpRequest, user: User) -> HttpResponse:
    if request.method == "GET":
        shown = _environment_choices(user)
        shares = list_resources_per_gpu(user)
        initial, last = _initial(request, user, shown, shares)
        form = LaunchForm(user, initial=initial)
        context = _context(user, form, shown, shares)
        context |= {"last_launch": last, "opens_schedule": "repeat" in request.GET}
        return render(request, "jobs/launch/page.html", context)
    form = LaunchForm(user, request.POST, request.FILES)
    refusal: LaunchPreview | None = None
    if form.is_valid():
        try:
            made = _submit(user, form)
        except InvalidRequest as error:
            if form.cleaned_data["searcher"] and (fault := error.fields.pop("parameters", None)):
                error.fields["sweep_parameters"] = fault
            error.fields = errors_by_form_field(error.fields)
            add_service_errors(form, error)
        except Unsatisfiable as error:
            refusal = preview_unsatisfiable(error)
        except FairwayError as error:
            refusal = LaunchPreview("wrong", _("Not launched"), error.message)
        else:
            text = _("{name} is scheduled.") if isinstance(made, Schedule) else _("{name} is submitted.")
            messages.success(request, text.format(name=made.name))
            return redirect(type(made).__name__.lower(), made.public_id)
    context = _context(user, form, _environment_choices(user), list_resources_per_gpu(user))
    context |= {"check": refusal} if refusal else {}
    return render(request, "jobs/launch/page.html", context, status=422 if refusal else 400)


def _submit(user: User, form: LaunchForm) -> Job | Sweep | Service | Schedule:
    if deployment := form.to_deployment():
        if updated := form.cleaned_data["service"]:
            return do_update_service(user, get_service(user, updated), deployment)
        return do_deploy_service(user, deployment)
    if schedule := form.to_schedule():
        return do_create_schedule(user, schedule, form.to_job_request())
    sweep = form.to_sweep()
    if sweep is None:
        return do_submit_job(user, form.to_job_request())
    return do_create_sweep(user, request=form.to_job_request(), **sweep)


@action(AccessPolicy.SIGNED_IN)
def import_yaml(request: HttpRequest, user: User) -> HttpResponse:
    """Fill the form with a job in YAML, pasted or as a file, or list what is wrong with it."""
    shown, upload = _environment_choices(user), request.FILES.get("file")
    text = upload.read(MAX_BYTES + 1).decode(errors="replace") if upload else request.POST.get("yaml", "")
    try:
        initial, wrong = initial_from_yaml(user, text)
    except InvalidRequest as error:
        initial, wrong = {}, list(error.fields.values())
    shares = list_resources_per_gpu(user)
    typed = {TYPED_FIELD: format_typed(present_amounts(initial))}
    start = _initial(request, user, shown, shares)[0] | ({} if wrong else initial | typed)
    context = _context(user, LaunchForm(user, initial=start), shown, shares)
    context |= {"import_errors": wrong, "imported": text if wrong else "", "is_imported": not wrong}
    return render(request, "jobs/launch/page.html", context, status=400 if wrong else 200)


@action(AccessPolicy.SIGNED_IN)
def preview(request: HttpRequest, user: User) -> HttpResponse:
    """Return preview and review for the current form; requested on input, debounced."""
    return render(
        request,
        "jobs/launch/preview.html",
        _preview_context(user, LaunchForm(user, request.POST), ask=True) | {"oob": True},
    )


@action(AccessPolicy.SIGNED_IN)
def alternatives(request: HttpRequest, user: User) -> HttpResponse:
    """Return changes with which the current form would start sooner; the preview loads them after itself."""
    form = LaunchForm(user, request.POST)
    found: list[Suggestion] = []
    if form.is_valid():
        try:
            wanted = form.to_job_request()
            validate_request(user, wanted)
            found = start_suggestions(user, wanted)
        except FairwayError:
            pass  # the preview says what is wrong
    return render(request, "jobs/launch/alternatives.html", {"suggestions": found})


def _initial(
    request: HttpRequest, user: User, shown: list[EnvironmentChoice], shares: list[ResourcesPerGpu]
) -> tuple[dict[str, Any], Job | Service | None]:
    """Return initial values, and the last launch if they are those of it."""
    query = request.GET
    kind = query.get("kind", "")
    start: dict[str, Any] = {"kind": kind if kind in NAME_PREFIXES else JobKind.WORKSPACE.value}
    last: Job | Service | None = None
    typed: set[str] | None = None
    is_import = request.method == "POST"  # what a document leaves out has the value of the API
    if not is_import and not query.keys() - {"kind"}:
        remembered, last = initial_from_last_launch(user, start["kind"])
        start |= remembered
        typed = set(typed_amounts_of_job(last, shares)) if isinstance(last, Job) else None
    elif query.get("like"):
        like = get_job(user, query["like"])
        start |= initial_from_job(user, like, query)
        typed = set(typed_amounts_of_job(like, shares))
        if (like.env or like.secrets) and not can(user, Permission.CONTROL, like):
            messages.info(
                request,
                _("The variables and secrets of {name} are not copied: you may not control it.").format(
                    name=like.name
                ),
            )
    elif query.get("template"):
        found = list_templates(user).filter(public_id=query["template"]).first()
        start |= initial_from_template(found) if found else {}
        typed = set()
        start |= {name: value for name, value in query.items() if name.startswith(parameter_field_name(""))}
    elif query.get("from_sweep"):
        start |= initial_from_sweep(user, query["from_sweep"], narrow="narrow" in query)
    elif query.get("service"):
        start |= initial_from_service(user, query["service"])
    if start["kind"] == JobKind.SERVICE.value and query.get("model"):
        start |= initial_from_model(query["model"], query.get("version", ""), query.get("project", ""))
    if query.get("data_set"):
        start |= initial_from_data_set(user, query["data_set"])
    if query.get("plan"):
        start |= initial_from_plan(user, query)
    if query.get("profile"):
        start |= initial_from_profile(query["profile"], query.get("model", ""), query.get("input", ""))
    start |= initial_from_api_fields({name: query[name] for name in QUERY_FIELDS if query.get(name)})
    if query.get("sweep") in tuple(Searcher):
        start["searcher"] = query["sweep"]
    start["time_zone"] = user.timezone
    start |= {name: query[name] for name in ("pool", "project") if query.get(name)}
    if query.get("topology_constraint") == "":
        start |= initial_from_api_fields({"topology_constraint": None})
    start.setdefault("name", f"{NAME_PREFIXES[start['kind']]}-{timezone.now():%d%H%M}")
    if not is_import:
        asked = {name for name in PROPORTIONAL_AMOUNTS if query.get(name)}
        refresh = last is not None or not query.keys().isdisjoint(GPU_FIELDS)
        fixed = _parameter_fields(user, start.get("template"))
        if query.get("like"):  # a suggestion for that job gave them
            fixed, asked = fixed | asked, set()
        known = None if typed is None and not asked else (typed or set()) | asked
        start = with_amounts(start, shares, known, refresh=refresh, fixed=fixed)
    if not start.get("project"):
        first = launchable_projects(user).first()
        start["project"] = first.public_id if first else ""
    if not start.get("environment"):
        offered = _default_environment(shown, start["kind"], start["project"])
        start["environment"] = offered.public_id if offered else ""
    return start, last


def _parameter_fields(user: User, template: object) -> set[str]:
    """Return the fields of a job that parameters of the template fill."""
    row = list_templates(user).filter(public_id=template).first() if isinstance(template, str) else None
    return set(field_parameters(row.fields)) if row else set()


def _default_environment(shown: list[EnvironmentChoice], kind: str, project: str) -> Environment | None:
    """Return the first suitable environment: with a tool for workspaces, preferably without one for jobs."""
    rows = [
        each.availability.environment
        for each in shown
        if each.project_ids is None or project in each.project_ids
    ]
    if kind == JobKind.WORKSPACE.value:
        return min((row for row in rows if row.tool_port), key=lambda row: row.pk, default=None)
    return min(rows, key=lambda row: (bool(row.tool_port), row.pk), default=None)


def _environment_choices(user: User) -> list[EnvironmentChoice]:
    """Return environments offered to any project in which the user may launch, with those projects."""
    parents = project_parents()
    lines = {row.public_id: path_to_root(row.pk, parents.get) for row in launchable_projects(user)}
    shown = []
    for offer in launchable_environments(user):
        allowed = [project for project, line in lines.items() if offer.is_offered_to(line)]
        usable = offer.environment.enabled and offer.environment.owner_id in (None, user.pk)
        if usable and (allowed or not offer.projects):
            shown.append(EnvironmentChoice(offer, allowed if offer.projects else None))
    return shown


def _context(
    user: User, form: LaunchForm, shown: list[EnvironmentChoice], shares: list[ResourcesPerGpu]
) -> dict[str, Any]:
    """Return the context of the page. Only a refused form has its preview; others request it at once."""
    chosen = form["environment"].value()
    return (_preview_context(user, form) if form.is_bound else _pending_context(user, form)) | {
        "form": form,
        "environment_is_offered": any(chosen == each.availability.environment.public_id for each in shown),
        "amounts": script_data(shares),
        "environments": shown,
        "secrets": visible_secrets(user).order_by("project__name", "name"),
        "volumes": list_volumes(user).exclude(kind=VolumeKind.HOME.value),
        "templates": gallery_templates(user)[:MAX_TEMPLATES],
        "projects_missing": not launchable_projects(user).exists(),
    }


def _pending_context(user: User, form: LaunchForm) -> dict[str, Any]:
    """Return the context of an initial form, whose preview is not computed yet."""
    shares = _quota_usage(user, launchable_projects(user).filter(public_id=form["project"].value()).first())
    pending = LaunchPreview("pending", _("When it would start"), _("The scheduler computes it."))
    return _capacity_context(form, shares, cluster_overview.free_capacity(user, shares)) | {"check": pending}


def _quota_usage(user: User, project: Project | None) -> list[QuotaUsage]:
    """Return the quotas in every pool of the project, or of all projects of the user."""
    if project is None:
        return user_quota_usage(user)
    return project_quota_usage([project], user, with_unlimited=True)


def _capacity_context(
    form: LaunchForm, shares: list[QuotaUsage], strips: list[GpuModelSummary]
) -> dict[str, Any]:
    """Return the choices of GPU models and numbers, with those of the form."""
    model, count = str(form["gpu_model"].value() or ""), str(form["gpus_per_task"].value() or "")
    mig_profile = str(form["mig_profile"].value() or "")
    by_model: dict[str, GpuModelSummary] = {}
    for strip in strips:
        if strip.model not in by_model or strip.mig_profile == mig_profile:
            by_model[strip.model] = strip
    fitting = matching_summaries(strips, model, mig_profile)
    pools = {pool for strip in fitting for pool in strip.pools}
    chosen = str(form["pool"].value() or "")
    limiting = [share for share in shares if share.pool.pk in pools and chosen in ("", share.pool.public_id)]
    return {
        "strips": by_model.values(),
        "model": model,
        "other_models": "" if model in ("", *(strip.model for strip in strips)) else format_gpu_models(model),
        "kind": str(form["kind"].value() or ""),
        "size_presets": size_presets(fitting, count, limiting),
    }


def _preview_context(user: User, form: LaunchForm, *, ask: bool = False) -> dict[str, Any]:
    """Return what a bound form requests and when it would start; ``ask`` waits for the scheduler's answer."""
    request = form.to_job_request() if form.is_valid() else None
    shares = _quota_usage(user, request.project if request else None)
    strips = cluster_overview.free_capacity(user, shares)
    if request is not None:
        found = preview_launch(user, request, strips, query_engine=ask)
    else:
        wrong = {name: " ".join(str(e) for e in errors) for name, errors in form.errors.items()}
        said = [
            f"{form[name].label}: {words}" if name in form.fields else words for name, words in wrong.items()
        ]
        message = " ".join(said) or _("Fill in the missing fields.")
        found = LaunchPreview("wrong", _("Not ready yet"), message, field_errors=wrong)
    measured = measure_program(request) if request and found.kind != "wrong" else MeasuredProgram([], [])
    requested = request.total_milli if request else 0
    path, body = _example(request, form) if request else ("", {})
    return _capacity_context(form, shares, strips) | {
        "check": found,
        "request_now": request,
        "advice": _advice(user, request, strips) if request and found.kind != "wrong" else None,
        "full_homes": list_full_homes(user),
        "summaries": step_summaries(request),
        "scale_point": point_of(measured.points, request.total_gpus) if request else None,
        "cheaper": cheaper_size(measured.points, request.total_gpus) if request else None,
        "launcher_rates": measured.launchers,
        "network": gang_network_text(request.tasks, elastic=request.is_elastic, pool=request.pool)
        if request
        else "",
        "idle_rules": _idle_rules(request, strips),
        "quota_bars": [
            QuotaBar(share, _("Quota after, {name}").format(name=share.pool.name), requested)
            for share in _quotas_in_question(shares, request, found)
        ],
        "scripts": _scripts(request, path, body) if request else [],
        "is_job": path == JOBS_PATH,
        "portal_url": settings.PORTAL_URL,
        "ranks": preview_ranks(request, PREVIEW_RANKS) if request else [],
    }


def _advice(user: User, request: JobRequest, strips: list[GpuModelSummary]) -> Suggestion | None:
    """Return what past runs say about the request, and whether the smaller number of GPUs is free now."""
    found = right_size_advice(user, request)
    if found is None:
        return None
    fitting = matching_summaries(strips, request.gpu_model, request.mig_profile)
    free = max((strip.largest_free for strip in fitting), default=0)
    count = found.fields.get("gpus_per_task")
    message = found.message
    if count and count <= free < request.gpus_per_task:
        message += " " + ngettext("It is free now.", "They are free now.", count)
    return Suggestion(message, form_fields(found.fields))


def _idle_rules(request: JobRequest | None, strips: list[GpuModelSummary]) -> list[IdleRuleText]:
    """Return the idle rules of pools in which it may run; only for workspaces with GPUs."""
    if request is None or request.kind != JobKind.WORKSPACE.value or not request.gpus_per_task:
        return []
    if request.pool is not None:
        return idle_rule_texts(request.project, [request.pool])
    fitting = {
        pool
        for strip in matching_summaries(strips, request.gpu_model, request.mig_profile)
        for pool in strip.pools
    }
    return idle_rule_texts(request.project, NodePool.objects.filter(pk__in=fitting).order_by("name"))


def _quotas_in_question(
    shares: list[QuotaUsage], request: JobRequest | None, found: LaunchPreview
) -> list[QuotaUsage]:
    """Return the quotas of the pools in which the request would start, else of those that it fits.

    While the form is incomplete, those of all pools that are used or have a quota.
    """
    if request is None:
        return [share for share in shares if share.has_quota or share.used_milli or share.bound_by_ancestor]
    if found.nodes:
        pools = set(Node.objects.filter(name__in=found.nodes).values_list("pool", flat=True))
    else:
        pools = possible_pools(request)
    return [share for share in shares if share.pool.pk in pools]


def size_presets(fitting: list[GpuModelSummary], count: str, shares: list[QuotaUsage]) -> list[SizePreset]:
    """Return the usual GPU counts on one node, each with whether it fits now, waits, or is never allowed."""
    free = max((strip.largest_free for strip in fitting), default=0)
    largest = max((strip.largest_node for strip in fitting), default=0)
    limits = [limit for share in shares if (limit := _tightest_limit(share)) is not None]
    limit = max(limits) // 1000 if limits else None
    rungs = []
    for number in GPU_COUNTS:
        if number > max(8, largest * 2):
            break
        if number > largest:
            note, now, closed = (
                (_("largest node {largest}").format(largest=largest) if largest else _("no such GPU")),
                False,
                True,
            )
        elif limit is not None and number > limit:
            note, now, closed = _("limit is {limit}").format(limit=limit), False, True
        elif number <= free:
            note, now, closed = _("free now"), True, False
        else:
            note, now, closed = _("waits"), False, False
        rungs.append(SizePreset(number, note, now, closed, str(number) == count))
    return rungs


def _tightest_limit(share: QuotaUsage) -> int | None:
    return min((n for n in (share.limit_milli, share.user_limit_milli) if n is not None), default=None)


def _scripts(request: JobRequest, path: str, body: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return key, label and text of each notation of a request."""
    found = [
        ("yaml", "YAML", to_yaml(body)),
        ("cli", _("Command line"), command_line(path, body)),
        ("rest", "REST", curl_command(path, body)),
    ]
    if path == JOBS_PATH:
        for kind, label in ((DEFAULT, "Kubernetes"), (TRAINJOB, "TrainJob")):
            with suppress(NotExportable):
                key = "kubernetes" if kind == DEFAULT else kind
                found.append((key, label, kubernetes_yaml(request, kind)))
    return found


def _example(request: JobRequest, form: LaunchForm) -> tuple[str, dict[str, Any]]:
    """Return path and body of the request, which may be a sweep."""
    sweep, schedule = form.to_sweep(), form.to_schedule()
    if request.kind == JobKind.SERVICE.value:
        deployment = form.to_deployment()
        rules = job_fields(ServiceSpec)
        spec = {name: getattr(deployment.spec, name) for name in rules} if deployment else {}
        changed = {name: value for name, value in spec.items() if value != rules[name].default}
        model = {"model": asdict(deployment.model)} if deployment and deployment.model else {}
        body = request_body(request)
        del body["kind"]
        return "/api/v1/services/", {"job": body, **model, **changed}
    if schedule is not None:
        return "/api/v1/schedules/", {"job": request_body(request), **asdict(schedule)}
    if sweep is None:
        return JOBS_PATH, request_body(request)
    spec = {name: getattr(sweep["spec"], name) for name in job_fields(SweepSpec)}
    changed = {name: value for name, value in spec.items() if value != job_fields(SweepSpec)[name].default}
    space = {name: sweep[name] for name in ("parameters", "points") if sweep[name]}
    return "/api/v1/sweeps/", {"job": request_body(request), "searcher": spec["searcher"], **changed, **space}
