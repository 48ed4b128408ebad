"""Simulates what a change of quotas would do to the present queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from django.db.models import Q

from portal.engine_client import query_quota_effect
from portal.models import NodePool, Project, Quota
from portal.selectors.projects.quota_additions import with_effective_quota
from portal.services.projects.projects import QuotaValues, quota_values, validate_quota


@dataclass(frozen=True)
class QuotaEdit:
    """New values of a quota, without temporary additions."""

    project: Project
    pool: NodePool
    values: QuotaValues


def add_milli(values: QuotaValues, extra_milli: int) -> QuotaValues:
    """Return the values with more GPUs guaranteed, and a limit that is higher by as many."""
    limit = None if values.limit_milli is None else values.limit_milli + extra_milli
    return replace(values, guaranteed_milli=values.guaranteed_milli + extra_milli, limit_milli=limit)


def present_values(project: Project, pool: NodePool) -> tuple[QuotaValues, int]:
    """Return the values of a quota and its version; defaults and 0 where none was set."""
    quota = Quota.objects.filter(project=project, pool=pool).first()
    return (QuotaValues(), 0) if quota is None else (QuotaValues(**quota_values(quota)), quota.version)


def simulate_quota_effect(edits: Sequence[QuotaEdit]) -> dict[str, Any] | None:
    """Return the effect as ``query_quota_effect`` does, or None if the scheduler does not answer in time.

    Must not run in a transaction. Raise InvalidRequest for values that could not be saved.
    """
    return query_quota_effect(engine_quotas(edits)) if edits else None


def engine_quotas(edits: Sequence[QuotaEdit]) -> list[dict[str, Any]]:
    """Return the quotas as the scheduler reads them, with the additions in force.

    Raise InvalidRequest for values that could not be saved.
    """
    for edit in edits:
        validate_quota(edit.values)
    wanted = Q()
    for edit in edits:
        wanted |= Q(project=edit.project, pool=edit.pool)
    extra = {
        (row.project_id, row.pool_id): row.extra_milli
        for row in with_effective_quota(Quota.objects.filter(wanted))
    }
    return [
        {
            "project": edit.project.public_id,
            "pool": edit.pool.public_id,
            **asdict(add_milli(edit.values, extra.get((edit.project.pk, edit.pool.pk), 0))),
        }
        for edit in edits
    ]
