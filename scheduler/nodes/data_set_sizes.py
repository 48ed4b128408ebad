"""Measures versions of data sets on a node, one at a time, beside the node's other work."""

from __future__ import annotations

import logging
import time
from functools import partial

from agents import verbs
from agents.engines.replies import AgentError, FolderSize, OutcomeUnknownError
from agents.node.storage.files import encode_path
from portal.database.pool_middleware import release_connection
from portal.domain.stored_texts import stored_text
from portal.models import DataSetVersion
from portal.services.projects.data_set_sizes import record_measure_problem, record_size, version_to_measure
from portal.services.projects.volumes import usable_volumes
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_queue import KeyedPool
from scheduler.nodes.task_spec import build_volume_mount

log = logging.getLogger(__name__)

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
    try:
        size = _measure(connection, row)
    except AgentError as refusal:
        record_measure_problem(row, refusal.message)
        return
    except OutcomeUnknownError as error:
        log.info("%s did not answer a request to measure a data set: %s", connection.node.name, error)
        return
    if size.size_bytes is not None and size.files is not None:
        record_size(row, size.size_bytes, size.files)
    elif size.done:
        record_measure_problem(row, size.problem or stored_text("The node did not say why."))
    else:
        time.sleep(PAUSE_S)


def _measure(connection: NodeConnection, row: DataSetVersion) -> FolderSize:
    engine = connection.engine
    if not engine.supports(verbs.FOLDER_SIZE):
        message = stored_text("The agent on the node is too old to measure data sets. Upgrade it.")
        raise AgentError("agent_too_old", message)
    project, user = row.data_set.project, row.created_by
    if not usable_volumes(project).filter(pk=row.volume_id).exists():
        message = stored_text("The project of the data set may no longer use the volume.")
        raise AgentError("volume_not_allowed", message)
    mount = build_volume_mount(project, row.volume, target="/data", read_only=True)
    mount.pop("quota_mib", None)
    release_connection()
    place = {"mount": mount, "path": encode_path(row.path.encode()), "uid": user.uid, "gid": user.gid}
    return engine.request(verbs.FOLDER_SIZE, FolderSize.from_wire, **place)
