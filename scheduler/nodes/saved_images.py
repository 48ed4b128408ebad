"""Saves running tasks as images for users: asks the node once and records the answer."""

from __future__ import annotations

from agents import verbs
from agents.engines.replies import AgentError, OutcomeUnknownError, SavedTaskImage, TaskKey
from portal.models import SavedImage
from portal.services.images.pins import DIGEST
from portal.services.saved_images import record_not_saved, record_saved, save_limit_mib
from scheduler.nodes.node_connection import NodeConnection

_TOO_OLD = "The agent on this node is too old to save images; an administrator can upgrade it."


def save_image(connection: NodeConnection, row: SavedImage) -> None:
    """Ask the node. Raise OutcomeUnknownError when the connection broke; the next one asks again."""
    attempt = row.task.attempt
    key = TaskKey(attempt.job.public_id, attempt.number, row.task.rank)
    try:
        if not connection.engine.supports(verbs.SAVE_IMAGE):
            raise AgentError("agent_too_old", _TOO_OLD)
        saved = connection.engine.request(
            verbs.SAVE_IMAGE,
            SavedTaskImage.from_wire,
            **vars(key),
            image=row.environment.image,
            max_mib=save_limit_mib(attempt.job),
        )
        if not DIGEST.fullmatch(saved.image.image_id):
            raise AgentError("invalid_image", "The node reported no digest of the image.")
    except AgentError as refusal:
        record_not_saved(row, refusal.message)
    except OutcomeUnknownError:
        if connection.engine.is_open:
            record_not_saved(row, "The node did not finish in time.")
        raise
    else:
        record_saved(row, saved.image.image_id, saved.changed_mib)
