"""Requests that carry a file of a user, which have limits of their own. Pure."""

from __future__ import annotations

import re

UPLOAD_TIMEOUT_S = 60.0
"""Longest time from the end of an upload to the answer; the file is checked, or sent to a node, meanwhile."""
_PATHS = re.compile(
    r"/launch/|/jobs/[^/]+/files/upload/|/api/v1/jobs/[^/]+/files/content/|/api/v1/projects/[^/]+/code/"
)


def is_upload_path(path: str) -> bool:
    return _PATHS.fullmatch(path) is not None
