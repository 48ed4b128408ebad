"""Describes the rule for idle workspaces and where it is set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from portal.models import NodePool, Project
from portal.selectors.scheduling.project_settings import PoolRules, effective_rules
from portal.web.display.formatting import duration


@dataclass(frozen=True)
class IdleRuleText:
    """What happens to idle workspaces; ``pools`` is blank when it applies to all."""

    message: str
    set_by: str
    pools: str = ""


def idle_rule_text(rules: PoolRules) -> IdleRuleText:
    """Describe the rule of one pool for one project."""
    settings = rules.values
    action, after = str(settings["idle_action"]), duration(float(settings["idle_after_s"]))
    reported = ["idle_action", "idle_after_s"]
    if action == "suspend":
        grace = duration(float(settings["idle_grace_s"]))
        message = (
            f"After {after} without use of its GPUs and its tool, and a countdown of {grace} that you can stop, "
            "it is suspended; its files are kept."
        )
        reported.append("idle_grace_s")
    elif action == "notify":
        message = f"After {after} without use of its GPUs and its tool you are notified; it is not suspended."
    else:
        message, reported = "Nothing happens while it is idle.", ["idle_action"]
    set_by = " and ".join(dict.fromkeys(rules.rules[name].source_text for name in reported))
    return IdleRuleText(message, set_by)


def idle_rule_texts(project: Project, pools: Iterable[NodePool]) -> list[IdleRuleText]:
    """Describe the rules for a project in these pools, grouped by rule, with two additional queries."""
    found = effective_rules((pool, project.pk) for pool in pools)
    names: dict[tuple[str, str], list[str]] = {}
    for rules in found.values():
        rule = idle_rule_text(rules)
        pool = rules.rules["idle_action"].pool.name
        names.setdefault((rule.message, rule.set_by), []).append(pool)
    alone = len(names) == 1
    return [IdleRuleText(*texts, "" if alone else ", ".join(sorted(pools))) for texts, pools in names.items()]
