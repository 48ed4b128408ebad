"""The failure box: exit code with its name, cause, and suggested fixes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from portal.domain.jobs.exit_codes import exit_signal
from portal.domain.jobs.failure_rules import FailureAction, FailureRule
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.models import Attempt, Job
from portal.selectors.jobs.failure_rules import IdentifiedFailure, more_memory_mib
from portal.selectors.jobs.signals import sent_signal
from portal.services.jobs.retries import failed_node, failed_rank
from portal.stored_texts import translate_stored
from portal.web.display.formatting import memory
from portal.web.display.rule_texts import translate_rule

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise as StrOrPromise


EXIT_CODE_MEANINGS = {
    1: gettext_noop("a general error of the program"),
    2: gettext_noop("wrong use of a command"),
    126: gettext_noop("the command is not executable"),
    127: gettext_noop("the command was not found"),
}


@dataclass(frozen=True)
class SuggestedFix:
    """A suggested fix: text, a note, and the page for it (empty: text only).

    ``changes`` are launch form values that differ from the job's, by API name. ``button`` labels the view
    ``retry``, which submits the job again with the action of its failure rule.
    """

    title: StrOrPromise
    description: StrOrPromise
    view: str = ""
    button: str = ""
    changes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FailureSummary:
    title: StrOrPromise
    cause: str
    exit_name: str
    fixes: list[SuggestedFix]
    identified: IdentifiedFailure | None = None
    """The failure rule that matched."""


READ_LOG = SuggestedFix(
    gettext_lazy("Read the last lines of its log"),
    gettext_lazy("The program's error message usually names the cause."),
    "job-logs",
)
EDIT = SuggestedFix(
    gettext_lazy("Change the request and launch it"),
    gettext_lazy("The form opens filled with this job's values."),
    "launch",
)
RESUBMIT = SuggestedFix(
    gettext_lazy("Resubmit the same request"), gettext_lazy("It joins the queue as a new job."), "resubmit"
)
CONTACT = SuggestedFix(
    gettext_lazy("Contact an administrator"),
    gettext_lazy("The cause is in the cluster, not in your program."),
)
LARGER_SHARE = SuggestedFix(
    gettext_lazy("Request a larger share, or the whole GPU"),
    gettext_lazy("Or limit the GPU memory of the program: frameworks have a setting for it."),
    "launch",
)
USE_VOLUME = SuggestedFix(
    gettext_lazy("Write large files to a volume"),
    gettext_lazy(
        "Its home, a project's volume or a scratch folder; the limit counts /tmp and the image's own folders."
    ),
    "launch",
)
LONGER = SuggestedFix(
    gettext_lazy("Request a longer time limit"),
    gettext_lazy("Or save checkpoints and continue from the last one."),
    "launch",
)
KILLED = SuggestedFix(
    gettext_lazy("Look for the cause of the kill"),
    gettext_lazy("It was killed with SIGKILL, often because it ran out of memory."),
    "job-logs",
)
NOT_STARTED = (gettext_lazy("It could not be started"), [CONTACT, RESUBMIT])
NODE_FAILED = (gettext_lazy("Its node failed"), [RESUBMIT])
BY_REASON: dict[EndReason, tuple[StrOrPromise, list[SuggestedFix]]] = {
    EndReason.GPU_MEMORY_LIMIT_EXCEEDED: (
        gettext_lazy("It used more than its share of a GPU"),
        [LARGER_SHARE, READ_LOG],
    ),
    EndReason.DISK_LIMIT_EXCEEDED: (
        gettext_lazy("It wrote too much to the node's disk"),
        [USE_VOLUME, READ_LOG],
    ),
    EndReason.TIME_LIMIT: (gettext_lazy("It reached its time limit"), [LONGER, RESUBMIT]),
    EndReason.STALLED: (gettext_lazy("It stalled"), [READ_LOG, RESUBMIT]),
    EndReason.READINESS_TIMEOUT: (gettext_lazy("Its server never answered"), [READ_LOG, RESUBMIT]),
    EndReason.IMAGE_MISSING: NOT_STARTED,
    EndReason.START_REFUSED: NOT_STARTED,
    EndReason.DISK_FULL: NOT_STARTED,
    EndReason.CODE_CHANGED: (gettext_lazy("Its branch moved while it was checked out"), [RESUBMIT]),
    EndReason.RENDEZVOUS_UNREACHABLE: (
        gettext_lazy("Its nodes could not reach each other"),
        [CONTACT, RESUBMIT],
    ),
    EndReason.CLOCK_SKEW: (gettext_lazy("The clocks of its nodes differ"), [CONTACT, RESUBMIT]),
    EndReason.NODE_REBOOTED: NODE_FAILED,
    EndReason.NODE_FENCED: NODE_FAILED,
    EndReason.CONTAINER_LOST: NODE_FAILED,
    EndReason.GPU_LOST: NODE_FAILED,
    EndReason.MPS_DAEMON_LOST: NODE_FAILED,
}
"""Title and fixes of each reason for which nothing else of the job matters."""


def exit_name(code: int | None, *, sent_by_portal: bool = False) -> str:
    """Return exit 137 (SIGKILL) or exit 127 (the command was not found); "" without a code."""
    if code is None:
        return ""
    if signal := exit_signal(code):
        meaning = _("{signal}, sent by the portal").format(signal=signal) if sent_by_portal else signal
        return _("exit {code} ({meaning})").format(code=code, meaning=meaning)
    if code in EXIT_CODE_MEANINGS:
        return _("exit {code} ({meaning})").format(code=code, meaning=_(EXIT_CODE_MEANINGS[code]))
    return _("exit {code}").format(code=code)


def build_failure_summary(
    job: Job, last: Attempt | None, identified: IdentifiedFailure | None
) -> FailureSummary | None:
    """Return the box of a job that failed or timed out; None for others."""
    if job.state not in (JobState.FAILED, JobState.TIMEOUT):
        return None
    reason = EndReason(job.reason) if job.reason in set(EndReason) else EndReason.EXIT_CODE
    code = job.exit_code if job.exit_code is not None else (last.exit_code if last else None)
    code_name = exit_name(code, sent_by_portal=last is not None and sent_signal(last, code) is not None)
    if identified is not None:
        rule = translate_rule(identified.rule)
        fixes = _fixes_of_rule(job, last, rule)
        return FailureSummary(
            rule.title,
            f"{rule.cause} {translate_stored(job.message)}",
            code_name,
            fixes,
            identified,
        )
    title, fixes = _title_and_fixes(job, last, reason, code)
    return FailureSummary(title, translate_stored(job.message), code_name, fixes)


def _title_and_fixes(
    job: Job, last: Attempt | None, reason: EndReason, code: int | None
) -> tuple[StrOrPromise, list[SuggestedFix]]:
    if reason in BY_REASON:
        return BY_REASON[reason]
    if reason is EndReason.OUT_OF_MEMORY:
        return _("It ran out of memory"), [_more_memory(job, last), READ_LOG]
    if code == 127:
        word = str(job.command[0]) if job.command else _("the tool")
        where = _("“{word}” is not in the environment {name}.").format(word=word, name=job.environment.name)
        return _("The command was not found"), [
            SuggestedFix(_("Check the command's spelling"), where, "launch"),
            READ_LOG,
        ]
    if code == 137:
        return _("It was killed"), [KILLED, EDIT]
    return _("The command failed"), [READ_LOG, EDIT, RESUBMIT]


def _fixes_of_rule(job: Job, last: Attempt | None, rule: FailureRule) -> list[SuggestedFix]:
    """Return the fix of the rule, with its action if that is possible, then what is always possible."""
    fix = rule.fix
    match rule.action:
        case FailureAction.RETRY:
            first = SuggestedFix(_("Start it again"), fix, "retry", _("Retry"))
        case FailureAction.RETRY_WITH_MORE_MEMORY if more := _more_mib(job, last):
            title = _("Start it again with {memory} of memory").format(memory=memory(more))
            first = SuggestedFix(
                title,
                f"{_memory_used(job, last)} {fix}",
                "retry",
                _("Retry with {memory}").format(memory=memory(more)),
            )
            return [first, replace(EDIT, changes=_memory_change(job, more)), READ_LOG]
        case FailureAction.EXCLUDE_NODE if last and (node := failed_node(last)):
            title = _("Start it again without {name}").format(name=node.name)
            first = SuggestedFix(title, fix, "retry", _("Retry without {name}").format(name=node.name))
        case _:
            first = SuggestedFix(fix, "")
    return [first, EDIT, RESUBMIT, READ_LOG]


def _memory_used(job: Job, last: Attempt | None) -> str:
    peak = max((task.peak_memory_mib or 0 for task in last.task_rows.all()), default=0) if last else 0
    had = memory(job.memory_of(failed_rank(last) if last else 0))
    return (
        _("Per task it used {memory} of {had}.").format(memory=memory(peak), had=had)
        if peak
        else _("Per task it had {had}.").format(had=had)
    )


def _more_mib(job: Job, last: Attempt | None) -> int | None:
    return more_memory_mib(job, failed_rank(last) if last else 0)


def _memory_change(job: Job, memory_mib: int) -> dict[str, int]:
    """Return the change of the form; that of a role has no name of its own."""
    return {} if job.roles else {"memory_mib": memory_mib}


def _more_memory(job: Job, last: Attempt | None) -> SuggestedFix:
    more = _more_mib(job, last)
    if more is None:
        return SuggestedFix(
            _("Use less memory"),
            _("{memory_used} No node has more.").format(memory_used=_memory_used(job, last)),
            "launch",
        )
    title = _("Request more memory, such as {memory}").format(memory=memory(more))
    return SuggestedFix(title, _memory_used(job, last), "launch", changes=_memory_change(job, more))
