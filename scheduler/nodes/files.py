"""Reads and changes files of jobs on a node for the portal, each request in a thread beside the node's other work."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import time
from dataclasses import asdict
from functools import partial

from redis.exceptions import RedisError

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import AgentError, FileChunk, FileList, FileStream, OutcomeUnknownError
from agents.node.storage.files import ARCHIVE, CHANGES, LIST, READ, WRITE
from portal.database.pool_middleware import release_connection
from portal.models import FileRequest
from portal.services.jobs.files import content_key, file_requests, may_read_target, take_request
from portal.valkey.file_transfer import END, ERROR, RECEIVER_WAIT_S, FileReceiver, FileSender
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_queue import KeyedPool
from scheduler.nodes.node_requests import UnknownOutcome, ask
from scheduler.nodes.task_spec import VolumeNotAllowedError, build_mounts, read_job_volumes

log = logging.getLogger(__name__)

MAX_DOWNLOADS = 2
"""At the same time on one node, so that lists and previews need not wait for them."""
MAX_EMPTY_CHUNKS = 15
"""Of at most 2 s each, while the node waits for its disk."""


def submit_requests(connection: NodeConnection, pool: KeyedPool) -> None:
    """Start the requests to this node; those that find no free thread are read again when one ends."""
    read_s = time.monotonic()
    for request in file_requests(connection.node):
        transfers = request.action in (READ, ARCHIVE, WRITE)
        key = ("read", request.pk % MAX_DOWNLOADS) if transfers else ("list", request.pk)
        pool.submit(key, partial(serve_request, connection, request), read_s)


def serve_request(connection: NodeConnection, request: FileRequest) -> None:
    """Carry out one request and send its answer. A failure never affects the connection."""
    if not take_request(request):
        return
    sender = FileSender(request.public_id)
    try:
        ask(
            connection,
            verbs.FILES,
            lambda: _send(connection, request, sender),
            lambda problem: sender.send_error(problem.code or "node_unreachable", problem.message),
            too_old="The agent on this node is too old to read files. Upgrade it.",
            no_answer=f"{connection.node.name} did not answer. Try again.",
            raised=UnknownOutcome.NONE,
        )
    except RedisError as error:
        log.warning("the answer to a request for files was not sent: %s", error)


def _send(connection: NodeConnection, request: FileRequest, sender: FileSender) -> None:
    engine = connection.engine
    place = _place(connection, request)
    release_connection()
    if request.action in CHANGES:
        _change(engine, request, place, sender)
        return
    if request.action == LIST:
        listed = engine.request(verbs.FILES, FileList.from_wire, **place, action=LIST, offset=request.offset)
        sender.send_header(asdict(listed))
        return
    opened = engine.request(
        verbs.FILES, FileStream.from_wire, **place, action=request.action, offset=request.offset
    )
    sender.send_header({"size_bytes": opened.size_bytes, "saved_s": opened.saved_s, "offset": opened.offset})
    empty = 0
    while True:
        chunk = engine.request(verbs.FILES, FileChunk.from_wire, stream=opened.stream)
        empty = 0 if chunk.data else empty + 1
        if (chunk.data and not sender.send_data(chunk.data)) or empty > MAX_EMPTY_CHUNKS:
            engine.command(verbs.FILES, stream=opened.stream, close=True)
            raise AgentError("interrupted", "The download was interrupted. Begin again.")
        if chunk.eof:
            sender.send_end()
            return


def _change(engine: NodeEngine, request: FileRequest, place: dict[str, object], sender: FileSender) -> None:
    if not engine.supports(verbs.CAN_CHANGE_FILES):
        raise AgentError("agent_too_old", "The agent on this node is too old to change files. Upgrade it.")
    if request.action == WRITE:
        _write(engine, request, place | {"overwrite": request.overwrite})
    else:
        engine.command(verbs.FILES, **place, action=request.action)
    sender.send_header({})


def _write(engine: NodeEngine, request: FileRequest, place: dict[str, object]) -> None:
    """Pass the content from web to the node; what has not arrived to its end is not kept."""
    receiver = FileReceiver(content_key(request))
    try:
        opened = engine.request(verbs.FILES, FileStream.from_wire, **place, action=WRITE, offset=0)
        try:
            while True:
                kind, piece = receiver.receive(RECEIVER_WAIT_S) or (ERROR, b"")
                if kind == ERROR:
                    said = json.loads(piece) if piece else {}
                    message = said.get("message", "The upload was interrupted. Begin again.")
                    raise AgentError(said.get("code", "interrupted"), message)
                written = {"data_b64": base64.b64encode(piece).decode("ascii")} if piece else {"commit": True}
                engine.command(verbs.FILES, stream=opened.stream, **written)
                if kind == END:
                    return
                receiver.acknowledge()
        except BaseException:
            with contextlib.suppress(AgentError, OutcomeUnknownError):
                engine.command(verbs.FILES, stream=opened.stream, close=True)
            raise
    finally:
        receiver.stop()


def _place(connection: NodeConnection, request: FileRequest) -> dict[str, object]:
    """Return the mount and account for the node, if the request is still permitted. Raise AgentError."""
    job = request.task.attempt.job
    try:
        mounts, _ = build_mounts(job, read_job_volumes(job), connection.node)
    except VolumeNotAllowedError as error:
        raise AgentError("volume_not_allowed", f"{error}.") from error
    mount = next((each for each in mounts if each["target"] == request.target), None)
    if mount is None or not may_read_target(request):
        raise AgentError("forbidden", "You may no longer read or change these files.")
    return {"mount": mount, "path": request.path, "uid": job.owner.uid, "gid": job.owner.gid}
