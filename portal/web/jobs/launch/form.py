"""The launch form, and its conversion to a JobRequest."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from django import forms
from django.db.models import Q, QuerySet
from django.http import QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from agents.launchers import LAUNCHERS
from portal.access import project_ids, visible_environments, visible_jobs
from portal.domain.jobs.job_spec import MAX_PROGRAM_LENGTH, JobSpec, job_fields
from portal.domain.jobs.parameters import parse_parameter_lines, parse_point_lines
from portal.domain.jobs.schedules import ScheduleSpec
from portal.domain.jobs.template_parameters import (
    field_parameters,
    fill_fields,
    read_template_parameters,
    shell_error,
)
from portal.domain.serving.model_servers import ACCESS_LABELS, ServiceSpec, mlflow_command
from portal.domain.states import LIVE_JOB_STATES, JobKind, Role
from portal.domain.sweeps.sweeps import SEARCHER_LABELS, Searcher, SweepSpec, sweep_errors
from portal.errors import FairwayError, InvalidRequest
from portal.models import Environment, Gpu, Job, NodePool, Project, Template, Topology, User
from portal.selectors.jobs.job_templates import list_templates
from portal.selectors.nodes.gpu_states import COUNTED_GPU
from portal.services.jobs.code_archives import do_store_archive
from portal.services.jobs.dependencies import unknown_job_message
from portal.services.jobs.job_templates import check_template_version
from portal.services.jobs.submission import JobRequest
from portal.services.serving.model_servers import Deployment, ModelReference
from portal.web.display.formatting import MAX_DIGITS, time_zone
from portal.web.form_fields import LocalTimeField, select_input, text_area, text_input
from portal.web.jobs.launch.amounts import parse_typed
from portal.web.jobs.launch.data_fields import DataForm
from portal.web.jobs.launch.launcher_fields import build_launcher_fields, launcher_options, option_field_name
from portal.web.jobs.launch.roles import RoleFormSet, parse_command
from portal.web.jobs.launch.spec_fields import (
    build_field,
    build_schedule_fields,
    build_spec_fields,
    request_values,
)

_LINE_END = re.compile(r"\r\n|\r|\n")
"""Of a text field. ``str.splitlines`` would also divide values at characters such as form feed and U+2028."""
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|d)?\s*(?:(\d+)\s*(s|min|h))?\s*", re.IGNORECASE)
_UNIT_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
KINDS = [
    (JobKind.WORKSPACE.value, gettext_lazy("Notebook")),
    (JobKind.TRAINING.value, gettext_lazy("Job")),
    (JobKind.SERVICE.value, gettext_lazy("Service")),
]
RECENT_JOBS = 8
_REQUEST_VALUES = (
    "project", "environment", "pool", "template", "topology_constraint", "command", "env", "volumes",
    "rank_overrides", "roles", "parameters", "template_version", "typed_amounts",
)  # fmt: skip
WHOLE_MILLI = 1000
GPU_FRACTIONS = [
    (WHOLE_MILLI, gettext_lazy("whole GPUs")),
    (500, gettext_lazy("half of one GPU")),
    (250, gettext_lazy("a quarter of one GPU")),
]


def parameter_field_name(parameter: str) -> str:
    return f"param-{parameter}"


class DurationField(forms.CharField):
    """A duration such as 90 min, 12 h, 1 h 30 min or 2 d; empty means no limit. The value is seconds or None."""

    def clean(self, value: Any) -> Any:
        text = super().clean(value)
        if not text or text.strip().lower() == "none":
            return None
        found = _DURATION.fullmatch(text)
        if found is None:
            raise forms.ValidationError(
                _("Write a time such as 90 min, 12 h or 2 d, or leave it empty for no limit.")
            )
        if max(len(found[1]), len(found[3] or "")) > MAX_DIGITS:
            raise forms.ValidationError(_("That is longer than any job may run."))
        rest_s = int(found[3]) * _UNIT_SECONDS[found[4].lower()] if found[3] else 0
        return rest_s + int(float(found[1]) * _UNIT_SECONDS[(found[2] or "h").lower()])


class PublicIdChoiceField(forms.ModelChoiceField):  # type: ignore[type-arg]
    """A choice whose values are public ids."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, to_field_name="public_id", **kwargs)

    def label_from_instance(self, thing: Any) -> str:
        return str(getattr(thing, "title", "") or thing.name)


