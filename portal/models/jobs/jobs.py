"""Jobs and their execution: attempts, tasks (ranks), allocations and events.

States and their transitions are tables in ``portal.domain.states``; only ``portal.services.lifecycle`` writes
them.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.db.models.expressions import Combinable
from django.db.models.fields.json import KeyTransform
from django.db.models.functions import Cast, Coalesce

from portal.domain.jobs.job_spec import MAX_PROGRAM_LENGTH, JobRole, JobSpec, parse_roles
from portal.domain.jobs.pipeline_plans import PLAN_VARIABLE, PROFILE_VARIABLE
from portal.domain.jobs.roles import CompletionPolicy, role_at, task_label
from portal.domain.states import FAILED_ATTEMPT_STATES, AttemptState, DesiredState, JobKind, JobState
from portal.models.columns import flag, one_of, optional_number, optional_text, optional_time
from portal.models.public_id import PublicIdField


def default_failure_classes() -> list[str]:
    return list(JobSpec.retry_on)


def total_gpus(job: str = "") -> Coalesce:
    """Return ``Job.total_gpus`` as an expression; ``job`` is the prefix of its columns, such as ``job__``.

    An invalid row may have any number of tasks: the product of two integers of a row fits into a bigint.
    """
    tasks = Cast(F(f"{job}tasks"), models.BigIntegerField())
    return Coalesce(
        F(f"{job}role_gpus"), tasks * F(f"{job}gpus_per_task"), output_field=models.BigIntegerField()
    )


class Job(models.Model):
    """What a user submitted: a gang of ``tasks`` equal tasks, each with GPUs, and a command or a tool.

    An elastic job starts with ``min_tasks`` of them, and grows and shrinks between the two while it runs.
    The tasks of a job with ``roles`` differ: its own amounts are then the largest of a task, and its command is
    that of the first role.
    """

    public_id = PublicIdField()
    name = models.CharField(max_length=100)
    kind = models.CharField(max_length=12, default=JobSpec.kind)
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="jobs", db_index=False)
    owner = models.ForeignKey("User", on_delete=models.PROTECT, related_name="jobs", db_index=False)
    pool = models.ForeignKey(
        "NodePool",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="jobs",
        help_text="null: any pool.",
    )
    environment = models.ForeignKey("Environment", on_delete=models.PROTECT, related_name="jobs")
    template = models.ForeignKey(
        "Template", null=True, blank=True, on_delete=models.SET_NULL, related_name="jobs"
    )

    image_digest = optional_text(
        600, "The image of all its attempts, recorded at submission; blank: set by its first start."
    )
    image_attempt = optional_number(
        "Number of the attempt whose node resolved the image; null: the environment did."
    )

    state = models.CharField(max_length=10, default=JobState.PENDING.value)
    desired_state = models.CharField(max_length=10, default=DesiredState.RUN.value)
    held = models.BooleanField(default=JobSpec.held)
    reason = models.CharField(
        max_length=40, blank=True, help_text="Reason code of the last state transition."
    )
    message = models.CharField(max_length=1000, blank=True, help_text="The reason as a message.")
    version = models.PositiveIntegerField(
        default=1, help_text="Incremented by each write; compared when a plan is committed."
    )

    gpu_switch = models.JSONField(
        null=True,
        blank=True,
        help_text="Columns that change when its attempt has ended, for a workspace that switches its GPUs.",
    )

    tasks = models.PositiveIntegerField(default=JobSpec.tasks)
    min_tasks = optional_number("Minimum number of tasks to run; null: all.")
    gpus_per_task = models.PositiveIntegerField(default=JobSpec.gpus_per_task)
    milli_per_gpu = models.PositiveIntegerField(default=JobSpec.milli_per_gpu)
    gpu_model = models.CharField(max_length=100, blank=True)
    min_gpu_memory_mib = optional_number()
    mig_profile = models.CharField(
        max_length=32, blank=True, help_text="MIG profile of the requested GPU slices; blank: whole GPUs."
    )
    min_compute_capability = models.FloatField(null=True, blank=True, help_text="Such as 8.0.")
    allow_mixed_gpus = flag("Its tasks may use GPUs of different models, and nodes on different fabrics.")
    topology_constraint = models.JSONField(
        null=True,
        blank=True,
        help_text="Topology constraint: {topology, required, preferred}; a level or null each.",
    )
    preferred_nodes = models.JSONField(
        default=list, db_default=[], help_text="The name of a node for each task; empty: no preference."
    )
    cpu_milli = models.PositiveIntegerField(default=JobSpec.cpu_milli, help_text="Per task.")
    memory_mib = models.PositiveIntegerField(default=JobSpec.memory_mib, help_text="Per task.")
    shm_mib = models.PositiveIntegerField(default=JobSpec.shm_mib)

    command = models.JSONField(default=list, help_text="Argument list; empty for a workspace's tool.")
    program = models.TextField(blank=True, max_length=MAX_PROGRAM_LENGTH, default=JobSpec.program)
    code_repository = optional_text(500, "URL of the git repository with its code; blank: none.")
    code_ref = optional_text(200, "Branch, tag or commit; blank: the default branch.")
    code_host_key = optional_text(900, "Public key of the git server, for an SSH URL.")
    code_archive = optional_text(64, "SHA-256 of the uploaded archive with its code; blank: none.")
    code_path = optional_text(500, "Folder with its code, in the home or in a volume; blank: none.")
    template_version = optional_number("Version of the template; null: no template.")
    parameters = models.JSONField(default=dict, help_text="Values of the parameters of its template.")
    env = models.JSONField(default=dict)
    volumes = models.JSONField(
        default=list, db_default=[], help_text="[{volume (by name), target, read_only}, ...]"
    )
    secrets = models.JSONField(
        default=list,
        db_default=[],
        help_text="[{secret (by name), owner_type, variable or file}, ...]; no values.",
    )
    priority = models.IntegerField(default=JobSpec.priority)
    queue_rank = models.IntegerField(
        default=0,
        db_default=0,
        help_text="Order among the waiting jobs of its owner, project and priority; smaller goes first.",
    )
    preemptible = models.BooleanField(default=JobSpec.preemptible)
    time_limit_s = optional_number()
    termination_grace_s = models.PositiveIntegerField(default=JobSpec.termination_grace_s)
    max_attempts = models.PositiveIntegerField(
        default=JobSpec.max_attempts, help_text="Maximum attempts after failures caused by the cluster."
    )
    retry_on = models.JSONField(
        default=default_failure_classes,
        db_default=list(JobSpec.retry_on),
        help_text="Failure classes after which it is retried.",
    )
    notify = models.JSONField(
        default=list, db_default=[], help_text="Events of which its owner is notified; empty: preferences."
    )
    retry_exit_codes = models.JSONField(
        default=list,
        db_default=[],
        help_text="Exit codes that count as a failure of the command; empty: any.",
    )
    retry_backoff_s = models.PositiveIntegerField(
        default=JobSpec.retry_backoff_s, db_default=JobSpec.retry_backoff_s
    )
    retry_max_backoff_s = models.PositiveIntegerField(
        default=JobSpec.retry_max_backoff_s, db_default=JobSpec.retry_max_backoff_s
    )
    exclude_failed_node = flag("Retries avoid the node on which a task failed.")
    apply_failure_actions = flag("The action of the failure rule that matches a failure is applied.")
    awaits_failure_rule = flag("Its last attempt failed, and the failure rules are not applied to it yet.")
    checkpoint_dir = optional_text(500, "Relative to the home, or below a volume; blank: the default.")
    checkpoint_keep_last = optional_number("Newest valid checkpoints that are kept; null: all.")
    checkpoint_keep_every = optional_number("Checkpoints of each multiple of this step are kept, too.")
    resume_from = optional_text(16, "Public id of the checkpoint from which its first attempt starts.")
    stall_timeout_s = optional_number("null: the policy of the pool.")
    on_stall = models.CharField(max_length=8, default=JobSpec.on_stall, db_default=JobSpec.on_stall)
    launcher = models.CharField(
        max_length=16,
        default=JobSpec.launcher,
        db_default="none",
        help_text="How its ranks find each other.",
    )
    launcher_options = models.JSONField(
        default=dict, db_default={}, help_text="Options of the launcher by name; defaults are left out."
    )
    rank_overrides = models.JSONField(
        default=dict, db_default={}, help_text="Variables of single ranks: {rank: {name: value}}."
    )

    seed = optional_number("Value of FAIRWAY_SEED; null: not set.")
    typed_amounts = models.JSONField(
        null=True,
        help_text="Which of PROPORTIONAL_AMOUNTS a user typed on a page: they stay when the GPUs change. "
        "Null: unknown.",
    )

    roles = models.JSONField(
        default=list, db_default=[], help_text="Roles in rank order, complete; empty: all tasks are equal."
    )
    role_gpus = optional_number("GPUs of all tasks of its roles; null: without roles.")
    completion_role = optional_text(20, "The role whose end ends the job; blank: all tasks.")
    min_succeeded = optional_number("Succeeded tasks with which it completes; null: all.")

    submitted_at = models.DateTimeField(auto_now_add=True)
    pending_since = models.DateTimeField(auto_now_add=True, help_text="When it last became PENDING.")
    nominated_placement = models.JSONField(
        null=True,
        help_text="Slots nominated by the scheduler: a list of [rank, node, [[GPU uuid, milli], ...]].",
    )
    start_after = optional_time("It does not start before.")
    started_at = optional_time()
    ended_at = optional_time()
    attempt_count = models.PositiveIntegerField(default=0)
    exit_code = models.IntegerField(null=True, blank=True)
    is_placeholder = models.BooleanField(
        default=False, help_text="Created for a container found after a restore; it cannot start again."
    )
    ignore_dependency_failure = models.BooleanField(
        default=JobSpec.ignore_dependency_failure,
        help_text="It starts after its dependencies however they end; otherwise they must complete.",
    )
    avoid_nodes: models.ManyToManyField[Any, Any] = models.ManyToManyField(
        "Node", blank=True, related_name="+"
    )

    class Meta:
        ordering = ["-id"]
        constraints = [
            one_of("state", JobState, "job_state"),
            one_of("kind", JobKind, "job_kind"),
            one_of("desired_state", DesiredState, "job_desired_state"),
            models.CheckConstraint(condition=Q(tasks__gte=1), name="job_tasks"),
            models.CheckConstraint(
                condition=Q(min_tasks__isnull=True)
                | Q(min_tasks__gte=1, min_tasks__lte=F("tasks")) & ~Q(kind=JobKind.WORKSPACE.value),
                name="job_min_tasks",
            ),
            models.CheckConstraint(
                condition=Q(milli_per_gpu__gte=1, milli_per_gpu__lte=1000), name="job_milli_per_gpu"
            ),
            models.CheckConstraint(
                condition=Q(roles=[], role_gpus__isnull=True, completion_role="")
                | Q(role_gpus__isnull=False, min_tasks__isnull=True) & ~Q(roles=[]),
                name="job_role_gpus",
            ),
        ]
        indexes = [
            models.Index(fields=["state", "id"], name="job_by_state"),
            models.Index(
                fields=["desired_state", "project"],
                name="job_pending",
                include=[
                    *("id", "owner", "pool", "held", "priority", "queue_rank", "submitted_at"),
                    *("role_gpus", "tasks", "gpus_per_task", "milli_per_gpu"),
                ],
                condition=Q(state="PENDING"),
            ),
            models.Index(fields=["owner", "-id"], name="job_by_owner"),
            models.Index(fields=["project", "-id"], name="job_by_project"),
            models.Index(fields=["code_archive"], name="job_by_code_archive", condition=~Q(code_archive="")),
            models.Index(
                fields=["id"],
                name="job_live",
                condition=Q(state__in=["PENDING", "RUNNING", "SUSPENDED"]),
            ),
            models.Index(
                fields=["-ended_at", "-id"],
                name="job_ended",
                condition=Q(started_at__isnull=False, ended_at__isnull=False),
            ),
            models.Index(
                fields=["started_at"],
                name="job_waits",
                include=["submitted_at", "project", "owner", "role_gpus", "tasks", "gpus_per_task"],
                condition=Q(started_at__isnull=False),
            ),
            models.Index(
                KeyTransform(PLAN_VARIABLE, "env"),
                name="job_by_plan",
                condition=Q(env__has_key=PLAN_VARIABLE),
            ),
            models.Index(
                total_gpus().desc(),
                F("id").desc(),
                name="job_by_gpus",
            ),
            models.Index(fields=["id"], name="job_nominated", condition=Q(nominated_placement__isnull=False)),
        ]

    def __str__(self) -> str:
        return self.public_id

    @property
    def pipeline_plan_id(self) -> str:
        """Public id of the pipeline plan from which it was launched; blank for none."""
        named = self.env.get(PLAN_VARIABLE, "")
        return named if re.fullmatch(r"[a-z0-9]{1,16}", named) else ""

    @property
    def measures_layers(self) -> bool:
        """True if it measures a layer profile."""
        return PROFILE_VARIABLE in self.env

    @property
    def total_gpus(self) -> int:
        """GPUs of all tasks; ``total_gpus`` in queries."""
        return self.tasks * self.gpus_per_task if self.role_gpus is None else self.role_gpus

    @property
    def total_milli(self) -> int:
        return self.total_gpus * self.milli_per_gpu

    @property
    def task_milli(self) -> int:
        return self.gpus_per_task * self.milli_per_gpu

    @property
    def required_tasks(self) -> int:
        """Minimum number of tasks for the job to run."""
        return self.tasks if self.min_tasks is None else self.min_tasks

    @property
    def is_gang(self) -> bool:
        """True if it has several tasks that start and end together."""
        return self.tasks > 1 and not self.is_elastic

    @property
    def is_elastic(self) -> bool:
        """True if it can run with fewer tasks than requested."""
        return self.required_tasks < self.tasks

    @property
    def published_port(self) -> int | None:
        """The port of its server, which its node publishes to the gateway; None: it has none."""
        if self.kind == JobKind.SERVICE.value:
            return int(self.replica.version.port)
        return self.environment.tool_port if self.kind == JobKind.WORKSPACE.value else None

    @property
    def needs_rendezvous(self) -> bool:
        """True if its tasks connect to each other: a gang, or an elastic job with a launcher."""
        return self.is_gang or (self.is_elastic and self.launcher != JobSpec.launcher)

    @cached_property
    def job_roles(self) -> tuple[JobRole, ...]:
        """Its roles, which never change; empty if all tasks are equal."""
        return parse_roles(self.roles)

    @property
    def completion_policy(self) -> CompletionPolicy:
        return CompletionPolicy(self.job_roles, self.completion_role, self.min_succeeded)

    @property
    def has_start_order(self) -> bool:
        """True if some tasks start only after others run."""
        return len({role.start_order for role in self.job_roles}) > 1

    def memory_of(self, rank: int) -> int:
        """Return the memory of a task, in MiB."""
        role = role_at(self.job_roles, rank)
        return self.memory_mib if role is None else role.memory_mib or 0

    def task_label(self, rank: int) -> str:
        """Return such as "worker 1"; "rank 1" without roles."""
        return task_label(self.job_roles, rank)


def total_milli(job: str = "") -> Combinable:
    """Return ``Job.total_milli`` as an expression."""
    return total_gpus(job) * F(f"{job}milli_per_gpu")


class Dependency(models.Model):
    """``job`` starts after ``depends_on``, which is older, so that there can be no cycle."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="dependencies")
    depends_on = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="dependents")

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["job", "depends_on"], name="dependency_once"),
            models.CheckConstraint(condition=Q(depends_on__lt=F("job")), name="dependency_on_older_job"),
        ]


