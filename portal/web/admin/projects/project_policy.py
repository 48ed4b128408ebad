"""Idle settings that a project overrides: a panel of its page, and their edit."""

from __future__ import annotations

from dataclasses import dataclass

from portal.domain.policy_settings import default_value
from portal.models import Project
from portal.selectors.scheduling.project_settings import ProjectSetting, project_settings_sheet
from portal.selectors.scheduling.settings import SettingView
from portal.web.admin.scheduling.policy import SettingRow, SettingsForm, format_value


@dataclass
class ProjectSettingRow(SettingRow):
    """One setting of the project."""

    project_setting: ProjectSetting | None = None

    @property
    def effective(self) -> list[tuple[str, str, str]]:
        """Return effective value, its source and its pools; pools with the same value are grouped."""
        found: dict[tuple[str, str], list[str]] = {}
        for rule in self.project_setting.rules if self.project_setting else ():
            set_by = (
                f"{rule.source_text}, which allows nothing less strict"
                if rule.is_clamped
                else rule.source_text
            )
            found.setdefault((format_value(self.setting, rule.value), set_by), []).append(rule.pool.name)
        return [(value, set_by, ", ".join(pools)) for (value, set_by), pools in found.items()]

    @property
    def bound_text(self) -> str:
        """The least strict value that would have an effect, as text."""
        if self.project_setting is None or self.project_setting.loosest_effective is None:
            return ""
        value = format_value(self.setting, self.project_setting.loosest_effective)
        return f"{value} or stricter" if self.setting.options else f"at most {value}"


class ProjectPolicyPanel(SettingsForm):
    """The settings of a project, with posted values and errors."""

    def __init__(self, project: Project) -> None:
        sheet = project_settings_sheet(project)
        super().__init__(project, sheet.version, [_setting_row(setting) for setting in sheet.settings])
        self.error = ""


def _setting_row(setting: ProjectSetting) -> ProjectSettingRow:
    own = SettingView(setting.name, setting.own_value, default_value(setting.name), False)
    text = format_value(own, setting.own_value)
    return ProjectSettingRow(own, text, text, project_setting=setting)
