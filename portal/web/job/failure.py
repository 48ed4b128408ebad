"""The failure box: exit code with its name, cause, and suggested fixes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from portal.domain.failure_rules import FailureAction
from portal.domain.reasons import EndReason
from portal.domain.states import JobState
from portal.models import Attempt, Job
from portal.selectors.failure_rules import IdentifiedFailure, more_memory_mib
from portal.services.jobs.retries import failed_node, failed_rank
from portal.web.display.formatting import memory

SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
    11: "SIGSEGV", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ",
}  # fmt: skip
EXIT_CODE_MEANINGS = {
    1: "a general error of the program",
    2: "wrong use of a command",
    126: "the command is not executable",
    127: "the command was not found",
}


@dataclass(frozen=True)
class SuggestedFix:
    """A suggested fix: text, a note, and the page for it (empty: text only).

    ``changes`` are launch form values that differ from the job's, by API name. ``button`` labels the view
    ``retry``, which submits the job again with the action of its failure rule.
    """

    title: str
    description: str
    view: str = ""
    button: str = ""
    changes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FailureSummary:
    title: str
    cause: str
    exit_name: str
    fixes: list[SuggestedFix]
    identified: IdentifiedFailure | None = None
    """The failure rule that matched."""


READ_LOG = SuggestedFix(
    "Read the last lines of its log", "The program's error message usually names the cause.", "job-logs"
)
EDIT = SuggestedFix(
    "Change the request and launch it", "The form opens filled with this job's values.", "launch"
)
RESUBMIT = SuggestedFix("Resubmit the same request", "It joins the queue as a new job.", "resubmit")
CONTACT = SuggestedFix("Contact an administrator", "The cause is in the cluster, not in your program.")
LARGER_SHARE = SuggestedFix(
    "Request a larger share, or the whole GPU",
    "Or limit the GPU memory of the program: frameworks have a setting for it.",
    "launch",
)
USE_VOLUME = SuggestedFix(
    "Write large files to a volume",
    "Its home, a project's volume or a scratch folder; the limit counts /tmp and the image's own folders.",
    "launch",
)
LONGER = SuggestedFix(
    "Request a longer time limit", "Or save checkpoints and continue from the last one.", "launch"
)
KILLED = SuggestedFix(
    "Look for the cause of the kill",
    "It was killed with SIGKILL, often because it ran out of memory.",
    "job-logs",
)
NOT_STARTED = ("It could not be started", [CONTACT, RESUBMIT])
NODE_FAILED = ("Its node failed", [RESUBMIT])
BY_REASON: dict[EndReason, tuple[str, list[SuggestedFix]]] = {
    EndReason.GPU_MEMORY_LIMIT_EXCEEDED: ("It used more than its share of a GPU", [LARGER_SHARE, READ_LOG]),
    EndReason.DISK_LIMIT_EXCEEDED: ("It wrote too much to the node's disk", [USE_VOLUME, READ_LOG]),
    EndReason.TIME_LIMIT: ("It reached its time limit", [LONGER, RESUBMIT]),
    EndReason.STALLED: ("It stalled", [READ_LOG, RESUBMIT]),
    EndReason.READINESS_TIMEOUT: ("Its server never answered", [READ_LOG, RESUBMIT]),
    EndReason.IMAGE_MISSING: NOT_STARTED,
    EndReason.START_REFUSED: NOT_STARTED,
    EndReason.DISK_FULL: NOT_STARTED,
    EndReason.CODE_CHANGED: ("Its branch moved while it was checked out", [RESUBMIT]),
    EndReason.RENDEZVOUS_UNREACHABLE: ("Its nodes could not reach each other", [CONTACT, RESUBMIT]),
    EndReason.CLOCK_SKEW: ("The clocks of its nodes differ", [CONTACT, RESUBMIT]),
    EndReason.NODE_REBOOTED: NODE_FAILED,
    EndReason.NODE_FENCED: NODE_FAILED,
    EndReason.CONTAINER_LOST: NODE_FAILED,
    EndReason.GPU_LOST: NODE_FAILED,
    EndReason.MPS_DAEMON_LOST: NODE_FAILED,
}
"""Title and fixes of each reason for which nothing else of the job matters."""


def exit_name(code: int | None) -> str:
    """Return exit 137 (SIGKILL) or exit 127 (the command was not found); "" without a code."""
    if code is None:
        return ""
    if code > 128 and code - 128 in SIGNAL_NAMES:
        return f"exit {code} ({SIGNAL_NAMES[code - 128]})"
    return f"exit {code} ({EXIT_CODE_MEANINGS[code]})" if code in EXIT_CODE_MEANINGS else f"exit {code}"


def build_failure_summary(
    job: Job, last: Attempt | None, identified: IdentifiedFailure | None
) -> FailureSummary | None:
    """Return the box of a job that failed or timed out; None for others."""
    if job.state not in (JobState.FAILED, JobState.TIMEOUT):
        return None
    reason = EndReason(job.reason) if job.reason in set(EndReason) else EndReason.EXIT_CODE
    code = job.exit_code if job.exit_code is not None else (last.exit_code if last else None)
    if identified is not None:
        rule = identified.rule
        fixes = _fixes_of_rule(job, last, identified)
        return FailureSummary(rule.title, f"{rule.cause} {job.message}", exit_name(code), fixes, identified)
    title, fixes = _title_and_fixes(job, last, reason, code)
    return FailureSummary(title, job.message, exit_name(code), fixes)


def _title_and_fixes(
    job: Job, last: Attempt | None, reason: EndReason, code: int | None
) -> tuple[str, list[SuggestedFix]]:
    if reason in BY_REASON:
        return BY_REASON[reason]
    if reason is EndReason.OUT_OF_MEMORY:
        return "It ran out of memory", [_more_memory(job, last), READ_LOG]
    if code == 127:
        word = str(job.command[0]) if job.command else "the tool"
        where = f"“{word}” is not in the environment {job.environment.name}."
        return "The command was not found", [
            SuggestedFix("Check the command's spelling", where, "launch"),
            READ_LOG,
        ]
    if code == 137:
        return "It was killed", [KILLED, EDIT]
    return "The command failed", [READ_LOG, EDIT, RESUBMIT]


def _fixes_of_rule(job: Job, last: Attempt | None, identified: IdentifiedFailure) -> list[SuggestedFix]:
    """Return the fix of the rule, with its action if that is possible, then what is always possible."""
    fix = identified.rule.fix
    match identified.rule.action:
        case FailureAction.RETRY:
            first = SuggestedFix("Start it again", fix, "retry", "Retry")
        case FailureAction.RETRY_WITH_MORE_MEMORY if more := _more_mib(job, last):
            title = f"Start it again with {memory(more)} of memory"
            first = SuggestedFix(
                title, f"{_memory_used(job, last)} {fix}", "retry", f"Retry with {memory(more)}"
            )
            return [first, replace(EDIT, changes=_memory_change(job, more)), READ_LOG]
        case FailureAction.EXCLUDE_NODE if last and (node := failed_node(last)):
            title = f"Start it again without {node.name}"
            first = SuggestedFix(title, fix, "retry", f"Retry without {node.name}")
        case _:
            first = SuggestedFix(fix, "")
    return [first, EDIT, RESUBMIT, READ_LOG]


def _memory_used(job: Job, last: Attempt | None) -> str:
    peak = max((task.peak_memory_mib or 0 for task in last.task_rows.all()), default=0) if last else 0
    had = memory(job.memory_of(failed_rank(last) if last else 0))
    return f"Per task it used {memory(peak)} of {had}." if peak else f"Per task it had {had}."


def _more_mib(job: Job, last: Attempt | None) -> int | None:
    return more_memory_mib(job, failed_rank(last) if last else 0)


def _memory_change(job: Job, memory_mib: int) -> dict[str, int]:
    """Return the change of the form; that of a role has no name of its own."""
    return {} if job.roles else {"memory_mib": memory_mib}


def _more_memory(job: Job, last: Attempt | None) -> SuggestedFix:
    more = _more_mib(job, last)
    if more is None:
        return SuggestedFix("Use less memory", f"{_memory_used(job, last)} No node has more.", "launch")
    title = f"Request more memory, such as {memory(more)}"
    return SuggestedFix(title, _memory_used(job, last), "launch", changes=_memory_change(job, more))
