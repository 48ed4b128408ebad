"""The request of a job, declared once: fields, bounds, defaults and texts.

REST body, launch form, validation, preview query, snapshot columns and copies of a job are derived from
``JobSpec``. Amounts of CPU, memory and GPUs are per task.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from portal.domain.formatting import format_memory
from portal.domain.jobs.code import HOST_KEY_PATTERN, REF_PATTERN, URL_PATTERN
from portal.domain.jobs.end_states import FailureClass
from portal.domain.notices.notices import JOB_EVENTS, NO_NOTICES
from portal.domain.states import JobKind

MAX_TASKS = 1024
MAX_PROGRAM_LENGTH = 60_000
MAX_TIME_LIMIT_S = 30 * 24 * 3600
PROPORTIONAL_AMOUNTS = ("cpu_milli", "memory_mib", "shm_mib")
"""Amounts of a task that pages keep in proportion to its GPUs, unless their user has typed them."""
_METADATA_KEY = "job_field"
_T = TypeVar("_T")
_resolved: dict[type[Any], Mapping[str, JobField]] = {}


@dataclass(frozen=True)
class JobField:
    """One field of a request; ``declare`` gives what the annotation cannot say.

    - ``minimum`` and ``maximum`` are inclusive; both or neither are given.
    - ``error`` replaces the generated message for a value that is out of bounds or does not match ``pattern``.
    - ``unit``: ``s``, ``mib`` or blank, for messages.
    - ``help``: REST help, and the hint of the form unless ``form_help`` is given.
    - ``if_null``: what null means, for REST help and as a placeholder of the form.
    - ``label``: label on the launch form; blank fields are not on it, or are declared there.
    - ``section``: the part of the launch form that lists it; blank: the page names it.
    - ``form_name``, ``form_factor``: name and size of the unit that the form uses instead, such as GiB for MiB.
    - ``nouns``: words for 1 and for more, to name an amount in a suggestion.
    - ``affects_placement``: it takes part in scheduling, so the preview query and the snapshot have it.
    - ``jobs_only``: workspaces do not have it and use the default.
    - ``copied``: a resubmitted job copies it.
    - ``changeable``: when it can be changed after submission: ``waiting`` (while the job waits), ``unstarted``
      (while it waits for its first start), or blank (never).
    """

    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    max_length: int | None = None
    pattern: str = ""
    error: str = ""
    unit: str = ""
    help: str = ""
    form_help: str = ""
    if_null: str = ""
    label: str = ""
    section: str = ""
    form_name: str = ""
    form_factor: int = 1
    nouns: tuple[str, str] | None = None
    affects_placement: bool = False
    jobs_only: bool = False
    copied: bool = True
    changeable: str = ""
    name: str = ""
    value_type: type = str
    nullable: bool = False
    default: Any = None

    @property
    def is_scalar(self) -> bool:
        """True for numbers, flags, texts and times; lists and mappings have their own notation in each interface."""
        return self.value_type in (int, float, bool, str, dt.datetime)

    @property
    def is_list(self) -> bool:
        """True for lists of choices, numbers or texts of a pattern."""
        return self.value_type is Sequence and bool(self.choices or self.pattern or self.minimum is not None)

    @property
    def is_number(self) -> bool:
        return self.value_type in (int, float)

    def is_default(self, value: Any) -> bool:
        """Return True for the default; an empty list is the default of a field whose default is an empty tuple."""
        if self.value_type is Sequence and value is not None:
            return tuple(value) == tuple(self.default)
        return bool(value == self.default)

    def error_of(self, value: Any) -> str | None:
        """Return what is wrong with the value, or None."""
        if value is None and self.nullable:
            return None
        if self.is_list:
            wrong = [error for each in value if (error := self._item_error(each))]
            return wrong[0] if wrong else None
        if self.choices and value not in self.choices:
            return self.error or f"Choose one of {', '.join(self.choices)}."
        if self.value_type is str and self.is_scalar:
            if self.max_length is not None and len(value) > self.max_length:
                return self.error or f"Must have at most {self.max_length} characters."
            if self.pattern and value != self.default and not re.fullmatch(self.pattern, value):
                return self.error
        return self._bounds_error(value, int if self.value_type is int else (int, float))

    def _item_error(self, value: Any) -> str | None:
        if self.choices and value not in self.choices:
            return self.error or f"Choose among {', '.join(self.choices)}."
        if self.pattern and not (isinstance(value, str) and re.fullmatch(self.pattern, value)):
            return self.error
        return self._bounds_error(value, int)

    def _bounds_error(self, value: Any, accepted: Any) -> str | None:
        if self.minimum is None or self.maximum is None:
            return None
        if isinstance(value, accepted) and self.minimum <= value <= self.maximum:
            return None
        low, high = self._format(self.minimum), self._format(self.maximum)
        return self.error or f"Must be between {low} and {high}{' s' if self.unit == 's' else ''}."

    def _format(self, bound: float) -> str:
        return format_memory(int(bound)) if self.unit == "mib" else str(bound)


def declare(default: _T, rule: JobField | None = None) -> _T:
    """Return a dataclass field with its default and its rule."""
    metadata = {_METADATA_KEY: rule or JobField()}
    if isinstance(default, dict):
        return cast(_T, field(default_factory=default.copy, metadata=metadata))
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class JobRole:
    """A group of equal tasks of a job; an amount that is None, and an empty command, is the job's."""

    name: str = declare(
        "",
        JobField(
            max_length=20, pattern=r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", label="Name",
            error="Use up to 20 lower-case letters, digits and hyphens; begin with a letter.",
        ),
    )  # fmt: skip
    tasks: int = declare(1, JobField(minimum=1, maximum=MAX_TASKS, label="Tasks"))
    command: Sequence[str] = declare((), JobField())
    gpus_per_task: int | None = declare(
        None, JobField(minimum=0, maximum=64, label="GPUs per task", if_null="as the job")
    )
    cpu_milli: int | None = declare(
        None,
        JobField(
            minimum=100, maximum=1_000_000, label="CPU cores", form_name="cores", form_factor=1000,
            if_null="as the job",
        ),
    )  # fmt: skip
    memory_mib: int | None = declare(
        None,
        JobField(
            minimum=32, maximum=64 * 1024 * 1024, unit="mib", label="Memory, GiB", form_name="memory_gib",
            form_factor=1024, if_null="as the job",
        ),
    )  # fmt: skip
    ports: Sequence[str] = declare((), JobField())
    start_order: int = declare(
        0,
        JobField(
            minimum=0, maximum=100, label="Start order",
            help="Its tasks start when all tasks of lower orders run, and listen on the ports of their role.",
            form_help="Lower starts first.",
        ),
    )  # fmt: skip
    may_fail: bool = declare(
        False, JobField(label="May fail", help="A failed task of this role does not end the job.")
    )


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A request for a job, without the rows that it refers to."""

    name: str = field(
        metadata={
            _METADATA_KEY: JobField(
                max_length=100,
                pattern=r"[A-Za-z0-9]([A-Za-z0-9._ -]{0,98}[A-Za-z0-9])?",
                error="Use up to 100 letters, digits, spaces, dots, hyphens; begin and end with a letter or digit.",
                affects_placement=True,
            )
        }
    )
    kind: str = declare(
        JobKind.TRAINING.value,
        JobField(choices=tuple(kind.value for kind in JobKind), affects_placement=True, jobs_only=True),
    )
    tasks: int = declare(
        1,
        JobField(
            minimum=1, maximum=MAX_TASKS, label="Tasks", nouns=("task", "tasks"),
            help="Identical tasks that start together; each may run on another node.",
            affects_placement=True, changeable="unstarted", jobs_only=True,
        ),
    )  # fmt: skip
    min_tasks: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=MAX_TASKS, label="Minimum tasks", nouns=("task at least", "tasks at least"),
            help="The job starts with this many, and grows and shrinks while it runs.", if_null="all",
            affects_placement=True, changeable="unstarted", jobs_only=True,
        ),
    )  # fmt: skip
    gpus_per_task: int = declare(
        1,
        JobField(
            minimum=0, maximum=64, label="GPUs", nouns=("GPU each", "GPUs each"), affects_placement=True,
            changeable="unstarted",
        ),
    )  # fmt: skip
    milli_per_gpu: int = declare(
        1000,
        JobField(
            minimum=1, maximum=1000, help="1000 is a whole GPU.", affects_placement=True, changeable="unstarted",
        ),
    )  # fmt: skip
    gpu_model: str = declare("", JobField(max_length=100, affects_placement=True, changeable="unstarted"))
    min_gpu_memory_mib: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=10_000_000, unit="mib", label="Minimum GPU memory, GiB",
            form_help="Such as 80.", form_name="min_gpu_memory_gib", form_factor=1024, section="gpu_kind",
            nouns=("GiB of GPU memory", "GiB of GPU memory"), affects_placement=True, changeable="unstarted",
        ),
    )  # fmt: skip
    mig_profile: str = declare(
        "",
        JobField(
            max_length=32, pattern=r"[1-9][0-9]?g\.[1-9][0-9]{0,3}gb([+.][a-z0-9.]{1,12})?",
            error="Enter a MIG profile such as 1g.10gb.", nouns=("slice", "slices"),
            help="MIG slices of this profile; blank: whole GPUs.", section="gpu_kind",
            affects_placement=True, changeable="unstarted",
        ),
    )  # fmt: skip
    min_compute_capability: float | None = declare(
        None,
        JobField(
            minimum=1.0, maximum=99.9, error="Enter a compute capability such as 8.0.",
            label="Minimum compute capability", help="Such as 8.0.", section="gpu_kind",
            nouns=("as compute capability", "as compute capability"), affects_placement=True,
            changeable="unstarted",
        ),
    )  # fmt: skip
    allow_mixed_gpus: bool = declare(
        False,
        JobField(
            label="Allow different GPUs", section="gpu_kind", affects_placement=True, changeable="unstarted",
            jobs_only=True,
            help="Tasks that start together may use GPUs of different models, and nodes on different fabrics.",
        ),
    )  # fmt: skip
    topology_constraint: Mapping[str, str | None] | None = declare(None, JobField(affects_placement=True))
    preferred_nodes: Sequence[str] = declare(
        (),
        JobField(
            pattern=r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", error="Enter names of nodes.",
            label="Preferred nodes", affects_placement=True, jobs_only=True,
            help="The name of a node for each task, in the order of ranks. They are used if they can take all "
            "tasks when the job starts; otherwise it starts on other nodes.",
        ),
    )  # fmt: skip
    cpu_milli: int = declare(
        1000,
        JobField(
            minimum=100, maximum=1_000_000, label="CPU cores for each task", form_name="cores",
            form_factor=1000, nouns=("CPU core", "CPU cores"), affects_placement=True, changeable="unstarted",
        ),
    )  # fmt: skip
    memory_mib: int = declare(
        2048,
        JobField(
            minimum=32, maximum=64 * 1024 * 1024, unit="mib", label="Memory for each task, GiB",
            form_name="memory_gib", form_factor=1024, nouns=("GiB of memory", "GiB of memory"),
            affects_placement=True, changeable="unstarted",
        ),
    )  # fmt: skip
    shm_mib: int = declare(
        64,
        JobField(
            minimum=1, maximum=1024 * 1024, unit="mib", label="Shared memory for each task, MiB",
            help="Part of its memory; data loaders share data through it.", section="software",
            changeable="unstarted",
        ),
    )  # fmt: skip
    command: Sequence[str] = declare((), JobField(jobs_only=True))
    program: str = declare(
        "",
        JobField(
            max_length=MAX_PROGRAM_LENGTH, jobs_only=True,
            help="Text of a program. Each task has it as the file program in the directory $FAIRWAY_SECRETS; the "
            "command refers to it as {fairway:secrets}/program.",
        ),
    )  # fmt: skip
    code_repository: str = declare(
        "",
        JobField(
            max_length=500, pattern=URL_PATTERN, label="Git repository", section="code", jobs_only=True,
            error="Enter a URL such as https://git.example.org/lab/vit.git or git@git.example.org:lab/vit.git, "
            "without a password.",
            help="Checked out before the command, which runs in its folder. A private one needs a secret as a file: "
            "git_key (SSH) or git_token (https).",
        ),
    )  # fmt: skip
    code_ref: str = declare(
        "",
        JobField(
            max_length=200, pattern=REF_PATTERN, label="Branch, tag or commit", section="code", jobs_only=True,
            error="Enter the name of a branch or tag, or the hash of a commit.",
            help="Blank: the default branch. Later attempts use the commit of the first one.",
        ),
    )  # fmt: skip
    code_host_key: str = declare(
        "",
        JobField(
            max_length=900, pattern=HOST_KEY_PATTERN, label="Host key", section="code", jobs_only=True,
            error="Enter type and key, such as ssh-ed25519 AAAA..., without the name of the host.",
            help="Public key of the git server, for an SSH URL; known for github.com, gitlab.com and bitbucket.org.",
        ),
    )  # fmt: skip
    code_archive: str = declare(
        "",
        JobField(
            max_length=64, pattern=r"[0-9a-f]{64}", label="Uploaded archive", section="code", jobs_only=True,
            error="Enter the SHA-256 of an uploaded archive: 64 hexadecimal digits.",
            help="SHA-256 of an archive that was uploaded to the project. It is unpacked before the command, which "
            "runs in its folder.",
        ),
    )  # fmt: skip
    code_path: str = declare(
        "",
        JobField(
            max_length=500, pattern=r"/?[^\x00-\x1f,:/]+(/[^\x00-\x1f,:/]+)*", label="Path on a volume",
            section="code", error="Enter a path such as vit/src or /volumes/code/vit.",
            help="Folder in the home, or in a volume of the job, in which the command or the tool starts, without a "
            "copy.",
        ),
    )  # fmt: skip
    template_version: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=1_000_000_000, if_null="the present one",
            help="Version of the template on which the request is based; refused if there is a newer one.",
        ),
    )  # fmt: skip
    parameters: Mapping[str, Any] = declare({})
    env: Mapping[str, str] = declare({})
    volumes: Sequence[Mapping[str, Any]] = declare((), JobField(affects_placement=True))
    secrets: Sequence[Mapping[str, Any]] = declare(())
    priority: int = declare(
        0,
        JobField(
            minimum=-100, maximum=100, label="Priority", section="limits",
            help="Higher starts first within the project; above 0 requires a manager.",
            affects_placement=True, changeable="waiting",
        ),
    )  # fmt: skip
    preemptible: bool = declare(
        True, JobField(label="Preemptible", affects_placement=True, changeable="unstarted")
    )
    time_limit_s: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=MAX_TIME_LIMIT_S, unit="s", if_null="no limit", section="limits",
            affects_placement=True, changeable="waiting",
        ),
    )  # fmt: skip
    termination_grace_s: int = declare(
        30,
        JobField(
            minimum=1, maximum=600, unit="s", label="Termination grace period (s)", section="limits",
            help="Time between SIGTERM and SIGKILL.",
        ),
    )  # fmt: skip
    max_attempts: int = declare(
        3,
        JobField(
            minimum=1, maximum=20, label="Max attempts", section="limits",
            help="Retries follow failures of the cluster.",
        ),
    )  # fmt: skip
    retry_on: Sequence[str] = declare(
        (FailureClass.NODE_FAILURE.value,),
        JobField(
            choices=tuple(each.value for each in FailureClass), label="Retry after", jobs_only=True,
            help="Failures after which the job starts again from its newest valid checkpoint, all tasks together.",
        ),
    )  # fmt: skip
    retry_exit_codes: Sequence[int] = declare(
        (),
        JobField(
            minimum=1, maximum=255, label="Exit codes to retry", section="restart", jobs_only=True,
            help="Exit codes that count as command_failure; empty for any.",
        ),
    )  # fmt: skip
    retry_backoff_s: int = declare(
        10,
        JobField(
            minimum=1, maximum=3600, unit="s", label="Retry delay (s)", section="restart", jobs_only=True,
            help="Delay before the first retry; doubled for each later one.",
        ),
    )  # fmt: skip
    retry_max_backoff_s: int = declare(
        300,
        JobField(
            minimum=1, maximum=86_400, unit="s", label="Longest retry delay (s)", section="restart",
            jobs_only=True,
        ),
    )  # fmt: skip
    exclude_failed_node: bool = declare(
        False,
        JobField(
            label="Exclude the node of a failure", section="restart", jobs_only=True,
            help="Retries avoid the node on which a task failed, while enough other nodes are left.",
        ),
    )  # fmt: skip
    apply_failure_actions: bool = declare(
        False,
        JobField(
            label="Apply failure actions", section="restart", jobs_only=True,
            help="After a failure that a failure rule identifies, the job starts again with the action of the "
            "rule (retry, more memory, or without the node), at most max_attempts times.",
        ),
    )  # fmt: skip
    notify: Sequence[str] = declare(
        (),
        JobField(
            choices=(NO_NOTICES, *JOB_EVENTS), label="Notify me of",
            help="Events of this job that are sent to you by e-mail, too, instead of those of your preferences; "
            "none: only what must not be missed.",
        ),
    )  # fmt: skip
    seed: int | None = declare(
        None,
        JobField(
            minimum=0, maximum=2**31 - 1, label="Seed", section="software", if_null="not set", jobs_only=True,
            help="Value of FAIRWAY_SEED, from which a script seeds its random numbers.",
        ),
    )  # fmt: skip
    checkpoint_dir: str = declare(
        "",
        JobField(
            max_length=500, pattern=r"/?[^\x00-\x1f,:/]+(/[^\x00-\x1f,:/]+)*",
            error="Enter a path such as checkpoints or /volumes/runs/checkpoints.",
            label="Checkpoint directory", section="checkpoints", jobs_only=True,
            help="Folder in the home, or in a volume of the job, below which its checkpoints are kept in a "
            "folder of its own. What a program saves directly in it counts, too. Blank: checkpoints in the home.",
        ),
    )  # fmt: skip
    checkpoint_keep_last: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=500, label="Checkpoints to keep", if_null="all", section="checkpoints",
            jobs_only=True, help="Number of newest valid checkpoints that are kept; older ones are deleted.",
        ),
    )  # fmt: skip
    checkpoint_keep_every: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=1_000_000_000, label="Keep every nth step", if_null="none", jobs_only=True,
            section="checkpoints", help="Also keep checkpoints whose step is a multiple of this number.",
        ),
    )  # fmt: skip
    resume_from: str = declare(
        "",
        JobField(
            max_length=16, pattern=r"[a-z0-9]+", error="Enter the id of a checkpoint.", copied=False,
            label="Resume from", section="checkpoints", jobs_only=True,
            help="Id of a checkpoint of another job from which the first attempt starts; it is pinned.",
        ),
    )  # fmt: skip
    stall_timeout_s: int | None = declare(
        None,
        JobField(
            minimum=60, maximum=MAX_TIME_LIMIT_S, unit="s", label="Stall timeout (s)", section="restart",
            if_null="the policy of the pool", jobs_only=True,
            help="The job is stalled after this time without output, progress and use of its GPUs.",
        ),
    )  # fmt: skip
    on_stall: str = declare(
        "notify",
        JobField(
            choices=("notify", "end"), label="When it stalls", section="restart", jobs_only=True,
            help="notify: show a notice; end: end the attempt, which counts as the failure stall.",
        ),
    )  # fmt: skip
    launcher: str = declare(
        "none", JobField(affects_placement=True, jobs_only=True, help="How tasks find each other.")
    )
    launcher_options: Mapping[str, Any] = declare(
        {}, JobField(jobs_only=True, help="Options of the launcher by name (launchers/).")
    )
    rank_overrides: Mapping[str, Mapping[str, str]] = declare(
        {},
        JobField(
            jobs_only=True,
            help="Variables of single ranks, {rank: {name: value}}; they override those of the launcher.",
        ),
    )
    roles: Sequence[JobRole] = declare((), JobField(affects_placement=True, jobs_only=True))
    completion_role: str = declare(
        "",
        JobField(
            max_length=20, label="Role that ends the job", jobs_only=True,
            help="When all its tasks have ended, the other tasks are stopped; blank: all tasks must end.",
        ),
    )  # fmt: skip
    min_succeeded: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=MAX_TASKS, label="Minimum succeeded tasks", if_null="all", jobs_only=True,
            help="The job completes when this many tasks, of the role that ends it if there is one, have succeeded.",
        ),
    )  # fmt: skip
    held: bool = declare(False, JobField(copied=False))
    start_after: dt.datetime | None = declare(  # noqa: RUF009 - a field, as the others
        None,
        JobField(
            affects_placement=True, jobs_only=True, copied=False, if_null="as soon as possible",
            help="Time (RFC 3339) before which it does not start. Its age in the queue counts from then.",
        ),
    )  # fmt: skip
    ignore_dependency_failure: bool = declare(
        False,
        JobField(
            label="Start even if they fail", affects_placement=True, changeable="waiting", copied=False,
            help="Start after the dependencies however they end.",
        ),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Read the time of a stored request. Complete the roles, and derive from them tasks and amounts."""
        start_after: object = self.start_after
        if isinstance(start_after, str):
            object.__setattr__(self, "start_after", dt.datetime.fromisoformat(start_after))
        if not self.roles:
            return
        amounts = ("gpus_per_task", "cpu_milli", "memory_mib")
        roles = tuple(self._complete_role(role, amounts) for role in parse_roles(self.roles))
        derived = {name: max(getattr(role, name) for role in roles) for name in amounts}
        derived |= {"roles": roles, "tasks": sum(role.tasks for role in roles), "command": roles[0].command}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _complete_role(self, role: JobRole, amounts: Sequence[str]) -> JobRole:
        missing = {name: getattr(self, name) for name in amounts if getattr(role, name) is None}
        return replace(role, command=tuple(role.command or self.command), ports=tuple(role.ports), **missing)

    @property
    def is_elastic(self) -> bool:
        """True if it can run with fewer tasks than requested."""
        return self.min_tasks is not None and self.min_tasks < self.tasks

    @property
    def total_gpus(self) -> int:
        """GPUs of all tasks."""
        return total_gpus(self.roles) if self.roles else self.tasks * self.gpus_per_task

    @property
    def total_milli(self) -> int:
        """GPU milli of all tasks."""
        return self.total_gpus * self.milli_per_gpu


