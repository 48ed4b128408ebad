"""The two kinds of settings of scheduling policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberSetting:
    """A numeric setting. ``minimum`` and ``maximum`` are inclusive.

    - ``per_pool`` False: one value for the cluster, because one cycle covers all pools.
    - ``affects_decisions`` False: no scheduling decision reads it; it governs notices to running jobs and
      their end.
    - ``per_project``: a project may set a stricter (lower) value than its pools (``project_policy.py``).
    """

    name: str
    unit: str
    minimum: float
    maximum: float
    default: float
    description: str
    per_pool: bool = True
    affects_decisions: bool = True
    per_project: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceSetting:
    """A setting with fixed options. Flags are those of ``NumberSetting``; later options are stricter."""

    name: str
    options: tuple[str, ...]
    default: str
    description: str
    per_pool: bool = True
    affects_decisions: bool = True
    per_project: bool = False
