"""Settings of the cluster, a pool or a project as a form, and the policy page, which shows the first two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext

from portal.access import AccessPolicy
from portal.domain.scheduling.policy_settings import (
    SettingValue,
    affects_decisions,
    default_value,
    format_number,
)
from portal.errors import InvalidRequest, PreconditionFailed
from portal.models import AuditEntry, Node, NodePool, Project, User
from portal.selectors.scheduling.project_settings import ProjectSetting, project_settings_sheet
from portal.selectors.scheduling.settings import SettingView, settings_sheet
from portal.services.scheduling.policy_settings import do_change_policy
from portal.web.display.formatting import parse_whole_number
from portal.web.parsing import format_duration_input, parse_duration_s, parse_number
from portal.web.views import action, find_row, page

HISTORY_LIMIT = 10
INELIGIBLE_NODES_SHOWN = 30
"""Maximum number of listed nodes that lack what their pool requires."""


@dataclass
class SettingRow:
    """One setting with its posted value and error."""

    setting: SettingView
    entered: str
    loaded: str
    problem: str = ""
    concurrent_value: str = ""

    @property
    def dirty(self) -> bool:
        return self.entered != self.loaded

    @property
    def inherited_text(self) -> str:
        """The value that applies while the field is blank, as text."""
        source = _("the cluster's") if self.setting.from_cluster else _("the default")
        return f"{display_value(self.setting, self.setting.inherited_value)}, {source}"

    @property
    def range_text(self) -> str:
        if self.setting.bounds is None:
            return _(" or ").join(pgettext("option", option) for option in self.setting.options)
        low, high = self.setting.bounds
        unit = "" if self.setting.unit == "s" else f" {self.setting.unit}"
        low_text, high_text = format_value(self.setting, low), format_value(self.setting, high)
        return _("{low} to {high}").format(low=low_text, high=high_text) + unit

    @property
    def default_text(self) -> str:
        return display_value(self.setting, self.setting.default)

    @property
    def current_text(self) -> str:
        return display_value(self.setting, self.setting.value)

    def apply_posted(self, posted: Mapping[str, str]) -> None:
        """Set the posted value, and note the value of a concurrent edit."""
        name = self.setting.name
        seen = posted.get(f"seen-{name}", self.loaded)
        self.entered = "" if posted.get("blank") == name else posted.get(f"setting-{name}", seen).strip()
        if seen != self.loaded:
            self.concurrent_value = self.loaded or _("blank")
            self.loaded = seen

    def parse(self) -> SettingValue | None:
        """Return the entered value; None for blank. Raise InvalidRequest."""
        if not self.entered:
            return None
        if self.setting.options:
            return self.entered
        read = parse_duration_s if self.setting.unit == "s" else parse_number
        return read(_without_thousands(self.entered), self.setting.name)


class SettingsForm:
    """The settings of the cluster (``owner`` None), a pool or a project, with posted values and errors."""

    def __init__(self, owner: NodePool | Project | None, version: int, rows: Sequence[SettingRow]) -> None:
        self.owner = owner
        self.version = version
        self.rows = rows

    @property
    def dirty_count(self) -> int:
        return sum(line.dirty for line in self.rows)

    @property
    def overridden_count(self) -> int:
        return sum(line.setting.own_value is not None for line in self.rows)

    def save(self, user: User, posted: Mapping[str, str]) -> int:
        """Save the posted changes, all or none, and return how many there were.

        Raise InvalidRequest or PreconditionFailed, with the error noted at each setting.
        """
        version, reason = parse_version(posted), posted.get("reason", "").strip()
        for line in self.rows:
            line.apply_posted(posted)
        try:
            changes = self._changes()
            do_change_policy(user, self.owner, changes, version=version, reason=reason)
        except InvalidRequest as error:
            for line in self.rows:
                line.problem = error.fields.get(line.setting.name, "")
            raise
        return len(changes)

    def _changes(self) -> dict[str, SettingValue | None]:
        """Return the changed settings. Raise InvalidRequest with each setting whose text is not a value."""
        values: dict[str, SettingValue | None] = {}
        wrong: dict[str, str] = {}
        for line in self.rows:
            if line.dirty:
                try:
                    values[line.setting.name] = line.parse()
                except InvalidRequest as error:
                    wrong |= error.fields
        if wrong:
            raise InvalidRequest(fields=wrong)
        return values


class PoolSettingsForm(SettingsForm):
    """The settings of the cluster or of one pool."""

    def __init__(self, pool: NodePool | None) -> None:
        sheet = settings_sheet(pool)
        texts = [(setting, format_value(setting, setting.own_value)) for setting in sheet.settings]
        super().__init__(pool, sheet.version, [SettingRow(setting, text, text) for setting, text in texts])
        self.pool = pool

    @property
    def name(self) -> str:
        return _("pool {name}").format(name=self.pool.name) if self.pool else _("the cluster")

    @property
    def url(self) -> str:
        return reverse("policy") + (f"?pool={self.pool.name}" if self.pool else "")

    @property
    def groups(self) -> list[tuple[str, list[SettingRow]]]:
        """The settings by topic, with a heading each."""
        deciding = [line for line in self.rows if affects_decisions(line.setting.name)]
        rest = [line for line in self.rows if not affects_decisions(line.setting.name)]
        return [(_("Placement and start"), deciding), (_("Time limits and idle workspaces"), rest)]


@dataclass
class ProjectSettingRow(SettingRow):
    project_setting: ProjectSetting | None = None

    @property
    def effective(self) -> list[tuple[str, str, str]]:
        """Return effective value, its source and its pools; pools with the same value are grouped."""
        found: dict[tuple[str, str], list[str]] = {}
        for rule in self.project_setting.rules if self.project_setting else ():
            set_by = (
                _("{source}, which allows nothing less strict").format(source=rule.source_text)
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
        value = display_value(self.setting, self.project_setting.loosest_effective)
        text = _("{value} or stricter") if self.setting.options else _("at most {value}")
        return text.format(value=value)


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


def parse_version(posted: Mapping[str, str]) -> int:
    """Return the version that the editor saw. Raise InvalidRequest."""
    version = parse_whole_number(posted.get("version", ""))
    if version is None:
        raise InvalidRequest(_("The form is not valid; reload the page."))
    return version


def format_value(setting: SettingView, value: SettingValue | None) -> str:
    """Format a value as people read and type it: "7 d", "200,000", "pack"; empty for None."""
    if value is None or isinstance(value, str):
        return value or ""
    if setting.unit == "s":
        return format_duration_input(value)
    return format_number(value)


def display_value(setting: SettingView, value: SettingValue | None) -> str:
    """Format a value for reading only: options are labels in the language of the page."""
    return pgettext("option", value) if isinstance(value, str) and value else format_value(setting, value)


@page(AccessPolicy.SIGNED_IN)
def policy_page(request: HttpRequest, user: User) -> HttpResponse:
    """Show the settings to every user; administrators can change them."""
    return _render(request, user, _settings(request.GET))


@action(AccessPolicy.ADMIN)
def save_policy(request: HttpRequest, user: User) -> HttpResponse:
    """Save changed settings, all or none. The button beside a setting also resets that setting."""
    settings = _settings(request.POST)
    parse_version(request.POST)
    try:
        changed = settings.save(user, request.POST)
    except InvalidRequest:
        return _render(request, user, settings, status=400)
    except PreconditionFailed:
        return _render(request, user, settings, status=409)
    if changed:
        text = ngettext(
            "Saved {count} setting of {name}. The next cycle uses them.",
            "Saved {count} settings of {name}. The next cycle uses them.",
            changed,
        )
        messages.success(request, text.format(count=changed, name=settings.name))
    return redirect(settings.url)


# -- internal --------------------------------------------------------------------------------------


def _settings(parameters: Mapping[str, str]) -> PoolSettingsForm:
    """Return the settings of the pool that ``pool`` names; those of the cluster without it."""
    name = parameters.get("pool", "")
    return PoolSettingsForm(
        find_row(NodePool.objects, _("There is no such pool."), name=name) if name else None
    )


def _without_thousands(text: str) -> str:
    """Remove thousands separators as in 200,000, which the page shows; parsing refuses any other comma."""
    digits = text.replace(",", "")
    number = parse_whole_number(digits)
    return digits if number is not None and text == f"{number:,}" else text


def _render(
    request: HttpRequest, user: User, settings: PoolSettingsForm, *, status: int = 200
) -> HttpResponse:
    pool = settings.pool
    changes = AuditEntry.objects.filter(
        action="policy.change", object_kind="nodepool" if pool else "clustersettings"
    )
    if pool:
        changes = changes.filter(object_id=pool.public_id)
    newest = changes.order_by("-id")[:HISTORY_LIMIT] if user.is_admin else ()
    named = {line.setting.name: line.setting for line in settings.rows}
    lacking = pool.nodes.exclude(missing_requirements="").order_by("name") if pool else Node.objects.none()
    context = {
        "page": settings,
        "lacking": lacking[:INELIGIBLE_NODES_SHOWN],
        "pools": NodePool.objects.order_by("name"),
        "may_edit": user.is_admin,
        "refused": status == 400,
        "precondition_failed": status == 409,
        "reason": request.POST.get("reason", "").strip(),
        "to": settings.url,
        "history": [(row, _change_texts(row, named)) for row in newest],
        "blank": _("inherits the cluster's value") if pool else _("holds the default"),
    }
    return render(request, "scheduling/policy.html", context, status=status)


def _change_texts(row: AuditEntry, named: Mapping[str, SettingView]) -> list[tuple[str, str, str]]:
    """Return setting, old and new value of each change, as text."""
    before, after = row.before or {}, row.after or {}

    def word(name: str, value: SettingValue | None) -> str:
        setting = named.get(name)
        return (display_value(setting, value) if setting else str(value or "")) or _("blank")

    return [(name, word(name, before.get(name)), word(name, after.get(name))) for name in after]
