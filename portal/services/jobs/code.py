"""The code of a job: what an attempt checks out or unpacks, and which commit its nodes report."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from django.db import transaction
from django.utils import timezone

from agents.launchers.checkout import CODE_DIR, Checkout, Code, CodeFolder
from portal.domain.jobs.code import parse_repository
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.scheduling.policy_settings import CODE_SIZE_LIMIT, CODE_TIME_LIMIT, SettingValue
from portal.domain.states import RuntimeKind
from portal.domain.stored_texts import stored_text
from portal.models import Attempt
from portal.services.lifecycle import job_control
from portal.services.lifecycle.state_events import record_event


def attempt_code(attempt: Attempt, runtime: str, settings: Mapping[str, SettingValue]) -> Code | None:
    """Return what an attempt checks out or unpacks on a node, or its folder; None for a job without code.

    Once a task of the job has reported a commit, all later ones check out that commit.
    """
    job = attempt.job
    folder = "" if runtime == RuntimeKind.PROCESS.value else CODE_DIR
    if job.code_archive:
        return CodeFolder(folder, job.code_archive, int(settings[CODE_SIZE_LIMIT]))
    if job.code_path:
        return CodeFolder(job.code_path)
    url = parse_repository(job.code_repository)
    if url is None:
        return None
    known = Attempt.objects.filter(job=job).exclude(code_commit="").order_by("number")
    return Checkout(
        url=job.code_repository,
        login_url=url.login_url,
        user=url.user,
        ref=known.values_list("code_commit", flat=True).first() or job.code_ref,
        folder=folder,
        limit_s=int(settings[CODE_TIME_LIMIT]),
        limit_mib=int(settings[CODE_SIZE_LIMIT]),
        known_hosts=url.known_hosts(job.code_host_key),
    )


def record_code_commit(attempt: Attempt, commit: str, written_s: float | None) -> None:
    """Record the commit that a task checked out, and when by the clock of its node. Repeatable.

    Stop an attempt whose tasks checked out different ones, because a branch moved in between: the next attempt
    uses the recorded one.
    """
    if not attempt.job.code_repository or attempt.code_commit == commit:
        return
    with transaction.atomic():
        now = timezone.now()
        at = now if written_s is None else min(now, dt.datetime.fromtimestamp(written_s, dt.UTC))
        changes = {"code_commit": commit, "code_ready_at": max(attempt.running_at or attempt.created_at, at)}
        if Attempt.objects.filter(pk=attempt.pk, code_commit="").update(**changes):
            record_event(attempt, "code", "code", stored_text(f"It checked out commit {commit}."))
            attempt.code_commit = commit
            return
    recorded = Attempt.objects.values_list("code_commit", flat=True).get(pk=attempt.pk)
    if recorded != commit:
        message = end_message(EndReason.CODE_CHANGED, first=recorded[:12], other=commit[:12])
        job_control.request_stop(attempt.pk, EndReason.CODE_CHANGED, message=message)
