"""What a project holds of idle workspaces otherwise than its pools: a panel of its page, and its edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from portal.errors import Invalid
from portal.models import Project, User
from portal.selectors.policy import Turned
from portal.selectors.project_policy import ProjectKnob, project_sheet
from portal.services.policy import do_change_policy
from portal.web.admin.policy import Line, shown, take, turned
from portal.web.words import whole_number
from portal.words.knobs import default_of


@dataclass
class IdleLine(Line):
    """One knob of the project as the page shows it."""

    of_project: ProjectKnob | None = None

    @property
    def holds(self) -> list[tuple[str, str, str]]:
        """What holds, whose word that is, and in which pools; pools where all is the same together."""
        found: dict[tuple[str, str], list[str]] = {}
        for rule in self.of_project.rules if self.of_project else ():
            said_by = f"{rule.said_by}, which allows no more" if rule.bounded else rule.said_by
            found.setdefault((shown(self.knob, rule.value), said_by), []).append(rule.pool.name)
        return [(value, said_by, ", ".join(pools)) for (value, said_by), pools in found.items()]

    @property
    def room(self) -> str:
        """The least strict value that would count, in words."""
        if self.of_project is None or self.of_project.room is None:
            return ""
        value = shown(self.knob, self.of_project.room)
        return f"{value} or stricter" if self.knob.options else f"at most {value}"


class IdlePanel:
    """The knobs of a project, with what its editor typed and what is wrong with that."""

    def __init__(self, project: Project) -> None:
        sheet = project_sheet(project)
        self.project = project
        self.version = sheet.version
        self.refused = ""
        self.lines = [_line(knob) for knob in sheet.knobs]

    @property
    def turned(self) -> int:
        """How many knobs have a value of their own."""
        return sum(line.knob.own is not None for line in self.lines)

    def save(self, user: User, posted: Mapping[str, str]) -> bool:
        """Turns what was typed; False when nothing was. Raises Invalid and Stale, and notes why at each knob."""
        version = whole_number(posted.get("version", ""))
        if version is None:
            raise Invalid("This form is not one of ours; load the page again.")
        take(self.lines, posted)
        try:
            changes = turned(self.lines)
            do_change_policy(
                user, self.project, changes, version=version, reason=posted.get("reason", "").strip()
            )
        except Invalid as refusal:
            for line in self.lines:
                line.problem = refusal.fields.get(line.knob.name, "")
            raise
        return bool(changes)


def _line(knob: ProjectKnob) -> IdleLine:
    own = Turned(knob.name, knob.own, default_of(knob.name), False)
    text = shown(own, knob.own)
    return IdleLine(own, text, text, of_project=knob)
