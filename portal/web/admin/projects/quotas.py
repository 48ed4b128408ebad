"""The quotas page: a tree per pool, edited in place and saved together, with history and undo.

Every line carries the version and the values that its editor saw. Only changed fields are saved, all or none;
where another edit was faster, the page shows both values and asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlencode

from django.contrib import messages
from django.core.paginator import Page
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from portal.access import AccessPolicy, access_policy, require_user, visible_projects
from portal.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from portal.models import NodePool, Quota, QuotaChange, User
from portal.selectors.projects.quota_grid import QuotaGrid, QuotaGridRow, pools_with_gpus, quota_grid
from portal.services.projects.projects import (
    DEFAULT_QUOTA_VALUES,
    QuotaValues,
    do_change_quota,
    do_undo_quota_change,
)
from portal.web.actions import run_and_redirect
from portal.web.admin.projects.tree_pagination import (
    MAX_SEARCH_LENGTH,
    MIN_ROWS_FOR_SEARCH,
    name_hidden_parents,
    paginate_tree,
)
from portal.web.parsing import format_gpu_input, parse_gpu_limit, parse_gpu_milli, parse_integer, parse_weight

SEPARATOR = ";"
FIELDS = ("guaranteed", "limit", "user_limit", "weight", "priority")
TITLES = {"user_limit": "Per user"}


@dataclass
class QuotaCell:
    """One editable number: stored value, posted value, and the value of a concurrent edit."""

    name: str
    value: str
    loaded: str
    problem: str = ""
    concurrent_value: str = ""

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name.capitalize())

    @property
    def dirty(self) -> bool:
        """True when the editor changed the value."""
        return self.value != self.loaded


@dataclass
class QuotaLine:
    """A row of the grid with its cells."""

    row: QuotaGridRow
    cells: dict[str, QuotaCell]
    version: int
    problem: str = ""

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
    shown = _row_values(row)
    return QuotaLine(row, {name: QuotaCell(name, shown[name], shown[name]) for name in FIELDS}, row.version)


@access_policy(AccessPolicy.SIGNED_IN)
@require_GET
def quotas(request: HttpRequest) -> HttpResponse:
    """Show the quotas of one pool: users see those of their projects, administrators edit all."""
    pools = pools_with_gpus()
    pool = _pool(request.GET.get("pool", ""), pools)
    sheet = build_sheet(quota_grid(request.user, pool), request.GET) if pool else None
    return _page(request, sheet, pools)


@access_policy(AccessPolicy.ADMIN)
@require_POST
def save_quotas(request: HttpRequest) -> HttpResponse:
    """Save the changed cells of one pool, all or none."""
    user = require_user(request.user)
    pools = pools_with_gpus()
    pool = _pool(request.POST.get("pool", ""), pools)
    if pool is None:
        raise NotFound("There is no such pool.")
    reason = request.POST.get("reason", "").strip()
    sheet = build_posted_sheet(quota_grid(user, pool), request.POST)
    edited = _apply_posted(request, sheet)
    failed = False
    try:
        with transaction.atomic():
            for line in edited:
                failed |= not _save(line, partial(_change, user, pool, line, reason))
            if failed:
                raise Conflict("Nothing was saved.")
    except Conflict:
        return _page(request, sheet, pools, status=409, reason=reason)
    if edited:
        word = "1 project" if len(edited) == 1 else f"{len(edited)} projects"
        messages.success(request, f"Saved the quota of {word}. It takes effect with the next cycle.")
    return HttpResponseRedirect(f"{reverse('quotas')}?{_page_query(request.POST, pool)}")


@access_policy(AccessPolicy.ADMIN)
@require_POST
def undo_quota_change(request: HttpRequest, change_id: int) -> HttpResponse:
    """Restore the values before the newest change of a quota."""
    change = QuotaChange.objects.select_related("quota__pool", "quota__project").filter(pk=change_id).first()
    if change is None:
        raise NotFound
    quota = change.quota

    def undo() -> str:
        do_undo_quota_change(require_user(request.user), change)
        return f"Restored the previous quota of {quota.project.name}."

    return run_and_redirect(request, undo, f"{reverse('quotas')}?pool={quota.pool.name}")


# -- internal --------------------------------------------------------------------------------------


def _pool(name: str, pools: list[NodePool]) -> NodePool | None:
    return next((pool for pool in pools if pool.name == name), pools[0] if pools and not name else None)


def _row_values(row: QuotaGridRow) -> dict[str, str]:
    return {
        "guaranteed": format_gpu_input(row.guaranteed_milli),
        "limit": format_gpu_input(row.limit_milli),
        "user_limit": format_gpu_input(row.user_limit_milli),
        "weight": f"{row.weight:g}",
        "priority": str(row.priority),
    }


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
            raise InvalidRequest("The form is not valid; reload the page.")
        changed = False
        for (name, cell), seen in zip(line.cells.items(), values, strict=True):
            posted = request.POST.get(f"{name}-{key}", seen).strip()
            if posted != seen:
                changed = True
                cell.concurrent_value = cell.loaded if cell.loaded != seen else ""
                cell.value = posted
        if changed:
            line.version = int(version)
            edited.append(line)
    return edited


def _change(user: User, pool: NodePool, line: QuotaLine, reason: str, numbers: QuotaValues) -> Quota:
    return do_change_quota(user, line.row.project, pool, numbers, version=line.version, reason=reason)


def _save(line: QuotaLine, save: Callable[[QuotaValues], Quota]) -> bool:
    """Save one line. When refused, note the message at the cell or the line and return False."""
    try:
        save(_parse_numbers(line))
    except InvalidRequest as refusal:
        for name, message in refusal.fields.items():
            cell = line.cells.get(name.removesuffix("_milli"))
            if cell is not None:
                cell.problem = message
            else:
                line.problem = message
        return False
    except PreconditionFailed as refusal:
        line.problem = (
            "Another user changed this line while you were editing it. Save again to replace their values "
            "with yours."
        )
        line.version = int(refusal.details["version"])
        return False
    return True


def _parse_numbers(line: QuotaLine) -> QuotaValues:
    cells = line.cells
    wrong: dict[str, str] = {}
    values: dict[str, object] = {}
    for name, read in (
        ("guaranteed", parse_gpu_milli),
        ("limit", parse_gpu_limit),
        ("user_limit", parse_gpu_limit),
        ("weight", parse_weight),
        ("priority", parse_integer),
    ):
        try:
            values[name] = read(cells[name].value, name)
        except InvalidRequest as refusal:
            wrong |= refusal.fields
    if wrong:
        raise InvalidRequest(fields=wrong)
    return QuotaValues(
        guaranteed_milli=values["guaranteed"],  # type: ignore[arg-type]
        limit_milli=values["limit"],  # type: ignore[arg-type]
        weight=values["weight"],  # type: ignore[arg-type]
        priority=values["priority"],  # type: ignore[arg-type]
        user_limit_milli=values["user_limit"],  # type: ignore[arg-type]
    )


def _page(
    request: HttpRequest,
    sheet: QuotaSheet | None,
    pools: list[NodePool],
    *,
    status: int = 200,
    reason: str = "",
) -> HttpResponse:
    parameters = request.POST or request.GET
    history: list[QuotaChange] = []
    if sheet is not None:
        seen: set[int] = set()
        rows = QuotaChange.objects.filter(
            quota__pool=sheet.grid.pool, quota__project__in=visible_projects(request.user)
        )
        history = list(rows.select_related("quota__project", "actor").order_by("-id")[:20])
        for change in history:
            change.can_undo = change.quota_id not in seen  # type: ignore[attr-defined]
            change.words = _change_texts(change)  # type: ignore[attr-defined]
            seen.add(change.quota_id)
    return render(
        request,
        "admin/quotas.html",
        {
            "sheet": sheet,
            "pools": pools,
            "history": history,
            "page": sheet.page if sheet else None,
            "search": sheet.search if sheet else "",
            "searchable": sheet is not None and len(sheet.grid.rows) > MIN_ROWS_FOR_SEARCH,
            "number": parameters.get("page", ""),
            "place": _page_query(parameters, sheet.grid.pool) if sheet else "",
            "to": reverse("quotas"),
            "may_edit": require_user(request.user).is_admin,
            "reason": reason,
            "here": "quotas",
            "refused": status == 409,
        },
        status=status,
    )


def _change_texts(change: QuotaChange) -> list[tuple[str, str, str]]:
    """Return field, old and new value of each changed number."""
    words = []
    before, after = DEFAULT_QUOTA_VALUES | change.before, DEFAULT_QUOTA_VALUES | change.after
    for name in DEFAULT_QUOTA_VALUES:
        if before[name] != after[name]:
            show = format_gpu_input if name.endswith("_milli") else (lambda value: f"{value:g}")
            field = name.removesuffix("_milli")
            words.append((TITLES.get(field, field).lower(), show(before[name]), show(after[name])))
    return words