class PublicIdMultipleChoiceField(forms.ModelMultipleChoiceField):  # type: ignore[type-arg]
    """A multiple choice whose values are public ids."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, to_field_name="public_id", **kwargs)

    def label_from_instance(self, thing: Any) -> str:
        """Return its name and what distinguishes it from others of that name."""
        return f"{thing.name} ({thing.public_id})"


class LaunchForm(DataForm):
    """One form for workspaces and jobs; fields that do not apply to a kind are ignored.

    Fields with a label in the specification are added to those declared here.
    """

    request_type = JobRequest

    kind = forms.ChoiceField(choices=KINDS, initial=JobKind.WORKSPACE.value, widget=forms.RadioSelect)
    name = forms.CharField(label=gettext_lazy("Name"), max_length=100, widget=text_input())
    project = PublicIdChoiceField(
        label=gettext_lazy("Project"), queryset=Project.objects.none(), widget=select_input()
    )
    template = PublicIdChoiceField(queryset=Template.objects.none(), required=False, widget=forms.HiddenInput)
    template_version = forms.IntegerField(required=False, widget=forms.HiddenInput)
    typed_amounts = forms.CharField(max_length=60, required=False, widget=forms.HiddenInput)
    environment = PublicIdChoiceField(
        label=gettext_lazy("Environment"), queryset=Environment.objects.none(), widget=select_input()
    )
    pool = PublicIdChoiceField(
        label=gettext_lazy("Pool"),
        queryset=NodePool.objects.none(),
        required=False,
        empty_label=gettext_lazy("Any pool"),
        widget=select_input(),
    )
    gpu_model = forms.CharField(max_length=100, required=False)
    milli_per_gpu = forms.TypedChoiceField(
        label=gettext_lazy("Share of each GPU"),
        choices=GPU_FRACTIONS,
        coerce=int,
        initial=1000,
        widget=select_input(),
        required=False,
        help_text=gettext_lazy("A share is cooperative: other jobs of the project may use the same GPU."),
    )
    mig_profile = forms.ChoiceField(
        label=gettext_lazy("MIG slices"), required=False, widget=select_input(),
        help_text=gettext_lazy("Parts of a GPU with isolated memory; each counts as one GPU."),
    )  # fmt: skip
    topology_required = forms.ChoiceField(
        label=gettext_lazy("Required topology level"), required=False, widget=select_input(),
        help_text=gettext_lazy("All tasks start within one domain of this level, or wait for it."),
    )  # fmt: skip
    topology_preferred = forms.ChoiceField(
        label=gettext_lazy("Preferred topology level"), required=False, widget=select_input(),
        help_text=gettext_lazy("Tried first; never delays the job."),
    )  # fmt: skip
    command = forms.CharField(
        label=gettext_lazy("Command"), max_length=65536, required=False,
        widget=text_area(4, spellcheck="false"),
        help_text=gettext_lazy("A command with pipes, variables or several lines is run by /bin/sh -c."),
    )  # fmt: skip
    program = forms.CharField(
        label=gettext_lazy("Program"), max_length=MAX_PROGRAM_LENGTH, required=False,
        widget=text_area(12, spellcheck="false"), strip=False,
        help_text=gettext_lazy("Each task has it as a file; the command refers to it as {fairway:secrets}/program."),
    )  # fmt: skip
    env = forms.CharField(
        label=gettext_lazy("Variables"), max_length=65536, required=False,
        widget=text_area(3, placeholder="NAME=value"),
        help_text=gettext_lazy("One NAME=value per line."),
    )  # fmt: skip
    time_limit_s = DurationField(
        label=gettext_lazy("Time limit"),
        required=False,
        widget=text_input(placeholder=gettext_lazy("no limit")),
        help_text=gettext_lazy("Such as 90 min, 12 h, 2 d."),
    )
    start_after = LocalTimeField(
        label=gettext_lazy("Start after"),
        required=False,
        help_text=gettext_lazy("In your time zone. Empty: as soon as possible."),
    )
    launcher = forms.ChoiceField(
        label=gettext_lazy("Launcher"), required=False, widget=select_input(), initial="none",
        choices=[(name, each.label) for name, each in LAUNCHERS.items()],
        help_text=gettext_lazy("How tasks find each other."),
    )  # fmt: skip
    rank_overrides = forms.CharField(
        label=gettext_lazy("Variables of single ranks"), max_length=65536, required=False,
        widget=text_area(2, placeholder=gettext_lazy("3 NAME=value"), spellcheck="false"),
        help_text=gettext_lazy("They override the variables of the job and of the launcher, as the review shows."),
    )  # fmt: skip
    dependencies = PublicIdMultipleChoiceField(
        label=gettext_lazy("Your jobs that have not ended"), queryset=Job.objects.none(), required=False,
        widget=forms.CheckboxSelectMultiple({"class": "form-check-input"}),
    )  # fmt: skip
    dependency_ids = forms.CharField(
        label=gettext_lazy("Other jobs, by id"), max_length=2000, required=False, widget=text_input(),
        help_text=gettext_lazy("Separated by spaces. The id is in the URL of a job."),
    )  # fmt: skip

    code_upload = forms.FileField(
        label=gettext_lazy("Upload an archive"), required=False, allow_empty_file=True,
        widget=forms.ClearableFileInput({"class": "form-control", "accept": ".zip,.tar,.tar.gz,.tgz"}),
        help_text=gettext_lazy("A zip, tar or tar.gz archive with files and folders. It is stored for the project."),
    )  # fmt: skip

    sweep_parameters = forms.CharField(
        label=gettext_lazy("Parameters"),
        max_length=65536,
        required=False,
        widget=text_area(4, spellcheck="false", placeholder=gettext_lazy("lr = 1e-5..1e-3 log")),
        help_text=gettext_lazy(
            "One per line: NAME = LOW..HIGH [log] [step S], or NAME = VALUE, VALUE. For a list, each "
            "line is a trial: NAME=VALUE NAME=VALUE. The command uses {NAME}."
        ),
    )

    service = forms.CharField(max_length=16, required=False, widget=forms.HiddenInput)
    model_name = forms.CharField(
        label=gettext_lazy("Model"), max_length=256, required=False, widget=text_input()
    )
    model_version = forms.CharField(
        label=gettext_lazy("Model version"), max_length=20, required=False, widget=text_input(),
        help_text=gettext_lazy(
            "Of the registry of the project. Without a command, MLflow serves it, which the environment must have."
        ),
    )  # fmt: skip

    def __init__(
        self, user: User, data: Any = None, files: Any = None, *, initial: dict[str, Any] | None = None
    ) -> None:
        super().__init__(data, files, initial=initial, label_suffix="")
        self.fields |= build_spec_fields(self.request_type) | build_launcher_fields()
        self.fields |= build_spec_fields(SweepSpec)
        self.fields["searcher"] = forms.ChoiceField(
            label=_("Array or sweep"), required=False, widget=select_input(),
            choices=[("", _("No: one job")), *((each.value, text) for each, text in SEARCHER_LABELS.items())],
            help_text=_("Runs the job as trials with different parameters."),
        )  # fmt: skip
        self.fields |= build_schedule_fields(required=False)
        self.fields |= build_spec_fields(ServiceSpec)
        self.fields["access"] = forms.ChoiceField(
            label=_("Access"), required=False, widget=select_input(), choices=list(ACCESS_LABELS.items()),
            help_text=_("Who may send requests."),
        )  # fmt: skip
        posted = data if data is not None and "roles-TOTAL_FORMS" in data else None
        self.roles = RoleFormSet(posted, prefix="roles", initial=(initial or {}).get("roles"))
        self.user = user
        start_after: Any = self.fields["start_after"]
        start_after.zone = time_zone(user.timezone)
        self._set_queryset("project", launchable_projects(user))
        self._set_queryset("environment", visible_environments(user).filter(enabled=True).order_by("title"))
        self._set_queryset("pool", NodePool.objects.order_by("name"))
        self._set_queryset("template", list_templates(user))
        self._add_parameters(
            list_templates(user), (data if data is not None else initial or {}).get("template")
        )
        self.has_topology_levels = self._set_topology_levels()
        profiles = Gpu.objects.filter(COUNTED_GPU).exclude(mig_profile="").order_by("mig_profile")
        slices = list(profiles.values_list("mig_profile", flat=True).distinct())
        self.has_mig_slices = bool(slices)
        self._set_choices("mig_profile", [("", _("Whole GPUs")), *((name, name) for name in slices)])
        chosen = data.getlist("dependencies") if isinstance(data, QueryDict) else []
        self._set_queryset("dependencies", dependency_candidates(user, chosen))

    def _add_parameters(self, templates: QuerySet[Template], key: object) -> None:
        """Add a field for each parameter of the template; fields of the job that they fill become read-only."""
        self.from_template = templates.filter(public_id=key).first() if isinstance(key, str) and key else None
        self.declared = read_template_parameters(self.from_template.parameters) if self.from_template else ()
        for each in self.declared:
            self.fields[parameter_field_name(each.name)] = build_field(each.rule)
        labels = {each.name: each.rule.label for each in self.declared}
        self.filled_fields = field_parameters(self.from_template.fields) if self.from_template else {}
        self.filled_fields = {name: each for name, each in self.filled_fields.items() if each in labels}
        for name, parameter in self.filled_fields.items():
            if field := self.fields.get(job_fields(self.request_type)[name].form_name):
                field.widget.attrs["readonly"] = True
                field.help_text = _("Set by the parameter {labels}.").format(labels=labels[parameter])

    @property
    def parameter_fields(self) -> list[forms.BoundField]:
        return [self[parameter_field_name(each.name)] for each in self.declared]

    @property
    def gpu_kind_fields(self) -> list[forms.BoundField]:
        fields = self._section("gpu_kind")
        return [field for field in fields if field.name != "mig_profile" or self.has_mig_slices]

    @property
    def software_fields(self) -> list[forms.BoundField]:
        return self._section("software")

    @property
    def code_fields(self) -> list[forms.BoundField]:
        return self._section("code")

    @property
    def opens_code(self) -> bool:
        """True if the folded section has a repository or an error."""
        return any(field.value() or field.errors for field in (*self.code_fields, self["code_upload"]))

    @property
    def limit_fields(self) -> list[forms.BoundField]:
        return self._section("limits")

    @property
    def sweep_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in job_fields(SweepSpec) if name != "searcher"]

    @property
    def service_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in (*job_fields(ServiceSpec), "model_name", "model_version")]

    @property
    def schedule_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in job_fields(ScheduleSpec)]

    @property
    def opens_sweep(self) -> bool:
        """True if the folded section has a searcher or an error."""
        return bool(self["searcher"].value()) or any(field.errors for field in self.sweep_fields)

    @property
    def checkpoint_fields(self) -> list[forms.BoundField]:
        return self._section("checkpoints")

    @property
    def restart_fields(self) -> list[forms.BoundField]:
        return self._section("restart")

    @property
    def opens_restart(self) -> bool:
        """True if a field about checkpoints or restarts has an error."""
        return any(field.errors for field in (*self.checkpoint_fields, *self.restart_fields))

    @property
    def opens_data(self) -> bool:
        """True if a field of the folded step has an error."""
        return any(self[name].errors for name in DataForm.base_fields)

    @property
    def opens_limits(self) -> bool:
        """True if a field of the folded step has an error."""
        others = (self[name] for name in ("preemptible", "dependencies", "dependency_ids"))
        return self.opens_restart or any(field.errors for field in (*self.limit_fields, *others))

    @property
    def opens_gpu_kind(self) -> bool:
        """True if a field of the folded section has a value or an error."""
        return any(field.value() or field.errors for field in self._section("gpu_kind"))

    @property
    def opens_roles(self) -> bool:
        """True if the folded section has roles or a value."""
        return bool(self.roles.forms or self["completion_role"].value() or self["min_succeeded"].value())

    @property
    def opens_software(self) -> bool:
        """True if the folded section has variables or an error."""
        return bool(self["env"].value()) or any(field.errors for field in self.software_fields)

    @property
    def launcher_fields(self) -> list[tuple[str, list[forms.BoundField]]]:
        """Return the fields of each launcher that has options."""
        return [
            (name, [self[option_field_name(name, option.name)] for option in each.options])
            for name, each in LAUNCHERS.items()
            if each.options
        ]

    @cached_property
    def jobs_only_names(self) -> set[str]:
        return {rule.form_name for rule in job_fields(self.request_type).values() if rule.jobs_only}

    def _section(self, section: str) -> list[forms.BoundField]:
        rules = job_fields(self.request_type).values()
        return [self[rule.form_name] for rule in rules if rule.section == section]

    def _set_queryset(self, name: str, rows: QuerySet[Any]) -> None:
        field = self.fields[name]
        assert isinstance(field, PublicIdChoiceField | PublicIdMultipleChoiceField)  # noqa: S101
        field.queryset = rows

    def _set_topology_levels(self) -> bool:
        """Offer the levels of all topologies; return False when there are none."""
        rows = list(Topology.objects.order_by("name"))
        named = len(rows) > 1
        levels = [(f"{row.name}:{key}", _level_label(row, key, named)) for row in rows for key in row.levels]
        for name, nothing in (
            ("topology_required", _("Anywhere")),
            ("topology_preferred", _("No preference")),
        ):
            self._set_choices(name, [("", nothing), *levels])
        return bool(levels)

    def _set_choices(self, name: str, choices: list[tuple[str, str]]) -> None:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)  # noqa: S101
        field.choices = choices

    def clean(self) -> dict[str, Any]:
        """Check that both levels belong to one topology."""
        data: dict[str, Any] = super().clean() or self.cleaned_data
        required, preferred = data.get("topology_required") or "", data.get("topology_preferred") or ""
        topologies = {choice.partition(":")[0] for choice in (required, preferred) if choice}
        if len(topologies) > 1:
            self.add_error("topology_preferred", _("Choose levels of one topology."))
        levels = [choice.partition(":")[2] or None for choice in (required, preferred)]
        near = {"topology": "".join(topologies), "required": levels[0], "preferred": levels[1]}
        trains = data.get("kind") == JobKind.TRAINING.value
        self._clean_sweep(data)
        self._clean_template(data)
        self._store_code(data)
        data["topology_constraint"] = near if len(topologies) == 1 and trains else None
        data["roles"] = []
        if self.roles.is_bound and trains:
            if self.roles.is_valid():
                data["roles"] = self.roles.to_roles()
            else:
                self.add_error(None, self.roles.first_error())
        self._fill_parameters(data)
        return data

    def _store_code(self, data: dict[str, Any]) -> None:
        """Store an uploaded archive, and show its hash in the form; it need not be uploaded again."""
        uploaded, project = data.get("code_upload"), data.get("project")
        if not uploaded or project is None or data.get("kind") == JobKind.WORKSPACE.value:
            return
        try:
            data["code_archive"] = do_store_archive(self.user, project, uploaded).sha256
        except FairwayError as error:
            fields = error.fields if isinstance(error, InvalidRequest) else {}
            self.add_error("code_upload", " ".join(fields.values()) or error.message)
            return
        shown: Any = self.data
        self.data = shown.copy()
        self.data["code_archive"] = data["code_archive"]  # type: ignore[index]

    def _clean_template(self, data: dict[str, Any]) -> None:
        """Check the version of the template, and read the values of its parameters, without those of a sweep."""
        data["parameters"] = {}
        if self.from_template is None:
            data["template_version"] = None
            return
        try:
            check_template_version(self.from_template, data.get("template_version"))
        except InvalidRequest as error:
            self.add_error(None, " ".join(error.fields.values()))
        data["template_version"] = self.from_template.version
        space = data["points"][0] if data["points"] else data["search_space"]
        swept = space.keys() - set(self.filled_fields.values())
        for each in self.declared:
            value = data.get(parameter_field_name(each.name))
            empty = value is None or (value == "" and each.choices)
            if each.name not in swept:
                data["parameters"][each.name] = each.default if empty else value

    def _fill_parameters(self, data: dict[str, Any]) -> None:
        """Fill command, variables and roles with the parameters, and the fields that are parameters."""
        if not self.declared or self.errors:
            return
        values, swept = data["parameters"], len(data["parameters"]) < len(self.declared)
        roles = [{"role": role, "command": role.command} for role in data["roles"]]
        given = {"command": data["command"], "env": data["env"], "roles": roles}
        if error := shell_error(given):
            self.add_error("command", error)
            return
        filled = fill_fields(given, values, of_sweep=swept)
        data |= {"command": filled["command"], "env": filled["env"]}
        data["roles"] = [replace(each["role"], command=each["command"]) for each in filled["roles"]]

    def _clean_sweep(self, data: dict[str, Any]) -> None:
        """Read the lines of parameters, and check the sweep."""
        data["search_space"], data["points"] = {}, []
        if not data.get("searcher") or "sweep_parameters" not in data:
            return
        if data.get("cron"):
            self.add_error("cron", _("A sweep cannot be repeated; choose one of both."))
        try:
            if data["searcher"] == Searcher.LIST:
                data["points"] = parse_point_lines(data["sweep_parameters"])
            else:
                data["search_space"] = parse_parameter_lines(data["sweep_parameters"])
        except ValueError as error:
            self.add_error("sweep_parameters", str(error))
            return
        for name, message in sweep_errors(
            self._sweep_spec(data), data["search_space"], data["points"]
        ).items():
            self.add_error(name if name in self.fields else "sweep_parameters", message)

    def _sweep_spec(self, data: Mapping[str, Any]) -> SweepSpec:
        return SweepSpec(**request_values(SweepSpec, data))

    def to_sweep(self) -> dict[str, Any] | None:
        """Return the sweep of a valid form as arguments of its service, without the job; None for one job."""
        data = self.cleaned_data
        if not data["searcher"] or data["kind"] != JobKind.TRAINING.value:
            return None
        return {"spec": self._sweep_spec(data), "parameters": data["search_space"], "points": data["points"]}

    def to_schedule(self) -> ScheduleSpec | None:
        """Return the schedule of a valid form; None for a single job."""
        data = self.cleaned_data
        if not data["cron"] or data["kind"] != JobKind.TRAINING.value:
            return None
        return ScheduleSpec(**request_values(ScheduleSpec, data))

    def clean_typed_amounts(self) -> tuple[str, ...] | None:
        return parse_typed(self.cleaned_data["typed_amounts"])

    def clean_program(self) -> str:
        return str(self.cleaned_data["program"]).replace("\r\n", "\n")

    def as_posted(self) -> LaunchForm:
        """Return a form bound to the initial values of this one. Both share their fields."""
        bound: Any = copy.copy(self)
        bound.data, bound.is_bound = self._initial_as_data(), True
        bound._errors, bound._bound_fields_cache = None, {}
        posted = bound.data if "roles-TOTAL_FORMS" in bound.data else None
        bound.roles = RoleFormSet(posted, prefix="roles", initial=self.roles.initial)
        form: LaunchForm = bound
        return form

    def _initial_as_data(self) -> dict[str, Any]:
        values = {name: self[name].value() for name in self.fields}
        return {
            name: value for name, value in values.items() if value is not None and value is not False
        } | self.roles.as_data()

    def to_deployment(self) -> Deployment | None:
        """Return the service of a valid form; None for another kind."""
        data = self.cleaned_data
        if data["kind"] != JobKind.SERVICE.value:
            return None
        model = ModelReference(data["model_name"], data["model_version"]) if data["model_name"] else None
        return Deployment(ServiceSpec(**request_values(ServiceSpec, data)), self.to_job_request(), model)

    def clean_env(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in _LINE_END.split(self.cleaned_data["env"]):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, sign, value = line.partition("=")
            if not sign:
                raise forms.ValidationError(_("“{line}” is not NAME=value.").format(line=line.strip()[:40]))
            found[name.strip()] = value.strip()
        return found

    def clean_rank_overrides(self) -> dict[str, dict[str, str]]:
        """Convert RANK NAME=value lines to the API's format."""
        found: dict[str, dict[str, str]] = {}
        for line in filter(None, map(str.strip, _LINE_END.split(self.cleaned_data["rank_overrides"]))):
            rank, __, variable = line.partition(" ")
            name, sign, value = variable.partition("=")
            if not sign or not rank.isdecimal() or len(rank) > MAX_DIGITS:
                raise forms.ValidationError(_("“{line}” is not RANK NAME=value.").format(line=line[:40]))
            found.setdefault(str(int(rank)), {})[name.strip()] = value.strip()
        return found

    def clean_dependency_ids(self) -> list[Job]:
        keys = re.split(r"[\s,;]+", self.cleaned_data["dependency_ids"].strip())
        keys = list(dict.fromkeys(key for key in keys if key))
        seen = {job.public_id: job for job in visible_jobs(self.user).filter(public_id__in=keys)}
        for key in keys:
            if key not in seen:
                raise forms.ValidationError(unknown_job_message(key))
        return [seen[key] for key in keys]

    def all_dependencies(self) -> list[Job]:
        data = self.cleaned_data
        return list(dict.fromkeys([*data["dependencies"], *data["dependency_ids"]]))

    def clean_command(self) -> list[str]:
        return parse_command(self.cleaned_data["command"])

    def to_job_request(self) -> JobRequest:
        data = self.cleaned_data
        values = request_values(self.request_type, data)
        values |= {name: data[name] for name in _REQUEST_VALUES}
        values |= {name: data["parameters"][each] for name, each in self.filled_fields.items()}
        values["launcher_options"] = launcher_options(data.get("launcher") or JobSpec.launcher, data)
        if values["gpus_per_task"] != 1 or values["mig_profile"]:
            values["milli_per_gpu"] = WHOLE_MILLI
        if values["kind"] != JobKind.TRAINING.value:
            rules = job_fields(self.request_type).values()
            kept = {"kind"}
            if values["kind"] == JobKind.SERVICE.value:
                kept |= {"command"} | {rule.name for rule in rules if rule.section == "code"}
            values |= {rule.name: rule.default for rule in rules if rule.jobs_only and rule.name not in kept}
            if not values["command"] and values["kind"] == JobKind.SERVICE.value and data["model_name"]:
                values["command"] = mlflow_command(data["model_name"], data["model_version"])
        return self.request_type(**values, secrets=self.secrets(), dependencies=self.all_dependencies())


def dependency_candidates(user: User, chosen: list[str]) -> QuerySet[Job]:
    """Return the user's newest live jobs, and those in ``chosen`` even if they have ended since."""
    mine = visible_jobs(user).filter(owner=user, kind=JobKind.TRAINING.value)
    newest = (
        mine.filter(state__in=[state.value for state in LIVE_JOB_STATES])
        .order_by("-id")
        .values("pk")[:RECENT_JOBS]
    )
    return mine.filter(Q(pk__in=newest) | Q(public_id__in=chosen)).order_by("-id")


def launchable_projects(user: User) -> QuerySet[Project]:
    """Return the projects in which the user may submit jobs."""
    rows = Project.objects.filter(archived_at__isnull=True).order_by("name")
    return rows if user.is_admin else rows.filter(pk__in=project_ids(user, Role.MEMBER))


def _level_label(row: Topology, key: str, is_named: bool) -> str:
    level = key.rpartition("/")[2]
    return _("{level} of {topology}").format(level=level, topology=row.name) if is_named else level
