"""The policy page: the knobs of the cluster and of each pool, what they do, what they inherit, and their edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, policy, signed_in
from portal.errors import Invalid, NotThere, Stale
from portal.models import AuditEntry, NodePool
from portal.selectors.policy import Turned, policy_sheet
from portal.services.policy import do_change_policy
from portal.web.admin.amounts import number_of, seconds_of, shown_seconds
from portal.web.words import whole_number
from portal.words.knobs import KnobValue, decides, figure

CHANGES_SHOWN = 10


LACKING_SHOWN = 30
"""Of the nodes that lack what their pool names; a pool that all of lack it is plain from so many."""


@dataclass
class Line:
    """One knob as the page shows it: what its editor typed, and what is wrong with that."""

    knob: Turned
    typed: str
    seen: str
    problem: str = ""
    theirs: str = ""

    @property
    def dirty(self) -> bool:
        """The editor changed it."""
        return self.typed != self.seen

    @property
    def inherits(self) -> str:
        """What holds while the field is blank, in words."""
        source = "the cluster's" if self.knob.from_cluster else "the default"
        return f"{shown(self.knob, self.knob.inherited)}, {source}"

    @property
    def span(self) -> str:
        """Least and most."""
        if self.knob.bounds is None:
            return " or ".join(self.knob.options)
        low, high = self.knob.bounds
        unit = "" if self.knob.unit == "s" else f" {self.knob.unit}"
        return f"{shown(self.knob, low)} to {shown(self.knob, high)}{unit}"

    @property
    def default(self) -> str:
        """What holds where nobody said otherwise."""
        return shown(self.knob, self.knob.default)

    @property
    def now(self) -> str:
        """What holds."""
        return shown(self.knob, self.knob.value)


@dataclass
class Page:
    """The knobs of the cluster or of one pool, and the version their editor saw."""

    pool: NodePool | None
    version: int
    lines: list[Line] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Whose knobs."""
        return f"pool {self.pool.name}" if self.pool else "the cluster"

    @property
    def parts(self) -> list[tuple[str, list[Line]]]:
        """The knobs by what they are about, with a heading each."""
        deciding = [line for line in self.lines if decides(line.knob.name)]
        rest = [line for line in self.lines if not decides(line.knob.name)]
        return [("Who starts where and when", deciding), ("Time limits and idle workspaces", rest)]

    @property
    def dirty(self) -> int:
        """How many knobs wait to be saved."""
        return sum(line.dirty for line in self.lines)

    @property
    def turned(self) -> int:
        """How many have a value of their own."""
        return sum(line.knob.own is not None for line in self.lines)


def shown(knob: Turned, value: KnobValue | None) -> str:
    """A value as people read and type it: "7 d", "200,000", "pack"; empty for None."""
    if value is None or isinstance(value, str):
        return value or ""
    if knob.unit == "s":
        return shown_seconds(value)
    return figure(value)


@policy(Policy.SIGNED_IN)
@require_safe
def policy_page(request: HttpRequest) -> HttpResponse:
    """The knobs as they stand; everybody may know by what rules the cluster is shared, admins turn them."""
    return _render(request, _page(_pool(request.GET.get("pool", ""))))


@policy(Policy.ADMIN)
@require_POST
def save_policy(request: HttpRequest) -> HttpResponse:
    """Saves what was turned, all or nothing. The button beside a knob blanks that knob too."""
    pool = _pool(request.POST.get("pool", ""))
    page = _page(pool)
    version = whole_number(request.POST.get("version", ""))
    if version is None:
        raise Invalid("This form is not one of ours; load the page again.")
    take(page.lines, request.POST)
    reason = request.POST.get("reason", "").strip()
    try:
        changes = turned(page.lines)
        do_change_policy(signed_in(request.user), pool, changes, version=version, reason=reason)
    except Invalid as refusal:
        for line in page.lines:
            line.problem = refusal.fields.get(line.knob.name, "")
        return _render(request, page, status=400, reason=reason)
    except Stale:
        return _render(request, page, status=409, reason=reason)
    if changes:
        messages.success(
            request,
            f"Saved {len(changes)} {'knob' if len(changes) == 1 else 'knobs'} of {page.name}. "
            "The next cycle follows them.",
        )
    return HttpResponseRedirect(_address(pool))


