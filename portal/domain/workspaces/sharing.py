"""What a user can do in a workspace that another user shares with them, and for how long."""

from __future__ import annotations

from enum import StrEnum

MAX_SHARES = 20
"""Live shares of one workspace."""
DURATIONS_S = (3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
MIN_DURATION_S, MAX_DURATION_S = 60, DURATIONS_S[-1]
VIEWABLE_TOOLS = ("jupyterlab", "tensorboard")
"""Tools that are of use when nothing is sent but requests that read."""


REPLACEABLE_SECRET_TOOLS = ("jupyterlab", "tensorboard")
"""Tools that read their secret again when it changes; others read it when they start."""


class ShareAccess(StrEnum):
    VIEW = "view"  # GET and HEAD only, and no WebSockets: files and saved notebooks, no kernels or terminals
    EDIT = "edit"  # everything that the owner can do in the tool, as the owner
