"""The quotas page: a tree per pool, edited in place and saved together, with history and undo.

Every line carries the version and the values that its editor saw. Only changed fields are saved, all or none;
where another edit was faster, the page shows both values and asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.core.paginator import Page
from django.db import transaction
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from portal.access import AccessPolicy, visible_projects
from portal.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from portal.models import NodePool, Project, QuotaAddition, QuotaChange, QuotaReplay, User
from portal.selectors.projects.quota_additions import get_quota_addition, list_quota_additions
from portal.selectors.projects.quota_effect import read_quota_effect
from portal.selectors.projects.quota_grid import QuotaGrid, QuotaGridRow, pools_with_gpus, quota_grid
from portal.selectors.projects.quota_replays import get_quota_replay, read_quota_replay
from portal.services.projects.projects import (
    DEFAULT_QUOTA_VALUES,
    QuotaValues,
    do_change_quota,
    do_undo_quota_change,
    validate_quota,
)
from portal.services.projects.quota_additions import do_add_quota, do_end_quota_addition
from portal.services.projects.quota_effect import QuotaEdit, simulate_quota_effect
from portal.services.projects.quota_replays import do_replay_quotas
from portal.web.display.formatting import time_zone
from portal.web.parsing import (
    format_gpu_input,
    parse_gpu_limit,
    parse_gpu_milli,
    parse_integer,
    parse_local_time,
    parse_weight,
)
from portal.web.projects.tree_pagination import (
    MAX_SEARCH_LENGTH,
    MIN_ROWS_FOR_SEARCH,
    name_hidden_parents,
    paginate_tree,
)
from portal.web.views import action, find_row, page, posted_values, refusals_as_messages

SEPARATOR = ";"
FIELDS: dict[str, Callable[[str, str], float | None]] = {
    "guaranteed_milli": parse_gpu_milli,
    "limit_milli": parse_gpu_limit,
    "user_limit_milli": parse_gpu_limit,
    "weight": parse_weight,
    "priority": parse_integer,
}
"""How the text of each field of ``QuotaValues`` is read."""
TITLES = {"user_limit_milli": gettext_lazy("Per user")}


@dataclass
class QuotaCell:
    """One editable number: stored value, posted value, and the value of a concurrent edit."""

    field: str
    value: str
    loaded: str
    problem: str = ""
    concurrent_value: str = ""

    @property
    def name(self) -> str:
        """The field without its unit, as the form names it."""
        return self.field.removesuffix("_milli")

    @property
    def title(self) -> str:
        return str(TITLES.get(self.field) or _(self.name.capitalize()))

    @property
    def dirty(self) -> bool:
        return self.value != self.loaded


@dataclass
class QuotaLine:
    """A row of the grid with its cells."""

    row: QuotaGridRow
    cells: dict[str, QuotaCell]
    version: int
    problem: str = ""
    additions: list[QuotaAddition] = field(default_factory=list)

    @property
    def loaded(self) -> str:
        """The version and values that the editor saw, as the line carries them."""
        return SEPARATOR.join([str(self.version), *(cell.loaded for cell in self.cells.values())])


@dataclass
class QuotaSheet:
    """The grid: lines of one page, totals of all."""

    grid: QuotaGrid
    lines: list[QuotaLine] = field(default_factory=list)
    page: Page[QuotaGridRow] | None = None
    search: str = ""

    @property
    def scale_milli(self) -> int:
        """Length of the bars: the pool, or the guaranteed or used GPUs where those are more."""
        return max(1, self.grid.total_milli, self.grid.total_guaranteed_milli, self.grid.used_milli)

    @property
    def dirty(self) -> int:
        """Number of unsaved cells."""
        return sum(cell.dirty for line in self.lines for cell in line.cells.values())


def build_sheet(grid: QuotaGrid, query: QueryDict) -> QuotaSheet:
    """Build one page of the sheet, without edits."""
    page, search = paginate_tree(grid.rows, query)
    return QuotaSheet(grid, [_line(row) for row in page], page, search)


def build_posted_sheet(grid: QuotaGrid, posted: QueryDict) -> QuotaSheet:
    """Build the posted lines, regardless of the page on which they would be now."""
    rows = [row for row in grid.rows if f"seen-{row.project.public_id}" in posted]
    name_hidden_parents(grid.rows, rows)
    return QuotaSheet(grid, [_line(row) for row in rows], search=posted.get("q", "")[:MAX_SEARCH_LENGTH])


def _line(row: QuotaGridRow) -> QuotaLine:
    shown = {name: _format(name, getattr(row, name)) for name in FIELDS}
    return QuotaLine(row, {name: QuotaCell(name, text, text) for name, text in shown.items()}, row.version)


def _format(name: str, value: float | None) -> str:
    """Format the value of a field as a user types it."""
    if name.endswith("_milli"):
        return format_gpu_input(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@page(AccessPolicy.SIGNED_IN)
def quotas(request: HttpRequest, user: User) -> HttpResponse:
    """Show the quotas of one pool: users see those of their projects, administrators edit all."""
    pools = pools_with_gpus()
    pool = _pool(request.GET.get("pool", ""), pools)
    sheet = build_sheet(quota_grid(user, pool), request.GET) if pool else None
    return _page(request, user, sheet, pools)


@action(AccessPolicy.ADMIN)
def save_quotas(request: HttpRequest, user: User) -> HttpResponse:
    """Save the changed cells of one pool, all or none."""
    pools = pools_with_gpus()
    pool = _pool(request.POST.get("pool", ""), pools)
    if pool is None:
        raise NotFound(_("There is no such pool."))
    reason = request.POST.get("reason", "").strip()
    sheet = build_posted_sheet(quota_grid(user, pool), request.POST)
    edited = _apply_posted(request, sheet)
    try:
        with transaction.atomic():
            saved = [_save(user, pool, line, reason) for line in edited]
            if not all(saved):
                raise Conflict(_("Nothing was saved."))
    except Conflict:
        return _page(request, user, sheet, pools, status=409)
    if edited:
        text = ngettext(
            "Saved the quota of {count} project. It takes effect with the next cycle.",
            "Saved the quota of {count} projects. It takes effect with the next cycle.",
            len(edited),
        )
        messages.success(request, text.format(count=len(edited)))
    return redirect(f"{reverse('quotas')}?{_page_query(request.POST, pool)}")


@action(AccessPolicy.ADMIN)
def simulate_quotas(request: HttpRequest, user: User) -> HttpResponse:
    """Show what the changed cells of one pool would do to the present queue, without saving them."""
    edits, problem = _posted_edits(request, user)
    effect = None if problem else read_quota_effect(user, simulate_quota_effect(edits))
    return render(request, "projects/quota_effect.html", {"effect": effect, "problem": problem})


@action(AccessPolicy.ADMIN)
def replay_quotas(request: HttpRequest, user: User) -> HttpResponse:
    """Replay the jobs of the last 30 days with the changed cells of one pool, without saving them."""
    edits, problem = _posted_edits(request, user)
    if problem:
        return render(request, "projects/quota_replay.html", {"problem": problem})
    return render_replay(request, user, lambda: do_replay_quotas(user, edits))


@page(AccessPolicy.SIGNED_IN)
def quota_replay(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show the progress or the result of a replay."""
    row = get_quota_replay(user, public_id)
    return render(request, "projects/quota_replay.html", {"view": read_quota_replay(user, row)})


