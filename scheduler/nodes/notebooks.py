"""Lists the notebooks of homes that users requested: asks the node once and records the answer."""

from __future__ import annotations

from agents.engines.replies import NotebookList
from agents.verbs import NOTEBOOKS
from portal.models import NotebookListing
from portal.services.jobs.notebooks import record_notebooks
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_requests import ask
from scheduler.nodes.task_spec import build_home_mount, read_home_volumes

_TOO_OLD = "The agent on this node is too old to list notebooks; an administrator can upgrade it."


def list_notebooks(connection: NodeConnection, listing: NotebookListing) -> None:
    """Ask the node. Raise OutcomeUnknownError when no answer came; the next request asks again."""
    job = listing.job
    mount, _ = build_home_mount(job, read_home_volumes(job), connection.node)
    home = {"mount": mount, "uid": job.owner.uid, "gid": job.owner.gid}
    listed = ask(
        connection,
        NOTEBOOKS,
        lambda: connection.engine.request(NOTEBOOKS, NotebookList.from_wire, **home),
        lambda problem: record_notebooks(listing, (), problem.message),
        too_old=_TOO_OLD,
        no_answer="The node did not answer. Try again in a moment.",
    )
    if listed is not None:
        record_notebooks(listing, listed.notebooks, listed.problem)
