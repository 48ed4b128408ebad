"""What can keep a machine from starting, as sentences."""

from __future__ import annotations


class StartError(Exception):
    """Something needed cannot be started; the message says what and how to help."""