def render_replay(request: HttpRequest, user: User, begin: Callable[[], QuotaReplay]) -> HttpResponse:
    """Begin a replay and show it, or why not."""
    try:
        context: dict[str, Any] = {"view": read_quota_replay(user, begin())}
    except (InvalidRequest, Conflict) as error:
        context = {"problem": error.message}
    return render(request, "projects/quota_replay.html", context)


def _posted_edits(request: HttpRequest, user: User) -> tuple[list[QuotaEdit], str]:
    """Return the changed quotas of the posted sheet, and what is wrong with them."""
    pool = find_row(NodePool.objects, name=request.POST.get("pool", ""))
    edits, problem = [], ""
    for line in _apply_posted(request, build_posted_sheet(quota_grid(user, pool), request.POST)):
        try:
            values = _parse_values(line)
            validate_quota(values)
            edits.append(QuotaEdit(line.row.project, pool, values))
        except InvalidRequest as error:
            problem = f"{line.row.project.name}: {error.message}"
    if not edits and not problem:
        problem = _("Change a number first.")
    return edits, problem


@action(AccessPolicy.ADMIN)
def add_quota(request: HttpRequest, user: User) -> HttpResponse:
    """Add GPUs to a quota between two times."""
    pools = pools_with_gpus()
    pool = _pool(request.POST.get("pool", ""), pools)
    if pool is None:
        raise NotFound(_("There is no such pool."))
    values = posted_values(request, "project", "gpus", "starts_at", "ends_at", "why")
    zone = time_zone(user.timezone)
    try:
        row = do_add_quota(
            user,
            _addition_project(user, values["project"]),
            pool,
            extra_milli=parse_gpu_milli(values["gpus"], "extra_milli"),
            starts_at=parse_local_time(values["starts_at"], "starts_at", zone)
            if values["starts_at"]
            else None,
            ends_at=parse_local_time(values["ends_at"], "ends_at", zone),
            reason=values["why"],
        )
    except (InvalidRequest, Conflict) as error:
        sheet = build_sheet(quota_grid(user, pool), request.POST)
        problems = error.fields if isinstance(error, InvalidRequest) else {"project": error.message}
        addition = {"addition": values, "addition_problems": problems}
        return _page(request, user, sheet, pools, status=error.status, **addition)
    messages.success(
        request,
        _("{name} has {gpus} more GPUs then.").format(
            name=row.quota.project.name, gpus=format_gpu_input(row.extra_milli)
        ),
    )
    return redirect(f"{reverse('quotas')}?pool={pool.name}")


