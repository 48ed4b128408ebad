"""Reasons why a job is pending, moved or refused: stable codes, each with a message.

Codes are part of the API and never renamed. Messages insert details through ``str.format`` fields.
"""

from __future__ import annotations

from enum import StrEnum

from portal.domain.stored_texts import stored_text


class VerdictCode(StrEnum):
    """The one reason why a pending job did not start in a cycle."""

    PROJECT_LIMIT = "project_limit"
    NON_PREEMPTIBLE_OVER_QUOTA = "non_preemptible_over_quota"
    OVER_FAIR_SHARE = "over_fair_share"
    INSUFFICIENT_RESOURCES = "insufficient_resources"
    HELD = "held"
    WAITING_FOR_EVICTION = "waiting_for_eviction"
    RESERVED_FOR_OTHER_JOB = "reserved_for_other_job"
    VICTIMS_PROTECTED = "victims_protected"
    BEGIN_TIME = "begin_time"
    DEPENDENCY = "dependency"
    VOLUME_UNAVAILABLE = "volume_unavailable"
    USER_LIMIT = "user_limit"
    CYCLE_BUDGET_EXHAUSTED = "cycle_budget_exhausted"
    OWNER_NOT_PERMITTED = "owner_not_permitted"
    INVALID_DATA = "invalid_data"
    UNSATISFIABLE = "unsatisfiable"


NO_FORECAST_REASONS: dict[str, str] = {
    VerdictCode.HELD: "It is held; its start is predicted after it is released.",
    VerdictCode.DEPENDENCY: "Its start is predicted after its dependencies have ended.",
    VerdictCode.VOLUME_UNAVAILABLE: "The node of its home volume accepts no jobs for an unknown time.",
    VerdictCode.UNSATISFIABLE: "This cluster cannot satisfy its request.",
    VerdictCode.OWNER_NOT_PERMITTED: "Its owner may not run it at the moment.",
    VerdictCode.INVALID_DATA: "It cannot be scheduled until invalid data is corrected.",
}
"""Verdicts without a start forecast, and why."""
FORECAST_WITHOUT_GPUS = "It requests no GPU, and forecasts predict only when GPUs become free."
FORECAST_FINDS_NO_START = (
    "No start is known: jobs that hold or will take what it needs have no time limit and no predicted end, or it "
    "could not start even after all of them have ended."
)
FORECAST_BEYOND_HORIZON = "Its start is further away than the forecast reaches."
OTHER_FORECAST_REASONS = (FORECAST_WITHOUT_GPUS, FORECAST_FINDS_NO_START, FORECAST_BEYOND_HORIZON)


class EndReason(StrEnum):
    """Why an attempt ended; the job page shows a message with cause and fix for each."""

    COMPLETED = "completed"
    EXIT_CODE = "exit_code"
    CANCELLED_BY_USER = "cancelled_by_user"
    CANCELLED_BY_ADMIN = "cancelled_by_admin"
    TIME_LIMIT = "time_limit"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_REBOOTED = "node_rebooted"
    NODE_FENCED = "node_fenced"
    CONTAINER_LOST = "container_lost"
    GPU_LOST = "gpu_lost"
    START_REFUSED = "start_refused"
    IMAGE_MISSING = "image_missing"
    DISK_FULL = "disk_full"
    DISK_LIMIT_EXCEEDED = "disk_limit_exceeded"
    PREEMPTED = "preempted"
    RECLAIMED = "reclaimed"
    SUSPENDED = "suspended"
    READINESS_TIMEOUT = "readiness_timeout"
    GANG_INCOMPLETE = "gang_incomplete"
    MIGRATED = "migrated"
    DEPENDENCY_FAILED = "dependency_failed"
    GPU_MEMORY_LIMIT_EXCEEDED = "gpu_memory_limit_exceeded"
    MPS_DAEMON_LOST = "mps_daemon_lost"
    RENDEZVOUS_UNREACHABLE = "rendezvous_unreachable"
    CLOCK_SKEW = "clock_skew"
    OWNER_NOT_PERMITTED = "owner_not_permitted"
    PRUNED = "pruned"
    STALLED = "stalled"
    CODE_CHANGED = "code_changed"


