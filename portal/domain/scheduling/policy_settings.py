"""The settings of scheduling policy: name, unit, range, default and description.

Pages, REST, validation and ``docs/policy.md`` read these tables. How to add a setting: ``docs/recipes.md``.
"""

from __future__ import annotations

from dataclasses import replace

from portal.domain.cluster.retention_settings import RETENTION_NUMBERS
from portal.domain.setting_types import ChoiceSetting, NumberSetting

DAY_S = 86_400.0
TASK_DISK_LIMIT = "task_disk_mib"
EGRESS = "egress"
USER_NAMESPACES = "user_namespaces"
ALLOW_USER_NAMESPACES = "allow"
STALL_TIMEOUT = "stall_timeout_s"
CODE_TIME_LIMIT = "code_time_limit_s"
SAVED_IMAGE_LIMIT = "saved_image_max_mib"
GPU_HOUR_PRICE = "gpu_hour_price"
PRICE_CURRENCY = "price_currency"
GRID_CO2 = "grid_co2_g_per_kwh"
CODE_SIZE_LIMIT = "code_size_limit_mib"
WEBHOOK_PRIVATE_ADDRESSES = "webhook_private_addresses"

_DECISION_NUMBERS = (
    NumberSetting(
        "usage_half_life_s",
        "s",
        3_600.0,
        365 * DAY_S,
        7 * DAY_S,
        "Half-life of past use in fair share, in seconds; default 7 days. Shorten it so that earlier "
        "use counts less.",
    ),
    NumberSetting(
        "usage_weight",
        "",
        0.0,
        10.0,
        1.0,
        "Weight of past use in the division of GPUs beyond the guarantees; no unit, default 1, 0 "
        "ignores past use. Raise it to give more to projects that used little.",
    ),
    NumberSetting(
        "start_charge_s",
        "s",
        0.0,
        DAY_S,
        600.0,
        "Use that each start adds at once to its user, in seconds per GPU; default 10 min. Raise it "
        "if one user's burst of submissions starts before jobs of others.",
    ),
    NumberSetting(
        "max_steps_per_cycle",
        "steps",
        100,
        10_000_000,
        200_000,
        "Maximum placements and victim sets tried in one cycle, in steps; default 200,000. Raise it "
        "if jobs often get the verdict cycle_budget_exhausted.",
        per_pool=False,
    ),
    NumberSetting(
        "max_suggestion_steps",
        "steps",
        0,
        100_000,
        400,
        "Maximum steps of one cycle that search for suggestions, in addition to max_steps_per_cycle; "
        "default 400, 0 disables suggestions. Raise it if verdicts lack suggestions.",
        per_pool=False,
    ),
    NumberSetting(
        "jobs_ahead_limit",
        "jobs",
        0,
        50,
        5,
        "Maximum jobs ahead that a verdict names, in jobs; default 5. Raise it to show users more of "
        "the queue.",
        per_pool=False,
    ),
    NumberSetting(
        "backfill_reserve_after_s",
        "s",
        0.0,
        7 * DAY_S,
        1_800.0,
        "Waiting time after which a gang gets a reservation of the GPUs that are free first, in "
        "seconds; default 30 min. Lower it if smaller jobs keep passing large gangs.",
    ),
    NumberSetting(
        "preemption_delay_s",
        "s",
        0.0,
        7 * DAY_S,
        0.0,
        "Waiting time of a job before other jobs are evicted for it, in seconds; default 0, no delay. "
        "Raise it to avoid evictions for GPUs that are free soon.",
    ),
    NumberSetting(
        "size_penalty_s_per_gpu",
        "s per GPU",
        0.0,
        7 * DAY_S,
        0.0,
        "Moves a job back in the order of its project, in seconds for each requested GPU; default 0, "
        "plain age. Raise it to start small jobs first.",
    ),
    NumberSetting(
        "predicted_duration_weight",
        "",
        0.0,
        100.0,
        1.0,
        "Moves a job back in the order of its project by this multiple of its predicted duration; no "
        "unit, default 1, 0 is plain age. Raise it to start short jobs first.",
    ),
    NumberSetting(
        "near_end_protection_s",
        "s",
        0.0,
        7 * DAY_S,
        7_200.0,
        "A job predicted to end within this time is not evicted or moved, except for a project within its "
        "guarantee; in seconds, default 2 h. Raise it to lose less work to evictions.",
    ),
    NumberSetting(
        "preempt_min_runtime_s",
        "s",
        0.0,
        DAY_S,
        0.0,
        "Run time before a job may be reclaimed, preempted or moved, in seconds; default 0. Raise it so that "
        "jobs reach their first checkpoint.",
    ),
    NumberSetting(
        "max_victims",
        "jobs",
        0,
        100_000,
        1_000,
        "Maximum jobs evicted for one pending job, in jobs; default 1,000. Lower it to limit what one "
        "large job may interrupt.",
    ),
    NumberSetting(
        "max_migrations",
        "jobs",
        0,
        100_000,
        8,
        "Maximum jobs moved to other GPUs so that one pending job fits, in jobs; default 8, 0 "
        "disables moves. Raise it if large jobs wait while free GPUs are scattered.",
    ),
    NumberSetting(
        "max_migration_loss_gpu_s",
        "GPU-seconds",
        0.0,
        1e12,
        300.0,
        "Maximum work that a job may lose when it is moved to other GPUs, in GPU-seconds since its "
        "last checkpoint; default 300. Raise it to allow more moves.",
    ),
    NumberSetting(
        "stale_gang_grace_s",
        "s",
        0.0,
        DAY_S,
        60.0,
        "Time after which a gang with fewer live tasks than it needs is stopped and returns to the "
        "queue, in seconds; default 60. Raise it if lost tasks are often replaced later.",
    ),
)
# Notices to running jobs and their end, clean-up of nodes, limits of tasks.
_OTHER_NUMBERS = (
    NumberSetting(
        "gang_min_bandwidth_mib_s",
        "MiB/s",
        0.0,
        1_000_000.0,
        0.0,
        "Bandwidth of one TCP stream that two nodes of a gang need before it starts, in MiB/s; default "
        "0, which accepts any. Set it so that gangs do not train over a broken or wrong network.",
        affects_decisions=False,
    ),
    NumberSetting(
        "gang_max_clock_skew_s",
        "s",
        0.0,
        DAY_S,
        10.0,
        "Difference of the clocks of two nodes above which a gang does not start on both, in seconds; "
        "default 10, 0 accepts any. Lower it for programs that compare times of their ranks.",
        affects_decisions=False,
    ),
    NumberSetting(
        "gang_all_reduce_limit_s",
        "s",
        0,
        120,
        0,
        "Time limit of an all-reduce that the tasks of a gang on several nodes run in the image of their job "
        "before its command, in seconds; default 0 runs none. Set it to 30 to find a broken network early; an "
        "image with torch takes a few seconds longer to start.",
        affects_decisions=False,
    ),
    NumberSetting(
        "time_limit_warning_s",
        "s",
        0.0,
        7 * DAY_S,
        900.0,
        "Time before a time limit ends a job at which its users are warned, in seconds, at most half "
        "of the limit; default 15 min, 0 gives no warning. Raise it if saving takes long.",
    ),
    NumberSetting(
        "max_extension_s",
        "s",
        0.0,
        30 * DAY_S,
        DAY_S,
        "Maximum time that all extensions of a job together add to its limit, in seconds; default 1 "
        "day, 0 allows none. Lower it if extended jobs keep others waiting.",
    ),
    NumberSetting(
        GPU_HOUR_PRICE,
        "",
        0.0,
        1_000.0,
        0.0,
        "Price of one GPU for one hour in reports, in the unit of price_currency; default 0 shows no costs. "
        "Set it for each pool to show projects what they hold, and what idle GPUs cost.",
        affects_decisions=False,
    ),
    NumberSetting(
        GRID_CO2,
        "g/kWh",
        0.0,
        2_000.0,
        0.0,
        "Carbon dioxide of one kilowatt-hour in reports, in grams; default 0 shows no emissions. Set it to "
        "the yearly figure of your electricity supplier; the cooling of the machine room is not included.",
        per_pool=False,
        affects_decisions=False,
    ),
    NumberSetting(
        "idle_after_s",
        "s",
        300.0,
        7 * DAY_S,
        3_600.0,
        "Time of measured inactivity of its GPUs and its tool after which a workspace is idle, in "
        "seconds; default 1 h. Lower it to get unused GPUs back sooner.",
        per_project=True,
    ),
    NumberSetting(
        "idle_training_after_s",
        "s",
        300.0,
        30 * DAY_S,
        7_200.0,
        "Time of measured inactivity of all its GPUs after which a training job is idle, in seconds; default 2 h. "
        "Raise it for programs that prepare data for hours.",
        per_project=True,
    ),
    NumberSetting(
        "idle_service_after_s",
        "s",
        300.0,
        30 * DAY_S,
        14_400.0,
        "Time without requests and with measured inactivity of its GPUs after which a service is idle, in seconds; "
        "default 4 h. Raise it if services must answer at once after quiet nights.",
        per_project=True,
    ),
    NumberSetting(
        "idle_gpu_percent",
        "%",
        0.0,
        100.0,
        3.0,
        "A GPU is inactive in a minute if its mean use is below this, in percent; default 3, with 0 "
        "no GPU is ever inactive. Raise it if programs that only wait keep GPUs slightly busy.",
    ),
    NumberSetting(
        "idle_grace_s",
        "s",
        60.0,
        DAY_S,
        1_800.0,
        "Countdown before an idle workspace is suspended, in seconds; default 30 min. Raise it to "
        "give users more time to react.",
        per_project=True,
    ),
    NumberSetting(
        "idle_snooze_s",
        "s",
        300.0,
        DAY_S,
        3_600.0,
        "Time for which a snooze keeps an idle workspace, in seconds; default 1 h. Raise it if users "
        "snooze several times in a row.",
        per_project=True,
    ),
    NumberSetting(
        "idle_snooze_limit",
        "times",
        0,
        100,
        3,
        "Times that an idle workspace may be snoozed until it is used again; default 3, 0 allows no "
        "snooze. Lower it if unused workspaces keep GPUs by snoozes.",
        per_project=True,
    ),
    NumberSetting(
        "idle_exemption_s",
        "s",
        0.0,
        30 * DAY_S,
        DAY_S,
        "Time for which an exemption with a reason keeps an idle workspace, in seconds, unless it is "
        "revoked; default 1 day, 0 allows no exemptions. Raise it for longer interactive work.",
        per_project=True,
    ),
    NumberSetting(
        "idle_project_max_factor",
        "times",
        1.0,
        100.0,
        1.0,
        "Projects may set idle times and counts up to this many times their pool's values; default 1, "
        "only stricter. Raise it to let projects keep idle workspaces longer.",
    ),
    NumberSetting(
        "gc_interval_s",
        "s",
        0.0,
        30 * DAY_S,
        DAY_S,
        "Interval of the automatic clean-up of a node, in seconds; default 1 day, sooner while its "
        "disk is full, 0 disables it. Shorten it if disks fill up between clean-ups.",
    ),
    NumberSetting(
        "storage_usage_interval_s",
        "s",
        0.0,
        30 * DAY_S,
        3_600.0,
        "Interval at which each node measures its homes and project folders, in seconds; default 1 hour, 0 "
        "disables it. Raise it where folders have many files and no quota.",
        per_pool=False,
        affects_decisions=False,
    ),
    NumberSetting(
        "gc_keep_s",
        "s",
        3_600.0,
        90 * DAY_S,
        7 * DAY_S,
        "Time for which a clean-up keeps files of ended attempts that the portal has not released, in "
        "seconds; default 7 days. Lower it if node disks are small.",
    ),
    NumberSetting(
        "image_gc_high_threshold_percent",
        "%",
        10.0,
        100.0,
        85.0,
        "Use of the image file system of a node from which a clean-up removes unused images, in "
        "percent; default 85. Lower it if pulls fail for lack of disk space.",
    ),
    NumberSetting(
        "image_gc_low_threshold_percent",
        "%",
        0.0,
        100.0,
        75.0,
        "Use of the image file system at which a clean-up stops removing images, longest unused "
        "first, in percent; default 75. Lower it to free more space at once.",
    ),
    NumberSetting(
        "image_min_age_s",
        "s",
        0.0,
        365 * DAY_S,
        7 * DAY_S,
        "Time for which an image stays on a node after it was pulled or last used there, in seconds; "
        "default 7 days. Lower it if image file systems stay too full.",
    ),
    NumberSetting(
        STALL_TIMEOUT,
        "s",
        0.0,
        30 * DAY_S,
        0.0,
        "Time without output, progress and use of its GPUs after which a job is stalled, in seconds, unless "
        "the job sets its own; default 0, no detection. Set it if hung jobs keep GPUs.",
    ),
    NumberSetting(
        CODE_TIME_LIMIT,
        "s",
        1.0,
        DAY_S,
        600.0,
        "Time within which the code of a job must be checked out from its git repository, in seconds; default "
        "10 min. Raise it if large repositories come from a slow server.",
        affects_decisions=False,
    ),
    NumberSetting(
        CODE_SIZE_LIMIT,
        "MiB",
        1.0,
        1e9,
        4_096.0,
        "Maximum size of the checked-out code of a task with its git folder, in MiB; default 4 GiB. Raise it if "
        "repositories contain data.",
        affects_decisions=False,
    ),
    NumberSetting(
        SAVED_IMAGE_LIMIT,
        "MiB",
        0,
        1_000_000,
        20_480,
        "Maximum size of the changed files of a running job that users save as an environment, in MiB; default "
        "20 GiB, 0 disables saving. Lower it if saved images fill the disks of nodes.",
        affects_decisions=False,
    ),
    *RETENTION_NUMBERS,
    NumberSetting(
        TASK_DISK_LIMIT,
        "MiB",
        0.0,
        1e9,
        51_200.0,
        "Maximum that a task may write to the disk of its node outside its volumes, in MiB; default "
        "50 GiB, 0 sets no limit. A task above it is stopped. Raise it for large temporary files.",
    ),
)
_DECISION_CHOICES = (
    ChoiceSetting(
        "placement",
        ("fragmentation", "pack", "spread"),
        "fragmentation",
        "How a node is chosen: fragmentation (default) keeps free GPUs usable for typical requests, "
        "pack fills nodes one after the other, spread balances the load. Choose pack to keep whole "
        "nodes free.",
    ),
    ChoiceSetting(
        "victim_order",
        ("least_lost_work", "youngest"),
        "least_lost_work",
        "Which job of the lowest priority of its project is evicted first: the one that loses the least work "
        "since its last checkpoint (default), or the youngest. Choose youngest to evict the job submitted last.",
    ),
    ChoiceSetting(
        "movable_jobs",
        ("evictable", "any"),
        "evictable",
        "Which running jobs may be moved to other GPUs so that a pending job fits: jobs that the pending job "
        "could evict (default), or any preemptible job. Protected jobs are never moved. Choose any if large jobs "
        "wait while free GPUs are scattered.",
    ),
    ChoiceSetting(
        "gpu_sharing_scope",
        ("project", "any"),
        "project",
        "Which jobs may share a GPU: jobs of one project (default) or any jobs. Sharing is "
        "cooperative: choose any only if all projects trust each other.",
    ),
    ChoiceSetting(
        "gpu_sharing_requires_mps",
        ("no", "yes"),
        "no",
        "Whether shares of a GPU are placed only on nodes where MPS limits tasks to their shares; "
        "default no. Choose yes if tasks use more than their shares.",
    ),
    ChoiceSetting(
        "use_predictions",
        ("yes", "no"),
        "yes",
        "Whether decisions use durations and layout speeds learned from similar jobs that ended; "
        "default yes. With no they use only time limits. Choose no if predictions are often wrong.",
        per_pool=False,
    ),
)
_OTHER_CHOICES = (
    ChoiceSetting(
        PRICE_CURRENCY,
        ("EUR", "USD", "GBP", "CHF", "CNY", "JPY", "INR"),
        "EUR",
        "Currency of gpu_hour_price in reports; default EUR.",
        per_pool=False,
    ),
    ChoiceSetting(
        WEBHOOK_PRIVATE_ADDRESSES,
        ("allow", "refuse"),
        "refuse",
        "Whether webhooks of users may reach private and loopback addresses: refuse (default) or allow. Link-local "
        "addresses are always refused. Choose allow if the chat server is inside the network and users are trusted.",
        per_pool=False,
    ),
    ChoiceSetting(
        "image_gc_scope",
        ("ours", "all", "none"),
        "ours",
        "Which unused images a clean-up may remove from a node: those that Fairway pulled (ours, "
        "default), all, or none. Choose all if only Fairway uses the nodes.",
    ),
    ChoiceSetting(
        "idle_action",
        ("off", "notify", "suspend"),
        "notify",
        "What happens to an idle workspace: nothing (off), its users are notified (notify, default), "
        "or it is also suspended after a countdown (suspend). Choose suspend if others wait for its "
        "GPUs.",
        per_project=True,
    ),
    ChoiceSetting(
        "idle_training_action",
        ("off", "notify", "suspend"),
        "off",
        "What happens to a training job that does not use its GPUs: nothing (off, default), its owner is notified "
        "(notify), or it is also suspended after a countdown (suspend); it continues from its newest checkpoint "
        "when it is resumed. Choose suspend if others wait for its GPUs.",
        per_project=True,
    ),
    ChoiceSetting(
        "idle_service_action",
        ("off", "notify", "suspend"),
        "off",
        "What happens to a service that does not use its GPUs: nothing (off, default), its owner is notified "
        "(notify), or it is also scaled to zero after a countdown until the next request (suspend). Choose suspend "
        "if others wait for its GPUs.",
        per_project=True,
    ),
    ChoiceSetting(
        EGRESS,
        ("open", "listed", "none"),
        "open",
        "Where containers may connect: anywhere except the portal, the nodes and metadata services "
        "(open, default), only to the project's list (listed), or nowhere (none). Choose listed or "
        "none for confidential data.",
        per_project=True,
    ),
    ChoiceSetting(
        USER_NAMESPACES,
        (ALLOW_USER_NAMESPACES, "refuse"),
        "refuse",
        "Whether programs in containers may create user namespaces, in which they have all capabilities: refuse "
        "(default) or allow. Choose allow if jobs build or run containers themselves.",
        per_project=True,
    ),
)

