"""The policy page: settings of the cluster and of each pool, their inheritance, and their edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import AccessPolicy, access_policy, require_user
from portal.domain.policy_settings import SettingValue, affects_decisions, format_number
from portal.errors import InvalidRequest, NotFound, PreconditionFailed
from portal.models import AuditEntry, NodePool
from portal.selectors.scheduling.settings import SettingView, settings_sheet
from portal.services.cluster.policy_settings import do_change_policy
from portal.web.display.formatting import parse_whole_number
from portal.web.parsing import format_duration_input, parse_duration_s, parse_number

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
        """True when the editor changed the value."""
        return self.entered != self.loaded

    @property
    def inherited_text(self) -> str:
        """The value that applies while the field is blank, as text."""
        source = "the cluster's" if self.setting.from_cluster else "the default"
        return f"{format_value(self.setting, self.setting.inherited_value)}, {source}"

    @property
    def range_text(self) -> str:
        if self.setting.bounds is None:
            return " or ".join(self.setting.options)
        low, high = self.setting.bounds
        unit = "" if self.setting.unit == "s" else f" {self.setting.unit}"
        return f"{format_value(self.setting, low)} to {format_value(self.setting, high)}{unit}"

    @property
    def default_text(self) -> str:
        return format_value(self.setting, self.setting.default)

    @property
    def current_text(self) -> str:
        return format_value(self.setting, self.setting.value)


@dataclass
class SettingsPage:
    """The settings of the cluster or of one pool, and the version that the editor saw."""

    pool: NodePool | None
    version: int
    rows: list[SettingRow] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"pool {self.pool.name}" if self.pool else "the cluster"

    @property
    def groups(self) -> list[tuple[str, list[SettingRow]]]:
        """The settings by topic, with a heading each."""
        deciding = [line for line in self.rows if affects_decisions(line.setting.name)]
        rest = [line for line in self.rows if not affects_decisions(line.setting.name)]
        return [("Placement and start", deciding), ("Time limits and idle workspaces", rest)]

    @property
    def dirty_count(self) -> int:
        return sum(line.dirty for line in self.rows)

    @property
    def overridden_count(self) -> int:
        return sum(line.setting.own_value is not None for line in self.rows)


def format_value(setting: SettingView, value: SettingValue | None) -> str:
    """Format a value as people read and type it: "7 d", "200,000", "pack"; empty for None."""
    if value is None or isinstance(value, str):
        return value or ""
    if setting.unit == "s":
        return format_duration_input(value)
    return format_number(value)


@access_policy(AccessPolicy.SIGNED_IN)
@require_safe
def policy_page(request: HttpRequest) -> HttpResponse:
    """Show the settings to every user; administrators can change them."""
    return _render(request, _page(_pool(request.GET.get("pool", ""))))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def save_policy(request: HttpRequest) -> HttpResponse:
    """Save changed settings, all or none. The button beside a setting also resets that setting."""
    pool = _pool(request.POST.get("pool", ""))
    page = _page(pool)
    version = parse_whole_number(request.POST.get("version", ""))
    if version is None:
        raise InvalidRequest("The form is not valid; reload the page.")
    apply_posted(page.rows, request.POST)
    reason = request.POST.get("reason", "").strip()
    try:
        changes = posted_changes(page.rows)
        do_change_policy(require_user(request.user), pool, changes, version=version, reason=reason)
    except InvalidRequest as refusal:
        for line in page.rows:
            line.problem = refusal.fields.get(line.setting.name, "")
        return _render(request, page, status=400, reason=reason)
    except PreconditionFailed:
        return _render(request, page, status=409, reason=reason)
    if changes:
        messages.success(
            request,
            f"Saved {len(changes)} {'setting' if len(changes) == 1 else 'settings'} of {page.name}. "
            "The next cycle uses them.",
        )
    return HttpResponseRedirect(_address(pool))


# -- internal --------------------------------------------------------------------------------------


def _pool(name: str) -> NodePool | None:
    """Return the pool of that name; None for the cluster."""
    if not name:
        return None
    pool = NodePool.objects.filter(name=name).first()
    if pool is None:
        raise NotFound("There is no such pool.")
    return pool


def _address(pool: NodePool | None) -> str:
    return reverse("policy") + (f"?pool={pool.name}" if pool else "")


def _page(pool: NodePool | None) -> SettingsPage:
    sheet = settings_sheet(pool)
    lines = [
        SettingRow(
            setting, format_value(setting, setting.own_value), format_value(setting, setting.own_value)
        )
        for setting in sheet.settings
    ]
    return SettingsPage(pool, sheet.version, lines)


def apply_posted(lines: Iterable[SettingRow], posted: Mapping[str, str]) -> None:
    """Set the posted values of the lines, and note values of concurrent edits."""
    for line in lines:
        seen = posted.get(f"seen-{line.setting.name}", line.loaded)
        line.entered = posted.get(f"setting-{line.setting.name}", seen).strip()
        if posted.get("blank") == line.setting.name:
            line.entered = ""
        if seen != line.loaded:
            line.concurrent_value = line.loaded or "blank"
            line.loaded = seen


def posted_changes(lines: Iterable[SettingRow]) -> dict[str, SettingValue | None]:
    """Return the changed settings. Raise InvalidRequest with each setting whose text is not a value."""
    values: dict[str, SettingValue | None] = {}
    wrong: dict[str, str] = {}
    for line in lines:
        if not line.dirty:
            continue
        try:
            values[line.setting.name] = _value(line)
        except InvalidRequest as refusal:
            wrong |= refusal.fields
    if wrong:
        raise InvalidRequest(fields=wrong)
    return values


def _value(line: SettingRow) -> SettingValue | None:
    if not line.entered:
        return None
    if line.setting.options:
        return line.entered
    read = parse_duration_s if line.setting.unit == "s" else parse_number
    return read(_without_thousands(line.entered), line.setting.name)


def _without_thousands(text: str) -> str:
    """Remove thousands separators as in 200,000, which the page shows; parsing refuses any other comma."""
    digits = text.replace(",", "")
    number = parse_whole_number(digits)
    return digits if number is not None and text == f"{number:,}" else text


def _render(request: HttpRequest, page: SettingsPage, *, status: int = 200, reason: str = "") -> HttpResponse:
    kind = "nodepool" if page.pool else "clustersettings"
    may_edit = require_user(request.user).is_admin
    changes = AuditEntry.objects.filter(action="policy.change", object_kind=kind)
    if page.pool:
        changes = changes.filter(object_id=page.pool.public_id)
    newest = changes.order_by("-id")[:HISTORY_LIMIT] if may_edit else ()
    named = {line.setting.name: line.setting for line in page.rows}
    context = {
        "page": page,
        "lacking": page.pool.nodes.exclude(missing_requirements="").order_by("name")[:INELIGIBLE_NODES_SHOWN]
        if page.pool
        else (),
        "pools": NodePool.objects.order_by("name"),
        "may_edit": may_edit,
        "refused": status == 400,
        "precondition_failed": status == 409,
        "reason": reason,
        "to": _address(page.pool),
        "history": [(row, _change_texts(row, named)) for row in newest],
        "blank": "inherits the cluster's value" if page.pool else "holds the default",
    }
    return render(request, "admin/policy.html", context, status=status)


def _change_texts(row: AuditEntry, named: Mapping[str, SettingView]) -> list[tuple[str, str, str]]:
    """Return setting, old and new value of each change, as text."""
    before, after = row.before or {}, row.after or {}

    def word(name: str, value: SettingValue | None) -> str:
        setting = named.get(name)
        return (format_value(setting, value) if setting else str(value or "")) or "blank"

    return [(name, word(name, before.get(name)), word(name, after.get(name))) for name in after]