class Attempt(models.Model):
    """One run of a job. ``number`` names its containers and fences late commands."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts", db_index=False)
    number = models.PositiveIntegerField()
    state = models.CharField(max_length=14, default=AttemptState.CONFIGURING.value)
    reason = models.CharField(max_length=40, blank=True)
    message = models.CharField(max_length=1000, blank=True)
    pool = models.ForeignKey("NodePool", on_delete=models.PROTECT, related_name="+")
    leader_epoch = models.BigIntegerField()
    secret = models.CharField(
        max_length=200,
        blank=True,
        help_text="Encrypted; authorizes upstream requests to a workspace, or makes SSH keys of a job.",
    )
    created_at = models.DateTimeField(auto_now_add=True)
    queued_at = optional_time("Since when its job had been waiting; null: adopted.")
    start_sent_at = optional_time("When the first start command was sent.")
    image_pull_started_at = optional_time("When the first node began to pull its image; null: all had it.")
    image_pulled_at = optional_time("When the last node had pulled its image.")
    gang_start = flag("No task starts before all tasks are prepared.")
    all_prepared_at = optional_time("When all tasks were prepared and could start.")
    running_at = optional_time()
    ready_at = optional_time("When the workspace server first responded.")
    unresponsive_since = optional_time("Since when the server of a replica does not answer; null: it does.")
    checkpoint_at = optional_time("When it last reported a checkpoint.")
    checkpoint_step = models.PositiveBigIntegerField(null=True, blank=True, help_text="Of that checkpoint.")
    code_commit = optional_text(64, "Commit of its code repository that was checked out.")
    code_ready_at = optional_time("When its code repository was checked out.")
    resume_decided = flag("Its tasks may start: from which checkpoint is decided.")
    resume_path = optional_text(800, "Path of the checkpoint from which it starts, below a mount.")
    resume_target = optional_text(1024, "Mount path of the volume with that checkpoint.")
    resume_step = models.PositiveBigIntegerField(null=True, blank=True)
    stop_requested_at = optional_time()
    stop_reason = models.CharField(max_length=40, blank=True)
    stop_requested_by = models.CharField(max_length=200, blank=True)
    preempted_for = models.ForeignKey(
        Job,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="preempted_attempts",
        help_text="The pending job for which it is preempted.",
    )
    preempted_for_attempt = optional_number(
        "Number of attempts of that job at that time; its next attempt fulfils the nomination."
    )
    ended_at = optional_time()
    exit_code = models.IntegerField(null=True, blank=True)
    failed_tasks = models.PositiveIntegerField(
        default=0,
        db_default=0,
        help_text="Tasks of an elastic job that failed while the other tasks kept running.",
    )
    scale_up_after = optional_time("Missing tasks are not started before this time, after a failure.")
    failure_checked_at = optional_time("When the failure rules were applied to its logs; null: not yet.")
    failure_rule = optional_text(63, "Code of the failure rule that matched best; blank: none.")
    failure_line = optional_text(1000, "The line of the log that matched; blank: the exit signature did.")
    failure_rank = optional_number("Rank of that line.")

    class Meta:
        ordering = ["job_id", "number"]
        constraints = [
            models.UniqueConstraint(fields=["job", "number"], name="attempt_number_once"),
            one_of("state", AttemptState, "attempt_state"),
            models.UniqueConstraint(
                fields=["job"],
                name="attempt_one_live",
                condition=Q(state__in=["CONFIGURING", "RUNNING", "COMPLETING"]),
            ),
        ]
        indexes = [
            models.Index(fields=["running_at"], name="attempt_by_start"),
            models.Index(
                fields=["id"],
                name="attempt_failure_unchecked",
                condition=Q(
                    state__in=sorted(state.value for state in FAILED_ATTEMPT_STATES),
                    failure_checked_at__isnull=True,
                ),
            ),
            models.Index(fields=["ended_at"], name="attempt_by_failure_rule", condition=~Q(failure_rule="")),
        ]


class Task(models.Model):
    """One rank of an attempt: one container on one node.

    Ranks are never reused within an attempt: a replacement task gets the next number, so that a late command
    for the old task cannot reach it.
    """

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="task_rows", db_index=False)
    rank = models.PositiveIntegerField()
    node = models.ForeignKey("Node", on_delete=models.PROTECT, related_name="task_rows")
    state = models.CharField(max_length=14, default=AttemptState.CONFIGURING.value)
    container = models.CharField(max_length=120, blank=True)
    ports = models.JSONField(default=dict, help_text="Container port -> port on the node's loopback.")
    listening_at = optional_time("When it first listened on all ports of its role.")
    start_sent_at = optional_time("When the first start command of this task was sent; set for gang starts.")
    prepared_at = optional_time("When its node had prepared it for an immediate start.")
    rendezvous_reached_at = optional_time("When its node reached the rendezvous address of its gang.")
    running_at = optional_time()
    ended_at = optional_time()
    exit_code = models.IntegerField(null=True, blank=True)
    oom = models.BooleanField(default=False)
    peak_memory_mib = optional_number()
    status_message = models.CharField(max_length=1000, blank=True, help_text="Why its start is delayed.")
    gang_address = optional_text(45, "Address at which the other tasks reach it; blank: only its node knows.")
    gang_ports = models.JSONField(
        default=dict, db_default={}, help_text="Ports of launcher and role by name."
    )
    world_size_at_start = optional_number("Number of tasks of the elastic job when this task was placed.")
    eviction_requested_at = optional_time(
        "When only this task was evicted, while the other tasks kept running."
    )
    eviction_reason = optional_text(40)
    container_removed = models.BooleanField(
        default=False, help_text="Proof that no container of it exists on the node."
    )
    log_bytes = models.BigIntegerField(default=0, help_text="Bytes of its log copied so far.")
    log_complete = models.BooleanField(default=False)

    class Meta:
        ordering = ["attempt_id", "rank"]
        constraints = [
            models.UniqueConstraint(fields=["attempt", "rank"], name="task_rank_once"),
            one_of("state", AttemptState, "task_state"),
        ]
        indexes = [
            models.Index(fields=["node"], name="task_held_on_node", condition=Q(container_removed=False)),
        ]

    @property
    def role_ports(self) -> dict[str, int]:
        """The ports reserved for it by the names that its role declares."""
        role = role_at(self.attempt.job.job_roles, self.rank)
        return {name: self.gang_ports[name] for name in role.ports if name in self.gang_ports} if role else {}

    @property
    def label(self) -> str:
        """Return such as "worker 1"; "rank 1" in a job without roles."""
        return self.attempt.job.task_label(self.rank)


class Rendezvous(models.Model):
    """The address where the ranks of an attempt connect.

    Written with its placement, so that all starts use the same.
    """

    attempt = models.OneToOneField(Attempt, on_delete=models.CASCADE, related_name="rendezvous")
    node = models.ForeignKey(
        "Node", on_delete=models.PROTECT, related_name="+", help_text="The node of rank 0."
    )
    port = models.PositiveIntegerField()
    address = models.CharField(
        max_length=45, blank=True, help_text="Address of that node; blank: all ranks run on it."
    )
    node_network = models.BooleanField(
        default=False, help_text="The ranks use the host network instead of the network of their job."
    )
    network = optional_text(63, "Container network that the ranks join instead.")
    devices = models.JSONField(default=list, help_text="Fabric devices of each task.")
    adapters = optional_text(200, "Value of NCCL_IB_HCA.")
    interfaces = models.JSONField(default=dict, help_text="Interface by public id of the node.")
    live = models.BooleanField(default=True, help_text="False: the attempt has ended.")
    connectivity_check = flag("The other nodes check the connection before any rank starts.")
    all_reduce_limit_s = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Time limit of the all-reduce before the command; 0: none."
    )
    check_started_at = optional_time(
        "When all tasks were prepared and the node listened; null: not started, or restarted."
    )
    recheck_requested = flag("A node could not connect, so the check is repeated.")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node", "port"], name="rendezvous_port_once", condition=Q(live=True)
            ),
            models.UniqueConstraint(
                fields=["network", "address"],
                name="rendezvous_address_once",
                condition=Q(live=True) & ~Q(network=""),
            ),
        ]


class Allocation(models.Model):
    """Milli of one GPU held by one task, until proof that its container is gone."""

    task = models.ForeignKey(Task, on_delete=models.CASCADE, related_name="allocations", db_index=False)
    gpu = models.ForeignKey("Gpu", on_delete=models.PROTECT, related_name="allocations")
    milli = models.PositiveIntegerField()
    whole = models.BooleanField()
    started_at = models.DateTimeField()
    ended_at = optional_time()
    proof = models.CharField(max_length=20, blank=True, help_text="gone, rebooted, fenced or never_started.")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(milli__gte=1, milli__lte=1000), name="allocation_milli"),
            models.CheckConstraint(condition=Q(whole=False) | Q(milli=1000), name="allocation_whole_is_1000"),
            models.UniqueConstraint(
                fields=["gpu"],
                name="allocation_whole_alone",
                condition=Q(whole=True, ended_at__isnull=True),
            ),
            models.UniqueConstraint(fields=["task", "gpu"], name="allocation_once"),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, proof="") | Q(ended_at__isnull=False) & ~Q(proof=""),
                name="allocation_ends_with_proof",
            ),
        ]
        indexes = [
            models.Index(fields=["gpu"], name="allocation_live", condition=Q(ended_at__isnull=True)),
        ]


class JobEvent(models.Model):
    """An entry of a job's timeline, written in the transaction of the change."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="events", db_index=False)
    attempt = models.ForeignKey(Attempt, null=True, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(auto_now_add=True)
    kind = models.CharField(max_length=40)  # submitted, job_state, attempt_state, verdict, edited, note ...
    before = models.CharField(max_length=14, blank=True)
    after = models.CharField(max_length=14, blank=True)
    reason = models.CharField(max_length=40, blank=True)
    message = models.CharField(max_length=1000, blank=True)
    actor = models.CharField(max_length=200, blank=True)
    details = models.JSONField(default=dict)

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["job", "id"], name="event_by_job")]
