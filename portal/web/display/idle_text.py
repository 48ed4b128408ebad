"""Describes the rule for idle jobs and where it is set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.domain.scheduling.policy_settings import IDLE_SETTINGS
from portal.domain.states import JobKind
from portal.models import NodePool, Project
from portal.selectors.scheduling.project_settings import PoolRules, effective_rules
from portal.web.display.formatting import duration


@dataclass(frozen=True)
class IdleRuleText:
    """What happens to idle jobs of a kind; ``pools`` is blank when it applies to all."""

    message: str
    set_by: str
    pools: str = ""


_UNUSED = {
    JobKind.WORKSPACE: gettext_noop("without use of its GPUs and its tool"),
    JobKind.TRAINING: gettext_noop("without use of its GPUs"),
    JobKind.SERVICE: gettext_noop("without requests and use of its GPUs"),
}
_SUSPENDED = {
    JobKind.WORKSPACE: gettext_noop("it is suspended; its files are kept"),
    JobKind.TRAINING: gettext_noop("it is suspended; resumed, it continues from its newest checkpoint"),
    JobKind.SERVICE: gettext_noop("it is scaled to zero until the next request"),
}


def idle_rule_text(rules: PoolRules, kind: JobKind) -> IdleRuleText:
    """Describe the rule of one pool for jobs of this kind of one project."""
    settings, (action_name, after_name) = rules.values, IDLE_SETTINGS[kind]
    action, after = str(settings[action_name]), duration(float(settings[after_name]))
    reported = [action_name, after_name]
    if action == "suspend":
        grace = duration(float(settings["idle_grace_s"]))
        message = (
            _("After {after} {unused}, and a countdown of {grace} that you can stop, {suspended}.")
        ).format(after=after, unused=_(_UNUSED[kind]), grace=grace, suspended=_(_SUSPENDED[kind]))
        reported.append("idle_grace_s")
    elif action == "notify":
        message = _("After {after} {unused} you are notified; it is not suspended.").format(
            after=after, unused=_(_UNUSED[kind])
        )
    else:
        message, reported = _("Nothing happens while it is idle."), [action_name]
    set_by = _(" and ").join(dict.fromkeys(rules.rules[name].source_text for name in reported))
    return IdleRuleText(message, set_by)


def idle_rule_texts(project: Project, pools: Iterable[NodePool]) -> list[IdleRuleText]:
    """Describe the rules for workspaces of a project in these pools, grouped by rule, with two additional queries."""
    found = effective_rules((pool, project.pk) for pool in pools)
    names: dict[tuple[str, str], list[str]] = {}
    for rules in found.values():
        rule = idle_rule_text(rules, JobKind.WORKSPACE)
        pool = rules.rules["idle_action"].pool.name
        names.setdefault((rule.message, rule.set_by), []).append(pool)
    alone = len(names) == 1
    return [IdleRuleText(*texts, "" if alone else ", ".join(sorted(pools))) for texts, pools in names.items()]