def _addition_project(user: User, name: str) -> Project:
    project = visible_projects(user).filter(name=name, archived_at__isnull=True).first()
    if project is None:
        raise InvalidRequest(fields={"project": _("There is no such project.")})
    return project


@action(AccessPolicy.ADMIN)
def end_addition(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_quota_addition(user, public_id)
    with refusals_as_messages(request):
        do_end_quota_addition(user, row)
        messages.success(
            request, _("The temporary quota of {name} has ended.").format(name=row.quota.project.name)
        )
    return redirect(f"{reverse('quotas')}?pool={row.quota.pool.name}")


@action(AccessPolicy.ADMIN)
def undo_quota_change(request: HttpRequest, user: User, change_id: int) -> HttpResponse:
    change = find_row(QuotaChange.objects.select_related("quota__pool", "quota__project"), pk=change_id)
    with refusals_as_messages(request):
        do_undo_quota_change(user, change)
        messages.success(
            request, _("Restored the previous quota of {name}.").format(name=change.quota.project.name)
        )
    return redirect(f"{reverse('quotas')}?pool={change.quota.pool.name}")


# -- internal --------------------------------------------------------------------------------------


def _pool(name: str, pools: list[NodePool]) -> NodePool | None:
    return next((pool for pool in pools if pool.name == name), pools[0] if pools and not name else None)


def _page_query(query: QueryDict, pool: NodePool) -> str:
    """Return the query string of the same pool, search and page."""
    words = {"pool": pool.name, "q": query.get("q", ""), "page": query.get("page", "")}
    return urlencode({key: value for key, value in words.items() if value})


def _apply_posted(request: HttpRequest, sheet: QuotaSheet) -> list[QuotaLine]:
    """Apply the posted values to the sheet and return the changed lines."""
    edited = []
    for line in sheet.lines:
        key = line.row.project.public_id
        version, *values = request.POST[f"seen-{key}"].split(SEPARATOR)
        if len(values) != len(FIELDS) or not version.isascii() or not version.isdigit():
            raise InvalidRequest(_("The form is not valid; reload the page."))
        changed = False
        for cell, seen in zip(line.cells.values(), values, strict=True):
            posted = request.POST.get(f"{cell.name}-{key}", seen).strip()
            if posted != seen:
                changed = True
                cell.concurrent_value = cell.loaded if cell.loaded != seen else ""
                cell.value = posted
        if changed:
            line.version = int(version)
            edited.append(line)
    return edited


def _save(user: User, pool: NodePool, line: QuotaLine, reason: str) -> bool:
    """Save one line. When refused, note the message at the cell or the line and return False."""
    try:
        values = _parse_values(line)
        do_change_quota(user, line.row.project, pool, values, version=line.version, reason=reason)
    except InvalidRequest as error:
        for name, message in error.fields.items():
            cell = line.cells.get(name)
            if cell is not None:
                cell.problem = message
            else:
                line.problem = message
        return False
    except PreconditionFailed as error:
        line.problem = _(
            "Another user changed this line while you were editing it. Save again to replace their values "
            "with yours."
        )
        line.version = int(error.details["version"])
        return False
    return True


def _parse_values(line: QuotaLine) -> QuotaValues:
    """Parse the cells of a line. Raise InvalidRequest with each cell that is wrong."""
    wrong: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, read in FIELDS.items():
        try:
            values[name] = read(line.cells[name].value, name)
        except InvalidRequest as error:
            wrong |= error.fields
    if wrong:
        raise InvalidRequest(fields=wrong)
    return QuotaValues(**values)


def _page(
    request: HttpRequest,
    user: User,
    sheet: QuotaSheet | None,
    pools: list[NodePool],
    *,
    status: int = 200,
    **more: Any,
) -> HttpResponse:
    parameters = request.POST or request.GET
    additions = []
    if sheet is not None:
        additions = list(list_quota_additions(user, ended=False).filter(quota__pool=sheet.grid.pool))
        for line in sheet.lines:
            line.additions = [row for row in additions if row.quota.project_id == line.row.project.pk]
    context = more | {
        "additions": additions,
        "now": timezone.now(),
        "sheet": sheet,
        "pools": pools,
        "history": _history(user, sheet.grid.pool) if sheet else [],
        "page": sheet.page if sheet else None,
        "search": sheet.search if sheet else "",
        "searchable": sheet is not None and len(sheet.grid.rows) > MIN_ROWS_FOR_SEARCH,
        "number": parameters.get("page", ""),
        "place": _page_query(parameters, sheet.grid.pool) if sheet else "",
        "to": reverse("quotas"),
        "may_edit": user.is_admin,
        "reason": request.POST.get("reason", "").strip(),
        "refused": status == 409,
    }
    return render(request, "projects/quotas.html", context, status=status)


def _history(user: User, pool: NodePool) -> list[tuple[QuotaChange, bool, list[tuple[str, str, str]]]]:
    """Return the newest changes, each with whether it can be undone and its texts."""
    rows = QuotaChange.objects.filter(quota__pool=pool, quota__project__in=visible_projects(user))
    changes = list(rows.select_related("quota__project", "actor").order_by("-id")[:20])
    newest: dict[int, QuotaChange] = {}
    for change in changes:
        newest.setdefault(change.quota_id, change)
    return [(change, newest[change.quota_id] is change, _change_texts(change)) for change in changes]


def _change_texts(change: QuotaChange) -> list[tuple[str, str, str]]:
    """Return field, old and new value of each changed number."""
    before, after = DEFAULT_QUOTA_VALUES | change.before, DEFAULT_QUOTA_VALUES | change.after
    return [
        (QuotaCell(name, "", "").title.lower(), _format(name, before[name]), _format(name, after[name]))
        for name in DEFAULT_QUOTA_VALUES
        if before[name] != after[name]
    ]
