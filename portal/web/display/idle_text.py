"""How the rule for idle workspaces reads on a page, and whose word it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from portal.models import NodePool, Project
from portal.selectors.scheduling.project_settings import PoolRules, effective_rules
from portal.web.display.formatting import duration


@dataclass(frozen=True)
class IdleRuleText:
    """What becomes of an idle workspace; ``pools`` where: blank for all that are meant."""

    message: str
    set_by: str
    pools: str = ""


def idle_rule_text(rules: PoolRules) -> IdleRuleText:
    """The rule of one pool for one project."""
    knobs = rules.values
    action, after = str(knobs["idle_action"]), duration(float(knobs["idle_after_s"]))
    told = ["idle_action", "idle_after_s"]
    if action == "suspend":
        grace = duration(float(knobs["idle_grace_s"]))
        message = (
            f"After {after} without use of its GPUs and its tool, and a countdown of {grace} that you may stop, "
            "it is suspended; its files stay."
        )
        told.append("idle_grace_s")
    elif action == "notify":
        message = f"After {after} without use of its GPUs and its tool you are told; nothing ends."
    else:
        message, told = "Nothing becomes of it while nobody uses it.", ["idle_action"]
    said_by = " and ".join(dict.fromkeys(rules.rules[name].source_text for name in told))
    return IdleRuleText(message, said_by)


def idle_rule_texts(project: Project, pools: Iterable[NodePool]) -> list[IdleRuleText]:
    """The rules for a project in these pools, pools under the same rule together: two queries more than theirs."""
    found = effective_rules((pool, project.pk) for pool in pools)
    names: dict[tuple[str, str], list[str]] = {}
    for rules in found.values():
        rule = idle_rule_text(rules)
        pool = rules.rules["idle_action"].pool.name
        names.setdefault((rule.message, rule.set_by), []).append(pool)
    alone = len(names) == 1
    return [IdleRuleText(*words, "" if alone else ", ".join(sorted(pools))) for words, pools in names.items()]
