"""The pipeline planner: layer profiles, the plans computed from them, and their launch."""

from __future__ import annotations

import io
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from portal.access import AccessPolicy, Permission, can, visible_projects
from portal.domain.jobs.layer_profiles import MAX_PROFILE_BYTES, ProfileTextError, decode_profile
from portal.domain.jobs.pipeline_plans import (
    CHOICES,
    DEFAULT_MICRO_BATCHES,
    DEFAULT_SCHEDULE,
    MAX_GPUS_PER_NODE,
    MAX_MICRO_BATCHES,
    MAX_NODES,
    PIPELINE_PROGRAM,
    PROFILE_PROGRAM,
    SCHEDULES,
    WITHOUT_FLUSH,
    bubble_fraction,
    choice_of,
    predicted_rate,
    stage_memory_bytes,
)
from portal.domain.jobs.pipeline_timeline import NodeTraffic, node_traffic
from portal.domain.jobs.scaling import launcher_rates
from portal.errors import FairwayError, NotFound
from portal.models import NodePool, PipelinePlan, User
from portal.selectors.jobs.pipeline_plans import (
    RUNS_SHOWN,
    get_plan,
    get_profile,
    list_plans,
    list_profile_runs,
    list_profiles,
    plan_runs,
)
from portal.selectors.lookup import get_first
from portal.selectors.nodes.free_nodes import FreeNode, fitting_nodes, free_nodes, plan_nodes
from portal.services.jobs.launching import training_program
from portal.services.jobs.pipeline_plans import (
    MIB,
    TopologyInput,
    check_profile,
    compute_plan,
    do_create_plan,
    do_create_profile,
    do_delete_profile,
)
from portal.web.display.formatting import parse_whole_number
from portal.web.display.pipeline_charts import STAGE_COLOURS, NodeLinkUse, link_uses, timeline_chart
from portal.web.form_fields import select_input, text_input
from portal.web.jobs.launch.form import launchable_projects
from portal.web.views import action, page, refusals_as_messages

GB = 1e9
MAX_LAYERS_SHOWN = 400
ROWS_PER_PAGE = 20
SORTS = {"speed": gettext_lazy("Fastest"), "memory": gettext_lazy("Least memory")}
PROGRAMS = (PROFILE_PROGRAM, PIPELINE_PROGRAM)


class ProfileForm(forms.Form):
    project = forms.ChoiceField(label=gettext_lazy("Project"), widget=select_input())
    name = forms.CharField(
        label=gettext_lazy("Name"), max_length=100, widget=text_input(placeholder="resnet50, batch 64")
    )
    profile = forms.FileField(
        label=gettext_lazy("Profile (JSON or graph.txt)"),
        widget=forms.FileInput({"class": "form-control", "accept": ".json,.txt"}),
    )

    def __init__(self, user: User, data: Any = None, files: Any = None) -> None:
        super().__init__(data, files, label_suffix="", prefix="new")
        rows = launchable_projects(user).values_list("public_id", "name")
        self.fields["project"].choices = list(rows)  # type: ignore[attr-defined]

    def clean_profile(self) -> Any:
        """Return the decoded file; the scheduler reads what is in it."""
        file = self.cleaned_data["profile"]
        if file.size > MAX_PROFILE_BYTES:
            raise forms.ValidationError(
                _("A profile has at most {max_profile_bytes} KiB.").format(
                    max_profile_bytes=MAX_PROFILE_BYTES // 1024
                )
            )
        try:
            return decode_profile(file.read().decode())
        except UnicodeDecodeError as error:
            raise forms.ValidationError(_("The file is not text in UTF-8.")) from error
        except ProfileTextError as error:
            raise forms.ValidationError(str(error)) from error


