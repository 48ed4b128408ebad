"""The agent program that rig nodes are enrolled with."""

from __future__ import annotations

import functools

from tests.rig.echo_agent import echo_agent


@functools.cache
def rig_agent() -> bytes:
    """Gives the agent as a .pyz."""
    return echo_agent()
