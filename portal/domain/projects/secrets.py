"""Limits of secrets and the syntax of references to them."""

from __future__ import annotations

import re

USER_SCOPE, PROJECT_SCOPE = "me", "project"
"""Scope of a secret reference: the submitting user's secrets, or the project's."""
MAX_VALUE_BYTES = 16 * 1024
MAX_SECRETS_PER_JOB = 15
"""Keeps the total size below the limit of a start command."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
