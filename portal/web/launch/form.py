"""The launch form, and its conversion to a JobRequest."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from django import forms
from django.db.models import Q, QuerySet
from django.http import QueryDict

from agents.launchers import LAUNCHERS
from portal.access import project_ids, visible_environments, visible_jobs
from portal.domain.states import LIVE_JOB_STATES, JobKind, Role
from portal.models import Environment, Gpu, Job, NodePool, Project, Template, Topology, User
from portal.selectors.nodes.nodes import list_templates
from portal.services.jobs.dependencies import unknown_job_message
from portal.services.jobs.submission import JobRequest
from portal.web.display.formatting import MAX_DIGITS
from portal.web.launch.data_fields import DataForm

SHELL = ["/bin/sh", "-c"]
_SHELL_SYNTAX = re.compile(r"[|&;<>()$`\n*?~#]")
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|d)?\s*$", re.IGNORECASE)
_UNIT_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
KINDS = [
    (JobKind.WORKSPACE.value, "Notebook"),
    (JobKind.TRAINING.value, "Job"),
]
RECENT_JOBS = 8
LAUNCHER_LABELS = {
    "none": "none: RANK, WORLD_SIZE and the like",
    "torchrun": "torchrun: a process for each GPU",
}
GPU_FRACTIONS = [(1000, "whole GPUs"), (500, "half of one GPU"), (250, "a quarter of one GPU")]


class DurationField(forms.CharField):
    """A duration such as 90 min, 12 h or 2 d; empty means no limit. The value is seconds or None."""

    def clean(self, value: Any) -> Any:
        text = super().clean(value)
        if not text or text.strip().lower() == "none":
            return None
        found = _DURATION.match(text)
        if found is None:
            raise forms.ValidationError(
                "Write a time such as 90 min, 12 h or 2 d, or leave it empty for no limit."
            )
        if len(found[1]) > MAX_DIGITS:
            raise forms.ValidationError("That is longer than any job may run.")
        return int(float(found[1]) * _UNIT_SECONDS[(found[2] or "h").lower()])


def _text(**attrs: Any) -> forms.TextInput:
    return forms.TextInput({"class": "form-control", "autocomplete": "off", **attrs})


BOUNDS_MESSAGES = {
    "min_value": "Must be at least %(limit_value)s.",
    "max_value": "Must be at most %(limit_value)s.",
    "invalid": "Must be a number.",
}


def _number(**attrs: Any) -> forms.NumberInput:
    return forms.NumberInput({"class": "form-control", **attrs})


def _select() -> forms.Select:
    return forms.Select({"class": "form-select"})


if TYPE_CHECKING:
    _RowChoice = forms.ModelChoiceField[Any]
    _RowChoices = forms.ModelMultipleChoiceField[Any]
else:
    _RowChoice = forms.ModelChoiceField
    _RowChoices = forms.ModelMultipleChoiceField


class PublicIdChoiceField(_RowChoice):
    """A choice whose values are public ids."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, to_field_name="public_id", **kwargs)

    def label_from_instance(self, thing: Any) -> str:
        return str(getattr(thing, "title", "") or thing.name)


