"""Signals that users sent to jobs through the portal."""

from __future__ import annotations

from portal.domain.jobs.exit_codes import exit_signal
from portal.models import Attempt, JobSignal


def sent_signal(attempt: Attempt, exit_code: int | None) -> JobSignal | None:
    """Return the signal that the portal sent to an attempt and that this exit code names, else None."""
    name = exit_signal(exit_code)
    if not name:
        return None
    sent = JobSignal.objects.filter(attempt=attempt, signal=name, sent_at__isnull=False)
    return sent.select_related("actor").last()