class PlanForm(forms.Form):
    profile = forms.ChoiceField(label=gettext_lazy("Profile"), widget=select_input())
    pool = forms.ChoiceField(label=gettext_lazy("Pool"), required=False, widget=select_input())
    nodes = forms.IntegerField(
        label=gettext_lazy("Nodes"), min_value=1, max_value=MAX_NODES, widget=text_input(inputmode="numeric")
    )
    gpus_per_node = forms.IntegerField(
        label=gettext_lazy("GPUs per node"),
        min_value=1,
        max_value=MAX_GPUS_PER_NODE,
        widget=text_input(inputmode="numeric"),
    )
    node_gb = forms.FloatField(
        label=gettext_lazy("Between GPUs of a node, GB/s"),
        min_value=0.001,
        widget=text_input(inputmode="decimal"),
    )
    link_gb = forms.FloatField(
        label=gettext_lazy("Between nodes, GB/s"),
        min_value=0.001,
        required=False,
        widget=text_input(inputmode="decimal"),
        help_text=gettext_lazy("Blank: the slowest measured link of the pool."),
    )

    def __init__(self, user: User, data: Any = None, initial: dict[str, Any] | None = None) -> None:
        super().__init__(data, initial=initial, label_suffix="", prefix="plan")
        profiles = list_profiles(user).values_list("public_id", "name", "project__name")[:200]
        pools = NodePool.objects.order_by("name").values_list("public_id", "name")
        self.fields["profile"].choices = [(key, f"{name} ({project})") for key, name, project in profiles]  # type: ignore[attr-defined]
        self.fields["pool"].choices = [("", _("any pool")), *pools]  # type: ignore[attr-defined]

    def topology(self) -> TopologyInput:
        given = self.cleaned_data
        link_gb = given["link_gb"]
        return TopologyInput(
            nodes=given["nodes"],
            gpus_per_node=given["gpus_per_node"],
            node_bandwidth=given["node_gb"] * GB,
            link_bandwidth=link_gb * GB if link_gb else None,
            pool=NodePool.objects.filter(public_id=given["pool"]).first() if given["pool"] else None,
        )


@page(AccessPolicy.SIGNED_IN)
def plans(request: HttpRequest, user: User) -> HttpResponse:
    return _plans_page(request, user)


def _plans_page(
    request: HttpRequest,
    user: User,
    *,
    profile_form: ProfileForm | None = None,
    plan_form: PlanForm | None = None,
    status: int = 200,
) -> HttpResponse:
    nodes = free_nodes(user)
    measurements = list(list_profile_runs(user)[:RUNS_SHOWN])
    context = {
        "profile_form": profile_form or ProfileForm(user),
        "plan_form": plan_form or PlanForm(user, initial=_initial_topology(request, user, nodes)),
        "measurements": measurements,
        "measuring": any(not run.done for run in measurements),
        "profiles": Paginator(list_profiles(user), ROWS_PER_PAGE).get_page(request.GET.get("profiles")),
        "plans": Paginator(list_plans(user), ROWS_PER_PAGE).get_page(request.GET.get("plans")),
        "projects": {row.pk for row in launchable_projects(user)},
        "free_nodes": nodes,
        "programs": PROGRAMS,
    }
    return render(request, "jobs/pipeline_plans/page.html", context, status=status)


def _initial_topology(request: HttpRequest, user: User, nodes: list[FreeNode]) -> dict[str, Any]:
    """Return the pool, nodes and GPUs that are free now, and the node bandwidth of the latest plan there."""
    start: dict[str, Any] = {"profile": request.GET.get("profile", ""), "nodes": 1, "gpus_per_node": 1}
    if not nodes:
        return start
    best = nodes[0]
    alike = [one for one in fitting_nodes(nodes, best.pool_id, best.free) if one.gpu_model == best.gpu_model]
    start |= {"nodes": min(len(alike), MAX_NODES), "gpus_per_node": min(best.free, MAX_GPUS_PER_NODE)}
    pool = NodePool.objects.get(pk=best.pool_id)
    start["pool"] = pool.public_id
    latest = list_plans(user).filter(pool=pool).first()
    if latest is not None:
        start["node_gb"] = latest.node_bandwidth / GB
    return start


