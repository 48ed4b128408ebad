"""What secrets may hold and how jobs name them."""

from __future__ import annotations

import re

USER_SCOPE, PROJECT_SCOPE = "me", "project"
"""Whose secret a job names: that of the person who submits it, or of its project."""
MAX_VALUE_BYTES = 16 * 1024
MAX_SECRETS_PER_JOB = 15
"""A job names at most so many: together they stay below what a node takes with a start."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