class PublicIdMultipleChoiceField(_RowChoices):
    """A multiple choice whose values are public ids."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, to_field_name="public_id", **kwargs)

    def label_from_instance(self, thing: Any) -> str:
        """Return its name and what distinguishes it from others of that name."""
        return f"{thing.name} ({thing.public_id})"


class LaunchForm(DataForm):
    """One form for workspaces and jobs; fields that do not apply to a kind are ignored."""

    kind = forms.ChoiceField(choices=KINDS, initial=JobKind.WORKSPACE.value, widget=forms.RadioSelect)
    name = forms.CharField(max_length=100, widget=_text())
    project = PublicIdChoiceField(queryset=Project.objects.none(), widget=_select())
    template = PublicIdChoiceField(queryset=Template.objects.none(), required=False, widget=forms.HiddenInput)
    environment = PublicIdChoiceField(queryset=Environment.objects.none(), widget=_select())
    pool = PublicIdChoiceField(
        queryset=NodePool.objects.none(), required=False, empty_label="Any pool", widget=_select()
    )
    gpu_model = forms.CharField(max_length=100, required=False)
    gpus_per_task = forms.IntegerField(
        label="GPUs", min_value=0, max_value=64, initial=1, widget=_number(min=0, max=64)
    )
    tasks = forms.IntegerField(
        label="Tasks", min_value=1, max_value=1024, initial=1, widget=_number(min=1, max=1024),
        help_text="Equal parts that start together; each may sit on another node.",
    )  # fmt: skip
    min_tasks = forms.IntegerField(
        label="Tasks, at least", min_value=1, max_value=1024, required=False,
        widget=_number(min=1, max=1024, placeholder="all"),
        help_text="It starts with so many, and grows and shrinks while it runs.",
    )  # fmt: skip
    milli_per_gpu = forms.TypedChoiceField(
        label="Of each GPU",
        choices=GPU_FRACTIONS,
        coerce=int,
        initial=1000,
        widget=_select(),
        required=False,
        help_text="A share is cooperative: other jobs of the project may use the same GPU.",
    )
    mig_profile = forms.ChoiceField(
        label="MIG slices", required=False, widget=_select(),
        help_text="Parts of a GPU, each alone with its memory; each counts as one GPU.",
    )  # fmt: skip
    min_compute_capability = forms.FloatField(
        label="Compute capability, at least", required=False, min_value=1, max_value=99.9,
        widget=_number(min=1, max=99.9, step="0.1"), help_text="Such as 8.0.",
    )  # fmt: skip
    min_gpu_memory_gib = forms.FloatField(
        label="Memory of a GPU, at least, GiB", required=False, min_value=0.1, max_value=9_000,
        widget=_number(min=0.1, max=9_000, step="any"), help_text="Such as 80.",
    )  # fmt: skip
    topology_required = forms.ChoiceField(
        label="Required topology level", required=False, widget=_select(),
        help_text="They start together there, or wait until one has room.",
    )  # fmt: skip
    topology_preferred = forms.ChoiceField(
        label="Preferred topology level", required=False, widget=_select(),
        help_text="Tried first; keeps nothing waiting.",
    )  # fmt: skip
    cores = forms.FloatField(
        label="CPU cores for each task", min_value=0.1, initial=1, widget=_number(min=0.1, step="any")
    )
    memory_gib = forms.FloatField(
        label="Memory for each task, GiB", min_value=0.1, initial=2, widget=_number(min=0.1, step="any")
    )
    shm_mib = forms.IntegerField(
        label="Shared memory for each task, MiB", min_value=1, max_value=1024 * 1024, initial=64, required=False,
        widget=_number(min=1, max=1024 * 1024), help_text="Of its memory; data loaders use it between processes.",
    )  # fmt: skip
    command = forms.CharField(
        max_length=65536, required=False,
        widget=forms.Textarea({"class": "form-control", "spellcheck": "false", "rows": 4}),
        help_text="With pipes, variables or several lines it is run by /bin/sh -c.",
    )  # fmt: skip
    env = forms.CharField(
        label="Variables", max_length=65536, required=False,
        widget=forms.Textarea({"class": "form-control", "rows": 3, "placeholder": "NAME=value"}),
        help_text="One NAME=value a line.",
    )  # fmt: skip
    time_limit_s = DurationField(
        label="Time limit",
        required=False,
        widget=_text(placeholder="no limit"),
        help_text="Such as 90 min, 12 h, 2 d.",
    )
    preemptible = forms.BooleanField(
        required=False, initial=True, label="Preemptible",
        widget=forms.CheckboxInput({"class": "form-check-input"}),
    )  # fmt: skip
    priority = forms.IntegerField(
        min_value=-100, max_value=100, initial=0, required=False, widget=_number(min=-100, max=100),
        help_text="Higher goes first within the project; above 0 needs a manager.",
    )  # fmt: skip
    max_attempts = forms.IntegerField(
        label="Max attempts", min_value=1, max_value=20, initial=3, required=False, widget=_number(min=1, max=20),
        help_text="After failures of the cluster's making.",
    )  # fmt: skip
    retry_on_failure = forms.BooleanField(
        required=False, label="Retry on failure",
        widget=forms.CheckboxInput({"class": "form-check-input"}),
    )  # fmt: skip
    launcher = forms.ChoiceField(
        label="Launcher", required=False, widget=_select(), initial="none",
        choices=[(name, LAUNCHER_LABELS.get(name, name)) for name in LAUNCHERS],
        help_text="How tasks are told of each other.",
    )  # fmt: skip
    termination_grace_s = forms.IntegerField(
        label="Termination grace period (s)", min_value=1, max_value=600, initial=30, required=False,
        widget=_number(min=1, max=600), help_text="From the request to stop until it is killed.",
    )  # fmt: skip
    dependencies = PublicIdMultipleChoiceField(
        label="Your jobs that have not ended", queryset=Job.objects.none(), required=False,
        widget=forms.CheckboxSelectMultiple({"class": "form-check-input"}),
    )  # fmt: skip
    dependency_ids = forms.CharField(
        label="Other jobs, by id", max_length=2000, required=False, widget=_text(),
        help_text="Several with spaces between. The id stands in a job's address.",
    )  # fmt: skip
    ignore_dependency_failure = forms.BooleanField(
        required=False, label="Start even if they fail",
        widget=forms.CheckboxInput({"class": "form-check-input"}),
    )  # fmt: skip

    def __init__(self, user: User, data: Any = None, *, initial: dict[str, Any] | None = None) -> None:
        super().__init__(data, initial=initial, label_suffix="")
        for field in self.fields.values():
            if isinstance(field, forms.IntegerField):  # includes FloatField, a subclass
                field.error_messages |= BOUNDS_MESSAGES
        self.user = user
        self._set_queryset("project", launchable_projects(user))
        self._set_queryset("environment", visible_environments(user).filter(enabled=True).order_by("title"))
        self._set_queryset("pool", NodePool.objects.order_by("name"))
        self._set_queryset("template", list_templates(user))
        self.has_topology_levels = self._set_topology_levels()
        profiles = Gpu.objects.filter(present=True).exclude(mig_profile="").order_by("mig_profile")
        slices = list(profiles.values_list("mig_profile", flat=True).distinct())
        self.has_mig_slices = bool(slices)
        self._set_choices("mig_profile", [("", "Whole GPUs"), *((name, name) for name in slices)])
        chosen = data.getlist("dependencies") if isinstance(data, QueryDict) else []
        self._set_queryset("dependencies", dependency_candidates(user, chosen))

    def _set_queryset(self, name: str, rows: QuerySet[Any]) -> None:
        field = self.fields[name]
        assert isinstance(field, PublicIdChoiceField | PublicIdMultipleChoiceField)  # noqa: S101
        field.queryset = rows

    def _set_topology_levels(self) -> bool:
        """Offer the levels of all topologies; return False when there are none."""
        rows = list(Topology.objects.order_by("name"))
        named = len(rows) > 1
        levels = [
            (f"{row.name}:{key}", key.rpartition("/")[2] + (f" of {row.name}" if named else ""))
            for row in rows
            for key in row.levels
        ]
        for name, nothing in (("topology_required", "Anywhere"), ("topology_preferred", "No preference")):
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
            self.add_error("topology_preferred", "Choose levels of one topology.")
        levels = [choice.partition(":")[2] or None for choice in (required, preferred)]
        near = {"topology": "".join(topologies), "required": levels[0], "preferred": levels[1]}
        data["topology_constraint"] = near if len(topologies) == 1 else None
        return data

    def clean_env(self) -> dict[str, str]:
        """Return NAME=value lines as a dictionary."""
        found: dict[str, str] = {}
        for line in self.cleaned_data["env"].splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, sign, value = line.partition("=")
            if not sign:
                raise forms.ValidationError(f"“{line.strip()[:40]}” is not NAME=value.")
            found[name.strip()] = value.strip()
        return found

    def clean_dependency_ids(self) -> list[Job]:
        """Return the jobs of these ids."""
        keys = re.split(r"[\s,;]+", self.cleaned_data["dependency_ids"].strip())
        keys = list(dict.fromkeys(key for key in keys if key))
        seen = {job.public_id: job for job in visible_jobs(self.user).filter(public_id__in=keys)}
        for key in keys:
            if key not in seen:
                raise forms.ValidationError(unknown_job_message(key))
        return [seen[key] for key in keys]

    def all_dependencies(self) -> list[Job]:
        """Return chosen and typed jobs without duplicates."""
        data = self.cleaned_data
        return list(dict.fromkeys([*data["dependencies"], *data["dependency_ids"]]))

    def clean_command(self) -> list[str]:
        """Return the command as an argument list."""
        text = self.cleaned_data["command"].replace("\r\n", "\n").strip()
        if not text:
            return []
        if _SHELL_SYNTAX.search(text):
            return [*SHELL, text]
        try:
            return shlex.split(text)
        except ValueError as problem:
            raise forms.ValidationError("A quotation mark is not closed.") from problem

    def to_job_request(self) -> JobRequest:
        """Return the valid form as a request."""
        data = self.cleaned_data
        workspace = data["kind"] == JobKind.WORKSPACE.value
        return JobRequest(
            name=data["name"].strip(),
            project=data["project"],
            environment=data["environment"],
            kind=data["kind"],
            pool=data["pool"],
            template=data["template"],
            tasks=1 if workspace else data["tasks"],
            min_tasks=None if workspace else data["min_tasks"],
            gpus_per_task=data["gpus_per_task"],
            milli_per_gpu=(data["milli_per_gpu"] or 1000)
            if data["gpus_per_task"] == 1 and not data["mig_profile"]
            else 1000,
            mig_profile=data["mig_profile"],
            min_compute_capability=data["min_compute_capability"],
            gpu_model=data["gpu_model"],
            min_gpu_memory_mib=round(data["min_gpu_memory_gib"] * 1024)
            if data["min_gpu_memory_gib"]
            else None,
            topology_constraint=None if workspace else data["topology_constraint"],
            cpu_milli=round(data["cores"] * 1000),
            memory_mib=round(data["memory_gib"] * 1024),
            command=[] if workspace else data["command"],
            env=data["env"],
            volumes=data["volumes"],
            secrets=self.secrets(),
            shm_mib=data["shm_mib"] or 64,
            termination_grace_s=data["termination_grace_s"] or 30,
            priority=data["priority"] or 0,
            preemptible=data["preemptible"],
            time_limit_s=data["time_limit_s"],
            max_attempts=data["max_attempts"] or 3,
            retry_on_failure=data["retry_on_failure"] and not workspace,
            launcher="none" if workspace else data["launcher"] or "none",
            dependencies=self.all_dependencies(),
            ignore_dependency_failure=data["ignore_dependency_failure"],
        )


def dependency_candidates(user: User, chosen: list[str]) -> QuerySet[Job]:
    """Return the user's newest live jobs, and those in ``chosen`` even if they have ended since."""
    mine = visible_jobs(user).filter(owner=user).exclude(kind=JobKind.WORKSPACE.value)
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
