"""The knobs of scheduling policy: name, unit, range, default and a message for people.

The page, REST, the check and ``docs/policy.md`` read these tables; a knob is added here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberSetting:
    """A number an admin may turn. ``low`` and ``high`` are inclusive.

    ``per_pool`` False: one value for the whole cluster, since a cycle is one for all pools. ``decides`` False: no
    decision of the scheduler reads it; it is about what running jobs are told and when they are asked to end.
    ``per_project``: a project may hold it stricter, which is lower, than its pools (``project_knobs.py``).
    """

    name: str
    unit: str
    minimum: float
    maximum: float
    default: float
    description: str
    per_pool: bool = True
    affects_decisions: bool = True
    per_project: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceSetting:
    """A word an admin may pick; the rest as for a ``Knob``, of whose options the later is the stricter."""

    name: str
    options: tuple[str, ...]
    default: str
    description: str
    per_pool: bool = True
    affects_decisions: bool = True
    per_project: bool = False


DAY_S = 86_400.0
TASK_DISK_LIMIT = "task_disk_mib"
EGRESS = "egress"

NUMBER_SETTINGS: dict[str, NumberSetting] = {
    knob.name: knob
    for knob in (
        NumberSetting(
            "usage_half_life_s",
            "s",
            3_600.0,
            365 * DAY_S,
            7 * DAY_S,
            "Past use counts half as much after this time.",
        ),
        NumberSetting(
            "usage_weight",
            "",
            0.0,
            10.0,
            1.0,
            "How strongly past use moves GPUs beyond the guarantee; 0 forgets the past.",
        ),
        NumberSetting(
            "start_charge_s",
            "s",
            0.0,
            DAY_S,
            600.0,
            "A start counts as this much use at once, so that a burst of submits pays immediately.",
        ),
        NumberSetting(
            "max_steps_per_cycle",
            "steps",
            100,
            10_000_000,
            200_000,
            "Placements and victim sets tried in one cycle; jobs not reached are told so.",
            per_pool=False,
        ),
        NumberSetting(
            "max_suggestion_steps",
            "steps",
            0,
            100_000,
            400,
            "Of these, how many may search for the cheapest change that would start a waiting job.",
            per_pool=False,
        ),
        NumberSetting(
            "jobs_ahead_limit",
            "jobs",
            0,
            50,
            5,
            "How many of the jobs ahead a verdict names.",
            per_pool=False,
        ),
        NumberSetting(
            "backfill_reserve_after_s",
            "s",
            0.0,
            7 * DAY_S,
            1_800.0,
            "A gang that waits longer than this gets GPUs reserved at the earliest possible time.",
        ),
        NumberSetting(
            "preemption_delay_s",
            "s",
            0.0,
            7 * DAY_S,
            0.0,
            "Nobody is asked to leave for a job that has waited less than this; 0 asks at once.",
        ),
        NumberSetting(
            "size_penalty_s_per_gpu",
            "s per GPU",
            0.0,
            7 * DAY_S,
            0.0,
            "Within a project, a job stands as if submitted so much later for each GPU it asks for; 0 is plain age.",
        ),
        NumberSetting(
            "predicted_duration_weight",
            "",
            0.0,
            100.0,
            1.0,
            "Within a project, a job stands as if submitted later by so many times its predicted duration.",
        ),
        NumberSetting(
            "near_end_protection_s",
            "s",
            0.0,
            7 * DAY_S,
            7_200.0,
            "A job that is predicted to end within this is not asked to leave, but by whom its GPUs are guaranteed.",
        ),
        NumberSetting(
            "preempt_min_runtime_s",
            "s",
            0.0,
            DAY_S,
            0.0,
            "A job that runs for less than this is not asked to leave.",
        ),
        NumberSetting(
            "max_victims",
            "jobs",
            0,
            100_000,
            1_000,
            "Jobs that may be asked to leave for one waiting job.",
        ),
        NumberSetting(
            "max_migrations",
            "jobs",
            0,
            100_000,
            8,
            "Jobs that may be moved elsewhere to make one hole large enough; 0 moves nobody.",
        ),
        NumberSetting(
            "max_migration_loss_gpu_s",
            "GPU-seconds",
            0.0,
            1e12,
            300.0,
            "A job that would lose more work than this is not moved elsewhere.",
        ),
        NumberSetting(
            "stale_gang_grace_s",
            "s",
            0.0,
            DAY_S,
            60.0,
            "A gang of which fewer tasks live than it needs ends after this time and queues again.",
        ),
        NumberSetting(
            "time_limit_warning_s",
            "s",
            0.0,
            7 * DAY_S,
            900.0,
            "People are warned so long before a time limit ends their job, but not before half of it is used.",
            affects_decisions=False,
        ),
        NumberSetting(
            "max_extension_s",
            "s",
            0.0,
            30 * DAY_S,
            DAY_S,
            "So much time at most may be added to the limit of a job, all its extensions together; 0 adds none.",
            affects_decisions=False,
        ),
        NumberSetting(
            "idle_after_s",
            "s",
            300.0,
            7 * DAY_S,
            3_600.0,
            "A workspace is idle once its GPUs and its tool were both known to be quiet for this long.",
            affects_decisions=False,
            per_project=True,
        ),
        NumberSetting(
            "idle_gpu_percent",
            "%",
            0.0,
            100.0,
            3.0,
            "A GPU that is busy less than this in the mean of a minute counts as quiet; with 0 none ever does.",
            affects_decisions=False,
        ),
        NumberSetting(
            "idle_grace_s",
            "s",
            60.0,
            DAY_S,
            1_800.0,
            "So long runs the countdown of an idle workspace before it is suspended.",
            affects_decisions=False,
            per_project=True,
        ),
        NumberSetting(
            "idle_snooze_s",
            "s",
            300.0,
            DAY_S,
            3_600.0,
            "For so long a snooze keeps an idle workspace.",
            affects_decisions=False,
            per_project=True,
        ),
        NumberSetting(
            "idle_snooze_limit",
            "times",
            0,
            100,
            3,
            "So often an idle workspace may be snoozed until it is used again.",
            affects_decisions=False,
            per_project=True,
        ),
        NumberSetting(
            "idle_exemption_s",
            "s",
            0.0,
            30 * DAY_S,
            DAY_S,
            "For so long a reason in words keeps an idle workspace, unless it is cut short; 0 takes no reasons.",
            affects_decisions=False,
            per_project=True,
        ),
        NumberSetting(
            "idle_project_max_factor",
            "times",
            1.0,
            100.0,
            1.0,
            "Projects may set times and counts of idleness up to so many times their pool's; 1: only stricter.",
            affects_decisions=False,
        ),
        NumberSetting(
            "gc_interval_s",
            "s",
            0.0,
            30 * DAY_S,
            DAY_S,
            "So often a node is tidied up by itself, and at once when its disk is full; 0 leaves it to people.",
            affects_decisions=False,
        ),
        NumberSetting(
            "gc_keep_s",
            "s",
            3_600.0,
            90 * DAY_S,
            7 * DAY_S,
            "What is left of ended attempts on a node is kept so long when nobody took leave of it.",
            affects_decisions=False,
        ),
        NumberSetting(
            "image_gc_high_threshold_percent",
            "%",
            10.0,
            100.0,
            85.0,
            "Tidying up removes unused images of a node once the file system that holds them is fuller than this.",
            affects_decisions=False,
        ),
        NumberSetting(
            "image_gc_low_threshold_percent",
            "%",
            0.0,
            100.0,
            75.0,
            "It removes them, longest unused first, until the file system is no fuller than this.",
            affects_decisions=False,
        ),
        NumberSetting(
            "image_min_age_s",
            "s",
            0.0,
            365 * DAY_S,
            7 * DAY_S,
            "An image stays for this long after it was brought to a node, or a task used it there.",
            affects_decisions=False,
        ),
        NumberSetting(
            TASK_DISK_LIMIT,
            "MiB",
            0.0,
            1e9,
            51_200.0,
            "A task that writes more than this to its node's disk outside its volumes is ended; 0 sets no limit.",
            affects_decisions=False,
        ),
    )
}

CHOICE_SETTINGS: dict[str, ChoiceSetting] = {
    choice.name: choice
    for choice in (
        ChoiceSetting(
            "placement",
            ("fragmentation", "pack", "spread"),
            "fragmentation",
            "Fragmentation leaves what the usual requests can use; pack fills nodes one after the other; "
            "spread evens the load.",
        ),
        ChoiceSetting(
            "victim_order",
            ("least_lost_work", "youngest"),
            "least_lost_work",
            "Which of the jobs that may be asked to leave goes first.",
        ),
        ChoiceSetting(
            "gpu_sharing_scope",
            ("project", "any"),
            "project",
            "Who may hold shares of the same GPU: jobs of one project alone, or anybody; sharing is cooperative.",
        ),
        ChoiceSetting(
            "gpu_sharing_requires_mps",
            ("no", "yes"),
            "no",
            "Whether shares of a GPU are placed only on nodes that hold tasks to them by MPS.",
        ),
        ChoiceSetting(
            "use_predictions",
            ("yes", "no"),
            "yes",
            "Whether decisions count on how long jobs are expected to run, and where faster, going by jobs like them "
            "that ended; without, only on time limits.",
            per_pool=False,
        ),
        ChoiceSetting(
            "image_gc_scope",
            ("ours", "all", "none"),
            "ours",
            "Which unused images may be removed from a node: those that Fairway brought there, also those of others, "
            "or none.",
            affects_decisions=False,
        ),
        ChoiceSetting(
            "idle_action",
            ("off", "notify", "suspend"),
            "notify",
            "What becomes of an idle workspace: nothing, its people are told, or it is suspended after a countdown.",
            affects_decisions=False,
            per_project=True,
        ),
        ChoiceSetting(
            EGRESS,
            ("open", "listed", "none"),
            "open",
            "Where containers may connect: anywhere but the portal, the nodes and metadata services; only where "
            "their project's list says; or nowhere.",
            affects_decisions=False,
            per_project=True,
        ),
    )
}


SettingValue = float | str


def setting_names(*, per_pool: bool = False, per_project: bool = False) -> tuple[str, ...]:
    """Every name, numbers first, or only those that pools or projects may have values of their own for."""
    every: list[NumberSetting | ChoiceSetting] = [*NUMBER_SETTINGS.values(), *CHOICE_SETTINGS.values()]
    return tuple(
        knob.name
        for knob in every
        if (knob.per_pool or not per_pool) and (knob.per_project or not per_project)
    )


def affects_decisions(name: str) -> bool:
    """False for a knob of ours that no decision of the scheduler reads; True for all others, also unknown ones."""
    knob = NUMBER_SETTINGS.get(name) or CHOICE_SETTINGS.get(name)
    return knob is None or knob.affects_decisions


def default_value(name: str) -> SettingValue:
    """What holds where nobody said otherwise. KeyError for an unknown name."""
    return NUMBER_SETTINGS[name].default if name in NUMBER_SETTINGS else CHOICE_SETTINGS[name].default


def format_number(value: float) -> str:
    """A number with its thousands parted, and no more decimals than it has: 31,536,000 or 0.5."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def setting_error(
    name: str, value: object, *, per_pool: bool = False, per_project: bool = False
) -> str | None:
    """What is wrong with a value for a knob, as a message; None when it may stand."""
    if name not in setting_names():
        return "There is no such knob."
    if per_project and name not in setting_names(per_project=True):
        return "Projects have no value of their own for this knob."
    if per_pool and name not in setting_names(per_pool=True):
        return "This knob has one value for the whole cluster."
    if (choice := CHOICE_SETTINGS.get(name)) is not None:
        return None if value in choice.options else f"Must be one of: {', '.join(choice.options)}."
    knob = NUMBER_SETTINGS[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "Must be a number."
    if not knob.minimum <= value <= knob.maximum:
        unit = f" {knob.unit}" if knob.unit else ""
        return f"Must be between {format_number(knob.minimum)} and {format_number(knob.maximum)}{unit}."
    return None if normalize_value(name, value) == value else "Must be a whole number."


def normalize_value(name: str, value: SettingValue) -> SettingValue:
    """The value as its knob has it: a knob whose default is a whole number counts something."""
    return int(value) if isinstance(default_value(name), int) else value
