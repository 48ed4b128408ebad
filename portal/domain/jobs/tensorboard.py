"""Names that TensorBoard's workspace, its program and the folder of event files share."""

from __future__ import annotations

import re

TENSORBOARD_TOOL = "tensorboard"
TENSORBOARD_PROGRAM = "tensorboard_server.py"
RUNS_VARIABLE = "TENSORBOARD_RUNS"
EVENTS_FOLDER = "tensorboard"
"""In the checkpoint directory of a job; ``agents/node/storage/checkpoints.py`` looks for event files there."""
MAX_JOBS = 10
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def run_name(name: str, public_id: str) -> str:
    """Return the name of a job as a run of TensorBoard, without the separators of its option."""
    return f"{_UNSAFE.sub('-', name)[:60]}-{public_id}"