NUMBER_SETTINGS: dict[str, NumberSetting] = {
    setting.name: setting
    for setting in (*_DECISION_NUMBERS, *(replace(each, affects_decisions=False) for each in _OTHER_NUMBERS))
}
CHOICE_SETTINGS: dict[str, ChoiceSetting] = {
    setting.name: setting
    for setting in (*_DECISION_CHOICES, *(replace(each, affects_decisions=False) for each in _OTHER_CHOICES))
}

IDLE_SETTINGS: dict[str, tuple[str, str]] = {
    "workspace": ("idle_action", "idle_after_s"),
    "training": ("idle_training_action", "idle_training_after_s"),
    "service": ("idle_service_action", "idle_service_after_s"),
}
"""By kind of job: the setting for what happens to an idle one, and for the time after which it is idle."""


SettingValue = float | str


def setting_names(*, per_pool: bool = False, per_project: bool = False) -> tuple[str, ...]:
    """Return all names, numbers first, or only those that pools or projects may override."""
    every: list[NumberSetting | ChoiceSetting] = [*NUMBER_SETTINGS.values(), *CHOICE_SETTINGS.values()]
    return tuple(
        setting.name
        for setting in every
        if (setting.per_pool or not per_pool) and (setting.per_project or not per_project)
    )


def affects_decisions(name: str) -> bool:
    """Return False for a known setting that no scheduling decision reads, otherwise True."""
    setting = NUMBER_SETTINGS.get(name) or CHOICE_SETTINGS.get(name)
    return setting is None or setting.affects_decisions


