"""Measures versions of data sets on a node, one at a time, beside the node's other work."""

from __future__ import annotations

import time
from functools import partial

from agents.engines.replies import AgentError, FolderSize
from agents.node.storage.files import encode_path
from agents.verbs import FOLDER_SIZE
from portal.database.pool_middleware import release_connection
from portal.domain.stored_texts import stored_text
from portal.models import DataSetVersion
from portal.services.storage.data_set_sizes import record_measure_problem, record_size, version_to_measure
from portal.services.storage.volumes import usable_volumes
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_queue import KeyedPool
from scheduler.nodes.node_requests import UnknownOutcome, ask
from scheduler.nodes.task_spec import build_volume_mount

PAUSE_S = 0.5
"""Between two requests, also to a node that does not wait for its count."""


def submit_measurement(connection: NodeConnection, pool: KeyedPool) -> None:
    """Start the next measurement, or continue to wait for it; its end causes the next call."""
    read_s = time.monotonic()
    row = version_to_measure(connection.node)
    if row is not None:
        pool.submit("measure", partial(measure_version, connection, row), read_s)


def measure_version(connection: NodeConnection, row: DataSetVersion) -> None:
    """Ask the node once. Without an answer the request stays, and the next pass asks again."""
    size = ask(
        connection,
        FOLDER_SIZE,
        lambda: _measure(connection, row),
        lambda problem: record_measure_problem(row, problem.message),
        too_old=stored_text("The agent on the node is too old to measure data sets. Upgrade it."),
        recorded=UnknownOutcome.NONE,
        raised=UnknownOutcome.NONE,
    )
    if size is None:
        return
    if size.size_bytes is not None and size.files is not None:
        record_size(row, size.size_bytes, size.files)
    elif size.done:
        record_measure_problem(row, size.problem or stored_text("The node did not say why."))
    else:
        time.sleep(PAUSE_S)


def _measure(connection: NodeConnection, row: DataSetVersion) -> FolderSize:
    project, user = row.data_set.project, row.created_by
    if not usable_volumes(project).filter(pk=row.volume_id).exists():
        message = stored_text("The project of the data set may no longer use the volume.")
        raise AgentError("volume_not_allowed", message)
    mount = build_volume_mount(project, row.volume, target="/data", read_only=True)
    mount.pop("quota_mib", None)
    release_connection()
    place = {"mount": mount, "path": encode_path(row.path.encode()), "uid": user.uid, "gid": user.gid}
    return connection.engine.request(FOLDER_SIZE, FolderSize.from_wire, **place)
