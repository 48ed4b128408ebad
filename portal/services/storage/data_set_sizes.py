"""Measures versions of data sets: requested here, counted by a node that has the volume, for its actor."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.db.models import Case, QuerySet, When
from django.db.models.functions import Now

from agents.verbs import FOLDER_SIZE
from portal.domain.states import NodeState
from portal.domain.stored_texts import stored_text
from portal.models import DataSetVersion, Node, Volume
from portal.outbox import notify_node
from portal.services.storage.volumes import nodes_by_volume

MEASURE_HINT = "data_sets"
TIMEOUT = dt.timedelta(minutes=40)
"""Longer than a node counts."""


def request_measurement(row: DataSetVersion) -> None:
    """Choose a node and wake it up; without one, store why. Must run in a transaction."""
    row.node, row.measure_problem = _measuring_node(row.volume), ""
    row.measure_requested_at = Now() if row.node else None
    if row.node is None:
        row.measure_problem = stored_text("No node with the volume is reachable.")
    row.save(update_fields=["node", "measure_requested_at", "measure_problem"])
    row.refresh_from_db(fields=["measure_requested_at"])
    if row.node is not None:
        notify_node(row.node.public_id, MEASURE_HINT)


def _measuring_node(volume: Volume) -> Node | None:
    """Return a reachable node with the volume: one whose agent can measure it if possible, seen last."""
    rows = Node.objects.filter(reachable=True).exclude(
        state__in=[NodeState.RETIRED.value, NodeState.ENROLLING.value]
    )
    limited = nodes_by_volume([volume]).get(volume.pk)
    if limited is not None:
        rows = rows.filter(pk__in=limited)
    is_able = When(agent_info__capabilities__contains=[FOLDER_SIZE.capability], then=1)
    return rows.order_by(Case(is_able, default=0).desc(), "-last_seen_at", "pk").first()


# -- carried out by the node's actor ---------------------------------------------------------------


def version_to_measure(node: Node) -> DataSetVersion | None:
    """Return the version that the node is to measure next, the one that was requested first."""
    rows = _measuring().filter(node=node).order_by("measure_requested_at", "pk")
    return rows.select_related("volume", "data_set__project", "created_by").first()


def record_size(row: DataSetVersion, size_bytes: int, file_count: int) -> None:
    """Store the size, unless the measurement was requested anew or given up meanwhile."""
    _same_request(row).update(
        size_bytes=size_bytes,
        file_count=file_count,
        measured_at=Now(),
        measure_requested_at=None,
        measure_problem="",
    )


def record_measure_problem(row: DataSetVersion, problem: str) -> None:
    """Store why the version was not measured; an earlier size remains."""
    _same_request(row).update(measure_requested_at=None, measure_problem=problem[:300])


def _same_request(row: DataSetVersion) -> QuerySet[DataSetVersion]:
    return DataSetVersion.objects.filter(pk=row.pk, measure_requested_at=row.measure_requested_at)


def _measuring() -> QuerySet[DataSetVersion]:
    return DataSetVersion.objects.filter(measure_requested_at__isnull=False)


# -- periodic --------------------------------------------------------------------------------------


def repair_measurements() -> None:
    """End measurements that take too long, and give those of unreachable nodes to others."""
    for row in _measuring().filter(measure_requested_at__lt=Now() - TIMEOUT):
        record_measure_problem(row, stored_text("The node did not finish in time."))
    for pk in _measuring().exclude(node__reachable=True).values_list("pk", flat=True)[:100]:
        with transaction.atomic():
            locked = (
                _measuring().select_for_update(of=("self",)).select_related("volume").filter(pk=pk).first()
            )
            if locked is not None:
                request_measurement(locked)
