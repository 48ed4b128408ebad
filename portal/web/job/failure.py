"""The failure box: exit code with its name, cause, and suggested fixes."""

from __future__ import annotations

from dataclasses import dataclass, field

from portal.domain.reasons import EndReason
from portal.domain.states import JobState
from portal.models import Attempt, Job
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

    ``changes`` are launch form values that differ from the job's, by API name.
    """

    title: str
    description: str
    action_label: str = ""
    action_view: str = ""
    changes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FailureSummary:
    title: str
    cause: str
    exit_name: str
    fixes: list[SuggestedFix]


def exit_name(code: int | None) -> str:
    """Return exit 137 (SIGKILL) or exit 127 (the command was not found); "" without a code."""
    if code is None:
        return ""
    if code > 128 and code - 128 in SIGNAL_NAMES:
        return f"exit {code} ({SIGNAL_NAMES[code - 128]})"
    return f"exit {code} ({EXIT_CODE_MEANINGS[code]})" if code in EXIT_CODE_MEANINGS else f"exit {code}"


def build_failure_summary(job: Job, last: Attempt | None) -> FailureSummary | None:
    """Return the box of a job that failed or timed out; None for others."""
    if job.state not in (JobState.FAILED, JobState.TIMEOUT):
        return None
    reason = EndReason(job.reason) if job.reason in set(EndReason) else EndReason.EXIT_CODE
    code = job.exit_code if job.exit_code is not None else (last.exit_code if last else None)
    title, fixes = _title_and_fixes(job, last, reason, code)
    return FailureSummary(title, job.message, exit_name(code), fixes)


def _title_and_fixes(
    job: Job, last: Attempt | None, reason: EndReason, code: int | None
) -> tuple[str, list[SuggestedFix]]:
    logs = SuggestedFix(
        "Read the last lines of its log",
        "The program's error message usually names the cause.",
        "Open the log",
        "job-logs",
    )
    edit = SuggestedFix(
        "Change the request and launch it",
        "The form opens filled with this job's values.",
        "Change and launch",
        "launch",
    )
    same = SuggestedFix("Resubmit the same request", "It joins the queue as a new job.", "", "resubmit")
    peak = max((task.peak_memory_mib or 0 for task in last.task_rows.all()), default=0) if last else 0
    if reason is EndReason.OUT_OF_MEMORY:
        more = job.memory_mib * 2
        used = (
            f"it used {memory(peak)} of {memory(job.memory_mib)}"
            if peak
            else f"it had {memory(job.memory_mib)}"
        )
        raised = SuggestedFix(
            f"Request more memory, such as {memory(more)}",
            f"Per task {used}.",
            "Change and launch",
            "launch",
            {"memory_mib": more},
        )
        return "It ran out of memory", [raised, logs]
    if reason is EndReason.GPU_MEMORY_LIMIT_EXCEEDED:
        larger = SuggestedFix(
            "Request a larger share, or the whole GPU",
            "Or limit the GPU memory of the program: frameworks have a setting for it.",
            "Change and launch",
            "launch",
        )
        return "It used more than its share of a GPU", [larger, logs]
    if reason is EndReason.DISK_LIMIT_EXCEEDED:
        elsewhere = SuggestedFix(
            "Write large files to a volume",
            "Its home, a project's volume or a scratch folder; the limit counts /tmp and the image's own folders.",
            "Change and launch",
            "launch",
        )
        return "It wrote too much to the node's disk", [elsewhere, logs]
    if reason is EndReason.TIME_LIMIT:
        longer = SuggestedFix(
            "Request a longer time limit",
            "Or save checkpoints and continue from the last one.",
            "Change and launch",
            "launch",
        )
        return "It reached its time limit", [longer, same]
    if reason is EndReason.READINESS_TIMEOUT:
        return "Its server never answered", [logs, same]
    if reason in {EndReason.IMAGE_MISSING, EndReason.START_REFUSED, EndReason.DISK_FULL}:
        reported = SuggestedFix(
            "Contact an administrator", "The cause is in the cluster, not in your program."
        )
        return "It could not be started", [reported, same]
    if reason is EndReason.RENDEZVOUS_UNREACHABLE:
        reported = SuggestedFix(
            "Contact an administrator", "The cause is in the cluster, not in your program."
        )
        return "Its nodes could not reach each other", [reported, same]
    if reason in {
        EndReason.NODE_REBOOTED,
        EndReason.NODE_FENCED,
        EndReason.CONTAINER_LOST,
        EndReason.GPU_LOST,
        EndReason.MPS_DAEMON_LOST,
    }:
        return "Its node failed", [same]
    if code == 127:
        spelled = SuggestedFix(
            "Check the command's spelling",
            f"“{_first_word(job)}” is not in the environment {job.environment.name}.",
            "Change and launch",
            "launch",
        )
        return "The command was not found", [spelled, logs]
    if code == 137:
        killed = SuggestedFix(
            "Look for the cause of the kill",
            "It was killed with SIGKILL, often because it ran out of memory.",
            "Open the log",
            "job-logs",
        )
        return "It was killed", [killed, edit]
    return "The command failed", [logs, edit, same]


def _first_word(job: Job) -> str:
    return str(job.command[0]) if job.command else "the tool"
