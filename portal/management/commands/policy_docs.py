"""``manage.py policy-docs``: writes docs/policy.md from the definitions of the policy settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from portal.domain.scheduling.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS, format_number
from portal.domain.setting_types import ChoiceSetting, NumberSetting

HEADER = """# Scheduling policy: settings

Written by `manage.py policy-docs` from `portal/domain/scheduling/policy_settings.py`; a test fails when they differ.

Administrators change settings on the page *Scheduling policy* (`g k`) or by REST (`policy/`,
`pools/{pool}/policy/`), for the
cluster and for each pool. A pool's value takes precedence over the cluster's. A setting that a pool leaves blank
inherits the
cluster's value; one that the cluster leaves blank has its default. A change is audited with old and new values,
triggers a cycle
and takes effect with that cycle. A value outside its range is refused, and the response names the setting. Each
change names
the version it is based on, so administrators cannot overwrite each other's changes.
Time limits and idle workspaces are described in docs/time.md.

*Projects stricter* marks settings that a project may set, too: its managers and administrators change them on the
project's page
or by REST (`projects/{project}/policy/`), for the project and its descendants, in all pools. A project's value may
be stricter
than the pool's (a lower number, a later option); a number may be less strict up to the pool's value times
`idle_project_max_factor`. A project's value also bounds its descendants. A new value of a pool takes effect for all
projects at the next check.

| setting | range | default | overridable by | description |
|---|---|---|---|---|
"""


def policy_text() -> str:
    lines = [
        _line(
            setting,
            f"{format_number(setting.minimum)} to {format_number(setting.maximum)} {setting.unit}".strip(),
            f"{format_number(setting.default)} {setting.unit}".strip(),
        )
        for setting in NUMBER_SETTINGS.values()
    ]
    for choice in CHOICE_SETTINGS.values():
        span = " or ".join(f"`{word}`" for word in choice.options)
        lines.append(_line(choice, span, f"`{choice.default}`"))
    return HEADER + "\n".join(lines) + "\n"


def _line(setting: NumberSetting | ChoiceSetting, span: str, default: str) -> str:
    return f"| `{setting.name}` | {span} | {default} | {_overridable_by(setting)} | {setting.description} |"


def _overridable_by(setting: NumberSetting | ChoiceSetting) -> str:
    """Return which levels besides the cluster can override the setting."""
    if setting.per_project:
        return "pools, projects stricter"
    return "pools" if setting.per_pool else "the cluster alone"


class Command(BaseCommand):
    help = "Write docs/policy.md from the table of settings."

    def handle(self, *args: Any, **options: Any) -> None:
        Path(settings.BASE_DIR, "docs", "policy.md").write_text(policy_text())
