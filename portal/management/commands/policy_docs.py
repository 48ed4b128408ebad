"""``manage.py policy-docs``: writes docs/policy.md from the knobs' own table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from portal.domain.policy_settings import (
    CHOICE_SETTINGS,
    NUMBER_SETTINGS,
    ChoiceSetting,
    NumberSetting,
    format_number,
)

HEADER = """# Policy: the knobs of the scheduler

Written by `manage.py policy-docs` from `portal/domain/policy_settings.py`; a test fails when the two differ.

Administrators turn them on the page *Policy* (`g k`) or by REST (`policy/`, `pools/{pool}/policy/`), for the
cluster and for each pool. A pool's value stands above the cluster's; a knob that a pool leaves blank inherits the
cluster's value, and one that the cluster leaves blank holds the default. A change is audited with old and new
values, wakes the scheduler, and counts from that cycle on. A value outside its range is refused with the knob
named; two administrators cannot overwrite each other, since each change names the version it is based on.
What time limits and idleness do is in docs/time.md.

*Projects stricter* marks the knobs that a project may hold, too: its managers and administrators turn them on the
project's page or by REST (`projects/{project}/policy/`), for the project and those below it, in all pools. It may
be stricter than the pool (a lower number, a later word), or less strict in numbers up to `idle_project_max_factor` the
pool's; what a project holds binds those below it. A pool's new value bounds all projects from the next look on.

| knob | from, to | default | own values of | what it does |
|---|---|---|---|---|
"""


def policy_text() -> str:
    """docs/policy.md as it should be."""
    rows = [
        (
            knob.name,
            f"{format_number(knob.minimum)} to {format_number(knob.maximum)} {knob.unit}".strip(),
            f"{format_number(knob.default)} {knob.unit}".strip(),
            knob,
            knob.description,
        )
        for knob in NUMBER_SETTINGS.values()
    ] + [
        (
            choice.name,
            " or ".join(f"`{word}`" for word in choice.options),
            f"`{choice.default}`",
            choice,
            choice.description,
        )
        for choice in CHOICE_SETTINGS.values()
    ]
    lines = [
        f"| `{name}` | {span} | {default} | {_overridable_by(knob)} | {message} |"
        for name, span, default, knob, message in rows
    ]
    return HEADER + "\n".join(lines) + "\n"


def _overridable_by(knob: NumberSetting | ChoiceSetting) -> str:
    """Who beside the cluster may have a value of its own."""
    if knob.per_project:
        return "pools, projects stricter"
    return "pools" if knob.per_pool else "the cluster alone"


class Command(BaseCommand):
    """Writes the page."""

    help = "Write docs/policy.md from the table of knobs."

    def handle(self, *args: Any, **options: Any) -> None:
        """Overwrites the file."""
        Path(settings.BASE_DIR, "docs", "policy.md").write_text(policy_text())
