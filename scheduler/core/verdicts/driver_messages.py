"""Messages about nodes whose drivers are too old for the CUDA of a job's image."""

from __future__ import annotations

from collections.abc import Iterable

from portal.domain.driver_versions import is_cuda_sufficient, newest_cuda
from scheduler.core.model.snapshot import NodeRow


def format_drivers_too_old(needed: str, nodes: Iterable[NodeRow]) -> str:
    """Return why no node can run an image that needs this CUDA; blank if drivers are not the reason."""
    nodes = [node for node in nodes if node.gpus]
    if not nodes or any(is_cuda_sufficient(node.driver_cuda, needed) for node in nodes):
        return ""
    newest = newest_cuda(node.driver_cuda for node in nodes if node.driver_cuda)
    return f"its image needs CUDA {needed}, but the newest driver supports CUDA {newest}"


def format_skipped_drivers(needed: str, nodes: Iterable[NodeRow]) -> str:
    """Return a message about nodes skipped because of their drivers; blank for none."""
    old = [
        node.driver_cuda
        for node in nodes
        if node.driver_cuda and not is_cuda_sufficient(node.driver_cuda, needed)
    ]
    if not old:
        return ""
    owner = (
        "1 node is skipped because its driver supports only"
        if len(old) == 1
        else (f"{len(old)} nodes are skipped because their drivers support at most")
    )
    return f" Its image needs CUDA {needed}: {owner} CUDA {newest_cuda(old)}."