def parse_roles(stored: Sequence[JobRole | Mapping[str, Any]]) -> tuple[JobRole, ...]:
    """Return roles of their JSON form; roles are unchanged."""
    return tuple(role if isinstance(role, JobRole) else _parse_role(role) for role in stored)


def _parse_role(stored: Mapping[str, Any]) -> JobRole:
    lists = {name: tuple(stored.get(name) or ()) for name in ("command", "ports")}
    return JobRole(**{**stored, **lists})


def roles_as_json(roles: Sequence[JobRole]) -> list[dict[str, Any]]:
    return [
        {each.name: getattr(role, each.name) for each in fields(role)}
        | {"command": list(role.command), "ports": list(role.ports)}
        for role in roles
    ]


def time_error(value: object) -> str | None:
    """Return what is wrong with a time in RFC 3339, or None."""
    try:
        at = dt.datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        at = None
    if at is None or at.tzinfo is None or not 1970 < at.year < dt.MAXYEAR:
        return "Must be a time with its offset, such as 2027-03-01T08:00:00+01:00."
    return None


def json_value(value: Any) -> Any:
    """Return the value of a scalar field as JSON: a time is RFC 3339 in UTC."""
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
    return value


def total_gpus(roles: Sequence[JobRole]) -> int:
    """Return the GPUs of all tasks of complete roles."""
    return sum(role.tasks * (role.gpus_per_task or 0) for role in roles)


