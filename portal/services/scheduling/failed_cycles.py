"""Exports the input of a failed cycle. It names users' jobs, so every export is audited."""

from __future__ import annotations

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import require_admin
from portal.errors import Conflict
from portal.models import FailedCycle, User
from portal.selectors.lookup import get_first
from portal.services.audit import record_action


def do_export_failed_cycle(actor: User, public_id: str) -> tuple[str, bytes]:
    """Return file name and content: gzip JSON for ``python -m scheduler.replay snapshot FILE``."""
    require_admin(actor, "download the input of a cycle")
    with transaction.atomic():
        missing = _("There is no such failed cycle; only the newest 20 of the last 30 days are kept.")
        row = get_first(FailedCycle.objects.filter(public_id=public_id), missing)
        if not row.content:
            raise Conflict(_("The input of this cycle could not be saved."), code="not_saved")
        record_action(
            actor, "failed_cycle.export", row, after={"at": row.first_at.isoformat(), "bytes": row.size_bytes}
        )
    return f"fairway-cycle-{row.first_at:%Y%m%d-%H%M%S}.json.gz", bytes(row.content)
