"""Topics of live data: their permissions, checked by ``portal.access``, and their first frame."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from portal.access import Permission, require_permission
from portal.domain.states import NodeState
from portal.errors import NotFound
from portal.live.log_frame import log_frame
from portal.models import Gpu, Job, Node, Project, User
from portal.selectors.jobs.logs import lines
from portal.selectors.nodes import metric_series
from portal.valkey.sample_cache import CLUSTER_KEY, latest_frames

TAIL_LINES = 200
_Row = TypeVar("_Row", bound=Model)
_TOPIC_PATTERN = re.compile(
    r"(cluster)|(user|inbox)\.(me|[a-z0-9]{1,16})|(node|job|project)\.([a-z0-9]{1,16})|logs\.([a-z0-9]{1,16})\.(\d{1,5})"
)


@dataclass(frozen=True)
class Topic:
    """A parsed topic: ``name`` is that of the group, ``requested_name`` that of the browser."""

    requested_name: str
    name: str
    kind: str
    public_id: str = ""
    rank: int = 0


def parse_topic(name: str, user: User) -> Topic:
    """Parse a topic; ``me`` means ``user``. Raise NotFound for an unknown one."""
    match = _TOPIC_PATTERN.fullmatch(name)
    if match is None:
        raise NotFound("There is no such topic.")
    cluster, own, account, kind, public_id, log_job, rank = match.groups()
    if cluster:
        return Topic(name, "cluster", "cluster")
    if account:
        if account not in ("me", user.public_id):
            raise NotFound
        return Topic(name, f"{own}.{user.public_id}", own, user.public_id)
    if log_job:
        return Topic(name, f"logs.{log_job}.{int(rank)}", "logs", log_job, int(rank))
    return Topic(name, name, kind, public_id)


def check_topic_access(user: User, topic: Topic) -> None:
    """Raise unless the user may watch the topic now; called on subscribe and again on permission changes."""
    match topic.kind:
        case "job":
            require_permission(user, Permission.VIEW, _job(topic.public_id))
        case "logs":
            require_permission(user, Permission.READ_LOGS, _job(topic.public_id))
        case "node":
            require_permission(user, Permission.VIEW, _node(topic.public_id))
        case "project":
            require_permission(user, Permission.VIEW, _find(Project.objects.all(), topic.public_id))


def initial_frame(user: User, topic: Topic) -> dict[str, Any] | None:
    """Return data so far: ``kind`` "backfill" with rollups and the last sample, or the tail of a log."""
    match topic.kind:
        case "cluster":
            return {"kind": "backfill", "gpus": _orders(), "last": _last_frame(CLUSTER_KEY)}
        case "node":
            node = _node(topic.public_id)
            series = asdict(metric_series.read_node_series(user, node))
            return {"kind": "backfill", "minutes": series, "last": _last_frame(node.public_id)}
        case "job":
            series = asdict(metric_series.read_job_series(user, _job(topic.public_id)))
            return {"kind": "backfill", "minutes": series, "last": None}
        case "logs":
            return _log_tail(user, topic)
    return None


def _last_frame(name: str) -> dict[str, Any] | None:
    return latest_frames([name]).get(name)


def _log_tail(user: User, topic: Topic) -> dict[str, Any]:
    try:
        file = lines.get_log(user, _job(topic.public_id), topic.rank)
    except NotFound:
        return log_frame(0, topic.rank, None)
    return log_frame(file.attempt, topic.rank, lines.tail(file, TAIL_LINES))


def _orders() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    rows = Gpu.objects.filter(present=True).exclude(node__state=NodeState.RETIRED.value)
    for uuid, node in rows.order_by("node_id", "index").values_list("uuid", "node__public_id"):
        found.setdefault(node, []).append(uuid)
    return found


def _job(public_id: str) -> Job:
    return _find(Job.objects.select_related("project", "owner"), public_id)


def _node(public_id: str) -> Node:
    return _find(Node.objects.exclude(state=NodeState.RETIRED.value), public_id)


def _find(rows: QuerySet[_Row], public_id: str) -> _Row:
    found = rows.filter(public_id=public_id).first()
    if found is None:
        raise NotFound
    return found