def job_fields(spec: type[Any] = JobSpec) -> Mapping[str, JobField]:
    """Return the declared fields of ``JobSpec`` or a subclass by name, in their order.

    Fields without a rule, such as rows, are left out.
    """
    if spec not in _resolved:
        hints = get_type_hints(spec)
        _resolved[spec] = {
            each.name: _resolve(each.metadata[_METADATA_KEY], hints[each.name], each)
            for each in fields(spec)
            if _METADATA_KEY in each.metadata
        }
    return _resolved[spec]


def _resolve(rule: JobField, hint: Any, declared: Field[Any]) -> JobField:
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    nullable = type(None) in get_args(hint)
    inner = next(each for each in get_args(hint) if each is not type(None)) if nullable else hint
    return replace(
        rule,
        name=declared.name,
        value_type=get_origin(inner) or inner,
        nullable=nullable,
        default=None if default is MISSING else default,
        form_name=rule.form_name or declared.name,
    )


def placement_fields(spec: type[Any] = JobSpec) -> tuple[str, ...]:
    return tuple(name for name, each in job_fields(spec).items() if each.affects_placement)


def field_errors(request: object) -> dict[str, str]:
    """Return what is wrong with single values of a request or another specification, by field."""
    rules = job_fields(type(request)).items()
    return {name: error for name, rule in rules if (error := rule.error_of(getattr(request, name)))}
