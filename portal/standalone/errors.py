"""The error that prevents a start."""

from __future__ import annotations


class StartError(Exception):
    """A requirement cannot be started; the message states the cause and the remedy."""