# -- inside ----------------------------------------------------------------------------------------


def _pool(name: str) -> NodePool | None:
    """The pool of that name; None for the cluster."""
    if not name:
        return None
    pool = NodePool.objects.filter(name=name).first()
    if pool is None:
        raise NotThere("There is no such pool.")
    return pool


def _address(pool: NodePool | None) -> str:
    return reverse("policy") + (f"?pool={pool.name}" if pool else "")


def _page(pool: NodePool | None) -> Page:
    sheet = policy_sheet(pool)
    lines = [Line(knob, shown(knob, knob.own), shown(knob, knob.own)) for knob in sheet.knobs]
    return Page(pool, sheet.version, lines)


def take(lines: Iterable[Line], posted: Mapping[str, str]) -> None:
    """Puts what was typed into the lines, and beside it what somebody else put there meanwhile."""
    for line in lines:
        seen = posted.get(f"seen-{line.knob.name}", line.seen)
        line.typed = posted.get(f"knob-{line.knob.name}", seen).strip()
        if posted.get("blank") == line.knob.name:
            line.typed = ""
        if seen != line.seen:
            line.theirs = line.seen or "blank"
            line.seen = seen


def turned(lines: Iterable[Line]) -> dict[str, KnobValue | None]:
    """The knobs that were turned; Invalid names those whose text is no value."""
    values: dict[str, KnobValue | None] = {}
    wrong: dict[str, str] = {}
    for line in lines:
        if not line.dirty:
            continue
        try:
            values[line.knob.name] = _value(line)
        except Invalid as refusal:
            wrong |= refusal.fields
    if wrong:
        raise Invalid(fields=wrong)
    return values


def _value(line: Line) -> KnobValue | None:
    if not line.typed:
        return None
    if line.knob.options:
        return line.typed
    read = seconds_of if line.knob.unit == "s" else number_of
    return read(_without_thousands(line.typed), line.knob.name)


def _without_thousands(text: str) -> str:
    """The page shows 200,000, so it takes that back; any other comma is refused where numbers are read."""
    digits = text.replace(",", "")
    number = whole_number(digits)
    return digits if number is not None and text == f"{number:,}" else text


def _render(request: HttpRequest, page: Page, *, status: int = 200, reason: str = "") -> HttpResponse:
    kind = "nodepool" if page.pool else "clustersettings"
    may_edit = signed_in(request.user).is_admin
    changes = AuditEntry.objects.filter(act="policy.change", object_kind=kind)
    if page.pool:
        changes = changes.filter(object_id=page.pool.public_id)
    newest = changes.order_by("-id")[:CHANGES_SHOWN] if may_edit else ()
    named = {line.knob.name: line.knob for line in page.lines}
    context = {
        "page": page,
        "lacking": page.pool.nodes.exclude(lacks="").order_by("name")[:LACKING_SHOWN] if page.pool else (),
        "pools": NodePool.objects.order_by("name"),
        "may_edit": may_edit,
        "refused": status == 400,
        "stale": status == 409,
        "reason": reason,
        "to": _address(page.pool),
        "history": [(row, _moved(row, named)) for row in newest],
        "blank": "inherits the cluster's value" if page.pool else "holds the default",
    }
    return render(request, "admin/policy.html", context, status=status)


def _moved(row: AuditEntry, named: Mapping[str, Turned]) -> list[tuple[str, str, str]]:
    """Knob, old and new value in words, for each that a change turned."""
    before, after = row.before or {}, row.after or {}

    def word(name: str, value: KnobValue | None) -> str:
        knob = named.get(name)
        return (shown(knob, value) if knob else str(value or "")) or "blank"

    return [(name, word(name, before.get(name)), word(name, after.get(name))) for name in after]