def default_value(name: str) -> SettingValue:
    """Return the default. Raise KeyError for an unknown name."""
    return NUMBER_SETTINGS[name].default if name in NUMBER_SETTINGS else CHOICE_SETTINGS[name].default


def format_number(value: float) -> str:
    """Format a number with thousands separators and no trailing zeros: 31,536,000 or 0.5."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def setting_error(
    name: str, value: object, *, per_pool: bool = False, per_project: bool = False
) -> str | None:
    """Return what is wrong with a value for a setting, or None."""
    if name not in setting_names():
        return "There is no such setting."
    if per_project and name not in setting_names(per_project=True):
        return "Projects have no value of their own for this setting."
    if per_pool and name not in setting_names(per_pool=True):
        return "This setting has one value for the whole cluster."
    if (choice := CHOICE_SETTINGS.get(name)) is not None:
        return None if value in choice.options else f"Must be one of: {', '.join(choice.options)}."
    setting = NUMBER_SETTINGS[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "Must be a number."
    if not setting.minimum <= value <= setting.maximum:
        unit = f" {setting.unit}" if setting.unit else ""
        return f"Must be between {format_number(setting.minimum)} and {format_number(setting.maximum)}{unit}."
    return None if normalize_value(name, value) == value else "Must be a whole number."


def normalize_value(name: str, value: SettingValue) -> SettingValue:
    """Return the value as an int if the setting's default is an int."""
    return int(value) if isinstance(default_value(name), int) else value
