"""Saves running tasks as images for users: asks the node once and records the answer."""

from __future__ import annotations

from agents.engines.replies import AgentError, SavedTaskImage, TaskKey
from agents.verbs import SAVE_IMAGE
from portal.models import SavedImage
from portal.services.environments.pins import DIGEST
from portal.services.workspaces.saved_images import record_not_saved, record_saved, save_limit_mib
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_requests import UnknownOutcome, ask

_TOO_OLD = "The agent on this node is too old to save images; an administrator can upgrade it."


def save_image(connection: NodeConnection, row: SavedImage) -> None:
    """Ask the node. Raise OutcomeUnknownError without an answer; if the connection broke, the next one asks again."""
    attempt = row.task.attempt
    key = TaskKey(attempt.job.public_id, attempt.number, row.task.rank)

    def request() -> SavedTaskImage:
        image, max_mib = row.environment.image, save_limit_mib(attempt.job)
        saved = connection.engine.request(
            SAVE_IMAGE, SavedTaskImage.from_wire, **vars(key), image=image, max_mib=max_mib
        )
        if not DIGEST.fullmatch(saved.image.image_id):
            raise AgentError("invalid_image", "The node reported no digest of the image.")
        return saved

    saved = ask(
        connection,
        SAVE_IMAGE,
        request,
        lambda problem: record_not_saved(row, problem.message),
        too_old=_TOO_OLD,
        no_answer="The node did not finish in time.",
        recorded=UnknownOutcome.INVALID | UnknownOutcome.LATE,
    )
    if saved is not None:
        record_saved(row, saved.image.image_id, saved.changed_mib)
