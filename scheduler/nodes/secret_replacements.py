"""Sends a running tool the secret that replaces the one that a former visitor may know."""

from __future__ import annotations

import logging

from agents import verbs
from agents.engines.replies import AgentError, TaskKey
from portal.services.workspaces.secret_replacement import Replacement, do_record_replacement, new_secret
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.task_spec import SECRET_NAME

log = logging.getLogger(__name__)


def replace_secret(connection: NodeConnection, replacement: Replacement) -> None:
    """Replace the secret on the node, then in the database.

    The tool accepts the old one for some seconds, in which the gateway learns of the new one. If this process ends
    in between, the next call replaces it again.
    """
    attempt = replacement.task.attempt
    key = TaskKey(attempt.job.public_id, attempt.number, replacement.task.rank)
    secret = new_secret()
    try:
        connection.engine.command(verbs.UPDATE_FILES, **vars(key), files={SECRET_NAME: secret})
    except AgentError as error:
        log.warning("the secret of %s was not replaced: %s", key, error.message)
        return
    do_record_replacement(replacement, secret)