@action(AccessPolicy.SIGNED_IN)
def create_profile(request: HttpRequest, user: User) -> HttpResponse:
    form = ProfileForm(user, request.POST, request.FILES)
    if form.is_valid():
        given = form.cleaned_data
        project = get_first(visible_projects(user).filter(public_id=given["project"]))
        try:
            answer = check_profile(user, project, given["name"], given["profile"])
            row = do_create_profile(user, project, given["name"], given["profile"], answer)
        except FairwayError as error:
            form.add_error("profile", refusal_text(error))
        else:
            messages.success(
                request,
                ngettext(
                    "{name} is stored: {count} layer.", "{name} is stored: {count} layers.", len(row.layers)
                ).format(name=row.name, count=len(row.layers)),
            )
            return redirect(f"{reverse('plans')}?profile={row.public_id}")
    return _plans_page(request, user, profile_form=form, status=400)


@action(AccessPolicy.SIGNED_IN)
def delete_profile(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_profile(user, public_id)
    with refusals_as_messages(request):
        do_delete_profile(user, row)
        messages.success(request, _("{name} and its plans are deleted.").format(name=row.name))
    return redirect("plans")


@action(AccessPolicy.SIGNED_IN)
def create_plan(request: HttpRequest, user: User) -> HttpResponse:
    form = PlanForm(user, request.POST)
    if form.is_valid():
        try:
            profile = get_profile(user, form.cleaned_data["profile"])
            row = do_create_plan(user, profile, compute_plan(user, profile, form.topology()))
        except FairwayError as error:
            form.add_error(None, refusal_text(error))
        else:
            return redirect("plan", row.public_id)
    return _plans_page(request, user, plan_form=form, status=400)


def refusal_text(refusal: FairwayError) -> str:
    """Return the message of a refusal with those of its fields."""
    fields: dict[str, str] = getattr(refusal, "fields", {})
    return " ".join(fields.values()) or refusal.message


@page(AccessPolicy.SIGNED_IN)
def program(request: HttpRequest, user: User, name: str) -> FileResponse:
    """Send a program that runs in a job's image."""
    if name not in PROGRAMS:
        raise NotFound
    content = io.BytesIO(training_program(name).encode())
    return FileResponse(content, as_attachment=True, filename=name, content_type="text/x-python")


@dataclass(frozen=True)
class PlanRow:
    """A plan of the comparison, or the reason why there is none."""

    choice: str
    name: str
    plan: dict[str, Any] | None
    impossible: str
    rate: float | None
    """Samples (or minibatches) per second, with the bubble of the chosen number of micro-batches."""
    linear_percent: float | None
    memory_mib: float
    bubble_percent: float
    traffic: NodeTraffic | None = None
    """Between nodes; None on one node."""

    def sort_key(self, sort: str) -> tuple[bool, float]:
        """Return what orders plans by a key of ``SORTS``; impossible ones come last."""
        return self.plan is None, self.memory_mib if sort == "memory" else -(self.rate or 0.0)

    @property
    def stage_ms(self) -> float | None:
        return None if self.plan is None else 1000 * float(self.plan["stage_time_s"])


@dataclass(frozen=True)
class StagePlacement:
    """A stage on one node: GPU numbers within the node."""

    number: int
    colour: int
    gpus: list[int]
    layers: int
    memory_mib: float


@dataclass(frozen=True)
class PlannedNode:
    """A node of the plan; ``node`` is a node with enough free GPUs, or None."""

    number: int
    node: FreeNode | None
    stages: list[StagePlacement]
    link: NodeLinkUse | None
    """To the next node; None for the last one."""


@page(AccessPolicy.SIGNED_IN)
def plan(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_plan(user, public_id)
    runs = plan_runs(row)
    run = next((each for each in runs if each.job.public_id == request.GET.get("job")), None)
    if run is not None and run.choice is not None:  # the page of a job leads to its division
        values = urlencode({"choice": run.choice, "m": run.micro_batches, "schedule": run.schedule})
        return redirect(f"{reverse('plan', args=[public_id])}?{values}")
    micro_batches = parse_whole_number(request.GET.get("m", "")) or DEFAULT_MICRO_BATCHES
    micro_batches = min(micro_batches, MAX_MICRO_BATCHES)
    schedule = request.GET.get("schedule", "")
    schedule = schedule if schedule in SCHEDULES else DEFAULT_SCHEDULE
    rows = [_plan_row(row, choice, micro_batches, schedule) for choice in CHOICES]
    asked = request.GET.get("choice", "best")
    chosen = next((one for one in rows if one.choice == asked and one.plan), rows[0])
    division = chosen.plan or row.answer
    free, gpus = plan_nodes(user, row), row.nodes * row.gpus_per_node
    memory = stage_memory_bytes(division, micro_batches, schedule)
    bubble = bubble_fraction(division, micro_batches, schedule)
    minibatches_per_s = (division["minibatches_per_s"] or 0.0) * (1 - bubble)
    sort = request.GET.get("sort", "")
    sort = sort if sort in SORTS else "speed"
    errors = [abs(each.error_percent) for each in runs if each.error_percent is not None]
    context = {
        "plan": row,
        "rows": sorted(rows, key=lambda one: one.sort_key(sort)),
        "median_error_percent": median(errors) if len(errors) > 1 else None,
        "compared_runs": len(errors),
        "chosen": chosen,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "schedule_name": _(SCHEDULES[schedule]),
        "schedules": {key: _(name) for key, name in SCHEDULES.items()},
        "versions": max(one["in_flight"] for one in division["stages"]) if schedule == WITHOUT_FLUSH else 1,
        "max_micro_batches": MAX_MICRO_BATCHES,
        "unit": _("samples") if row.profile.batch_size else _("minibatches"),
        "gpus": gpus,
        "chart": _layer_chart(row, division),
        "nodes": _planned_nodes(
            row, division, memory, free, link_uses(row, division["stages"], minibatches_per_s)
        ),
        "timeline": timeline_chart(row, division, micro_batches, schedule),
        "sorts": SORTS.items(),
        "sort": sort,
        "missing_nodes": row.nodes - len(free),
        "runs": runs,
        "launcher_rates": launcher_rates(
            (each.launcher, each.measured_per_s or 0) for each in runs if each.job.total_gpus == gpus
        ),
        "launch_query": urlencode(
            {"plan": public_id, "choice": chosen.choice, "m": micro_batches, "schedule": schedule}
        ),
        "may_launch": can(user, Permission.SUBMIT, row.profile.project),
        "memory_mib": row.memory_bytes / MIB if row.memory_bytes else None,
    }
    return render(request, "jobs/pipeline_plans/plan.html", context)


@page(AccessPolicy.SIGNED_IN)
def plan_json(request: HttpRequest, user: User, public_id: str) -> JsonResponse:
    """Download the best plan and its alternatives, as the planner computed them."""
    row = get_plan(user, public_id)
    return JsonResponse(
        row.answer, headers={"Content-Disposition": f'attachment; filename="plan-{row.public_id}.json"'}
    )


def _plan_row(row: PipelinePlan, choice: str, micro_batches: int, schedule: str) -> PlanRow:
    found = choice_of(row.answer, choice)
    if found is None:
        reason = str(row.answer["alternatives"][choice]["impossible"])
        return PlanRow(choice, _(CHOICES[choice]), None, reason, None, None, 0.0, 0.0)
    bubble = bubble_fraction(found, micro_batches, schedule)
    speedup = found["speedup"]
    gpus = row.nodes * row.gpus_per_node
    return PlanRow(
        choice, _(CHOICES[choice]), found, "", predicted_rate(found, micro_batches, schedule),
        100 * speedup * (1 - bubble) / gpus if speedup else None,
        max(stage_memory_bytes(found, micro_batches, schedule)) / MIB, 100 * bubble,
        node_traffic(found["stages"], row.gpus_per_node) if row.nodes > 1 else None,
    )  # fmt: skip


def _layer_chart(row: PipelinePlan, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the layers with their stage and their bars in percent of the largest."""
    shown = _shown_layers(row.profile.layers, [stage["layers"] for stage in chosen["stages"]])
    largest = {
        key: max([layer[key] for _, layer in shown]) or 1.0
        for key in ("compute_s", "activation_bytes", "parameter_bytes")
    }
    layers = []
    for stage, layer in shown:
        forward = layer["forward_s"]
        layers.append(
            layer
            | {
                "stage": stage + 1,
                "colour": stage % STAGE_COLOURS + 1,
                "time_percent": 100 * layer["compute_s"] / largest["compute_s"],
                "forward_percent": 100 * forward / layer["compute_s"]
                if forward and layer["compute_s"]
                else 0.0,
                "activation_percent": 100 * layer["activation_bytes"] / largest["activation_bytes"],
                "parameter_percent": 100 * layer["parameter_bytes"] / largest["parameter_bytes"],
                "compute_ms": 1000 * layer["compute_s"],
                "forward_ms": None if forward is None else 1000 * forward,
                "backward_ms": None if layer["backward_s"] is None else 1000 * layer["backward_s"],
            }
        )
    return {
        "layers": layers,
        "stages": [
            {
                "colour": index % STAGE_COLOURS + 1,
                "layers": sum(1 for number, _ in shown if number == index),
                "replicas": stage["replicas"],
                "ms": 1000 * stage["compute_s"] / stage["replicas"],
            }
            for index, stage in enumerate(chosen["stages"])
        ],
        "total_ms": 1000 * sum(layer["compute_s"] for layer in row.profile.layers),
        "parameter_bytes": sum(layer["parameter_bytes"] for layer in row.profile.layers),
        "count": len(row.profile.layers),
        "max_ms": 1000 * largest["compute_s"],
        "max_activation_bytes": largest["activation_bytes"],
        "max_parameter_bytes": largest["parameter_bytes"],
    }


def _shown_layers(layers: list[dict[str, Any]], stages: list[list[int]]) -> list[tuple[int, dict[str, Any]]]:
    """Return the layers with their stage; of a deep model, several neighbors of a stage as one."""
    size = -(-len(layers) // MAX_LAYERS_SHOWN)
    shown = []
    for stage, (start, end) in enumerate(stages):
        for first in range(start, end, size):
            group = layers[first : min(end, first + size)]
            name = group[0]["name"] if len(group) == 1 else f"{group[0]['name']} … {group[-1]['name']}"
            amounts = {
                key: None if any(each[key] is None for each in group) else sum(each[key] for each in group)
                for key in ("compute_s", "forward_s", "backward_s", "activation_bytes", "parameter_bytes")
            }
            shown.append((stage, {"name": name, **amounts}))
    return shown


def _planned_nodes(
    row: PipelinePlan,
    chosen: dict[str, Any],
    memory_bytes: list[float],
    free: list[FreeNode],
    links: list[NodeLinkUse],
) -> list[PlannedNode]:
    """Return the stages by node: GPUs are numbered node by node."""
    nodes = []
    for number in range(row.nodes):
        stages = []
        for index, stage in enumerate(chosen["stages"]):
            gpus = [
                rank % row.gpus_per_node for rank in stage["ranks"] if rank // row.gpus_per_node == number
            ]
            if gpus:
                layers = stage["layers"][1] - stage["layers"][0]
                memory_mib = memory_bytes[index] / MIB
                stages.append(StagePlacement(index + 1, index % STAGE_COLOURS + 1, gpus, layers, memory_mib))
        node = free[number] if number < len(free) else None
        link = links[number] if number < len(links) else None
        nodes.append(PlannedNode(number + 1, node, stages, link))
    return nodes