END_MESSAGES: dict[EndReason, str] = {
    EndReason.COMPLETED: "The command ended with exit code 0.",
    EndReason.EXIT_CODE: "The command ended with exit code {exit_code}.",
    EndReason.CANCELLED_BY_USER: "Stopped by {actor}.",
    EndReason.CANCELLED_BY_ADMIN: "Stopped by the administrator {actor}.",
    EndReason.TIME_LIMIT: "It reached its time limit of {limit}.",
    EndReason.OUT_OF_MEMORY: "It needed more memory than its {memory} and was stopped by the node.",
    EndReason.NODE_REBOOTED: "The node {node} restarted while it ran.",
    EndReason.NODE_FENCED: "An administrator declared the node {node} fenced.",
    EndReason.CONTAINER_LOST: "Its container disappeared from {node}.",
    EndReason.GPU_LOST: "A GPU of {node} failed.",
    EndReason.START_REFUSED: "The node {node} refused to start it: {detail}",
    EndReason.IMAGE_MISSING: "The image {image} is not on {node} and could not be pulled: {detail}",
    EndReason.DISK_FULL: "The disk of {node} is full.",
    EndReason.DISK_LIMIT_EXCEEDED: "It wrote {used} to the disk of {node} outside its volumes; {limit} are allowed. "
    "Write large files to its home or a volume.",
    EndReason.PREEMPTED: "It was preempted by a job of higher priority and is pending again.",
    EndReason.RECLAIMED: "Its borrowed GPUs were reclaimed for another project, and it is pending again.",
    EndReason.SUSPENDED: "Suspended; it keeps its files and holds no GPU.",
    EndReason.READINESS_TIMEOUT: "Its server did not answer within {seconds} s.",
    EndReason.MIGRATED: "It moves to other GPUs so that a job that needs more GPUs together can start.",
    EndReason.DEPENDENCY_FAILED: "It depends on {job}, which {how_text}, so it can never start.",
    EndReason.GPU_MEMORY_LIMIT_EXCEEDED: "It used {used} of the memory of GPU {gpu} of {node} "
    "for {seconds} s, but its "
    "share is {share}. Other jobs share that GPU.",
    EndReason.MPS_DAEMON_LOST: "The MPS daemon of a GPU that it shared on {node} stopped.",
    EndReason.CLOCK_SKEW: (
        "The clocks of {node} and {first} differ by {skew} s, more than the {limit} s that the pool allows. "
        "None of its tasks started."
    ),
    EndReason.RENDEZVOUS_UNREACHABLE: "{node} {verb} {first} ({place}): {why}. None of its tasks started.",
    EndReason.OWNER_NOT_PERMITTED: "Its owner may no longer run it: {detail}",
    EndReason.PRUNED: "Its sweep ended it early: other trials are better.",
    EndReason.STALLED: "It wrote nothing, reported no progress and did not use its GPUs for {duration}.",
    EndReason.CODE_CHANGED: "Its tasks checked out different commits, {first} and {other}: its branch or tag moved. "
    "The next attempt checks out {first}.",
    EndReason.GANG_INCOMPLETE: "Another task of the job ended, so the whole attempt ended.",
}

PENDING_AGAIN = stored_text("It is pending again.")
"""Follows the message of an attempt after which the job waits."""


def end_message(reason: EndReason | str, **facts: object) -> str:
    """Return the message for an end reason; unknown fields read as an en dash."""

    class _Known(dict[str, object]):
        def __missing__(self, key: str) -> str:
            return "–"

    return END_MESSAGES[EndReason(reason)].format_map(_Known(facts))
