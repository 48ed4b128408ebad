"""What a project holds of idle workspaces otherwise than its pools: a panel of its page, and its edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from portal.domain.policy_settings import default_value
from portal.errors import InvalidRequest
from portal.models import Project, User
from portal.selectors.scheduling.project_settings import ProjectSetting, project_settings_sheet
from portal.selectors.scheduling.settings import SettingView
from portal.services.cluster.policy_settings import do_change_policy
from portal.web.admin.scheduling.policy import SettingRow, apply_posted, format_value, posted_changes
from portal.web.display.formatting import parse_whole_number


@dataclass
class ProjectSettingRow(SettingRow):
    """One knob of the project as the page shows it."""

    project_setting: ProjectSetting | None = None

    @property
    def effective(self) -> list[tuple[str, str, str]]:
        """What holds, whose word that is, and in which pools; pools where all is the same together."""
        found: dict[tuple[str, str], list[str]] = {}
        for rule in self.project_setting.rules if self.project_setting else ():
            said_by = f"{rule.source_text}, which allows no more" if rule.is_clamped else rule.source_text
            found.setdefault((format_value(self.setting, rule.value), said_by), []).append(rule.pool.name)
        return [(value, said_by, ", ".join(pools)) for (value, said_by), pools in found.items()]

    @property
    def bound_text(self) -> str:
        """The least strict value that would count, in words."""
        if self.project_setting is None or self.project_setting.loosest_effective is None:
            return ""
        value = format_value(self.setting, self.project_setting.loosest_effective)
        return f"{value} or stricter" if self.setting.options else f"at most {value}"


class ProjectPolicyPanel:
    """The knobs of a project, with what its editor typed and what is wrong with that."""

    def __init__(self, project: Project) -> None:
        sheet = project_settings_sheet(project)
        self.project = project
        self.version = sheet.version
        self.error = ""
        self.rows = [_setting_row(knob) for knob in sheet.settings]

    @property
    def overridden_count(self) -> int:
        """How many knobs have a value of their own."""
        return sum(line.setting.own_value is not None for line in self.rows)

    def save(self, user: User, posted: Mapping[str, str]) -> bool:
        """Turns what was typed; False when nothing was. Raises Invalid and Stale, and notes why at each knob."""
        version = parse_whole_number(posted.get("version", ""))
        if version is None:
            raise InvalidRequest("This form is not one of ours; load the page again.")
        apply_posted(self.rows, posted)
        try:
            changes = posted_changes(self.rows)
            do_change_policy(
                user, self.project, changes, version=version, reason=posted.get("reason", "").strip()
            )
        except InvalidRequest as refusal:
            for line in self.rows:
                line.problem = refusal.fields.get(line.setting.name, "")
            raise
        return bool(changes)


def _setting_row(knob: ProjectSetting) -> ProjectSettingRow:
    own = SettingView(knob.name, knob.own_value, default_value(knob.name), False)
    text = format_value(own, knob.own_value)
    return ProjectSettingRow(own, text, text, project_setting=knob)
