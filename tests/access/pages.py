"""Every page and every act of a page: how to ask for it in the world, and who may. As the table of REST."""

from __future__ import annotations

from dataclasses import dataclass

from tests.api.table import (
    ADMIN,
    CONTROLLERS,
    EVERYBODY,
    INSIDE,
    MANAGERS,
    NOBODY,
    OWNER,
    Row,
)


@dataclass(frozen=True)
class Page(Row):
    """An address with a method. ``name`` is that of the route.

    ``denied`` is what an insider without the right gets: 403, or 302 back to a page that shows the refusal.
    ``writes`` is false for an act that the world is not ready for: whoever may do it is told so.
    """

    writes: bool = True

    def expected(self, actor: str) -> int:
        """The status the actor gets; who is not signed in is sent to sign in."""
        return 302 if actor in NOBODY else super().expected(actor)


def _admin(name: str, path: str, body: dict[str, str] | None = None, **more: object) -> Page:
    """An act of administrators alone; it answers by going back to a page."""
    return Page(name, "post", path, ADMIN, body, **{"status": 302, "hidden": 403, **more})  # type: ignore[arg-type]


PASSWORDS = {"old": "wrong", "password": "a longer new password"}
SIGNAL = {"signal": "SIGUSR1"}

PAGES = [
    Page("home", "get", "/", EVERYBODY),
    Page("account", "get", "/account/", EVERYBODY),
    Page("account-name", "post", "/account/name/", EVERYBODY, {"timezone": "UTC"}, 302),
    # none of them has a password, so the old one is not asked for
    Page("account-password", "post", "/account/password/", EVERYBODY, PASSWORDS, 302),
    Page(
        "account-token", "post", "/account/tokens/", EVERYBODY, {"name": "n", "scopes": "read", "days": "30"}
    ),
    Page("account-token-revoke", "post", "/account/tokens/{token}/revoke/", OWNER, None, 302, 404),
    Page("save-secret", "post", "/account/secrets/", EVERYBODY, {"name": "new", "value": "x"}, 302),
    Page("remove-secret", "post", "/account/secrets/own/forget/", OWNER, None, 302, 302, 302),
    Page("account-sessions-end", "post", "/account/sessions/end/", EVERYBODY, None, 302, writes=False),
    Page("launch", "get", "/launch/", EVERYBODY),
    Page("launch", "post", "/launch/", EVERYBODY, {"name": "incomplete"}, 400, writes=False),
    Page("launch-check", "post", "/launch/check/", EVERYBODY, {"name": "incomplete"}, writes=False),
    Page("jobs", "get", "/jobs/", EVERYBODY),
    Page("jobs-cancel", "post", "/jobs/cancel/", CONTROLLERS, {"job": "{job}"}, 302, 302, 302),
    Page("job", "get", "/jobs/{running}/", INSIDE),
    Page("job-logs", "get", "/jobs/{running}/logs/", INSIDE),
    Page("job-logs", "get", "/jobs/{running_workspace}/logs/", OWNER | ADMIN),
    Page("job-log-lines", "get", "/jobs/{running}/logs/lines/?rank=1", INSIDE),
    Page("job-log-search", "get", "/jobs/{running}/logs/search/?rank=1&q=o", INSIDE),
    Page("job-log-download", "get", "/jobs/{running}/logs/download/?rank=1", INSIDE),
    Page("job-terminal", "get", "/jobs/{running}/terminal/", OWNER),
    # its ranks are not up yet
    Page("job-terminal-open", "post", "/jobs/{running}/terminals/", OWNER, None, 409, writes=False),
    Page("terminal-state", "get", "/jobs/terminals/{terminal}/", OWNER, denied=404),
    Page("job-metrics", "get", "/jobs/{running}/metrics/", INSIDE),
    Page("job-series", "get", "/jobs/{running}/metrics/series/", INSIDE),
    Page("job-run", "get", "/jobs/{running}/run/", INSIDE),
    Page("job-cancel", "post", "/jobs/{job}/cancel/", CONTROLLERS, None, 302),
    Page("job-hold", "post", "/jobs/{job}/hold/", CONTROLLERS, {"held": "1"}, 302),
    Page("job-suspend", "post", "/jobs/{running}/suspend/", CONTROLLERS, None, 302),
    Page("job-resume", "post", "/jobs/{job}/resume/", CONTROLLERS, None, 409, writes=False),
    Page(
        "job-extend", "post", "/jobs/{running}/extend/", CONTROLLERS, {"more_s": "1h"}, 302, 302, writes=False
    ),
    Page(
        "job-snooze", "post", "/jobs/{running_workspace}/snooze/", CONTROLLERS, None, 302, 302, writes=False
    ),
    Page(
        "job-excuse",
        "post",
        "/jobs/{running_workspace}/excuse/",
        CONTROLLERS,
        {"text": "a demo"},
        302,
        302,
        writes=False,
    ),
    Page("job-signal", "post", "/jobs/{running}/signal/", CONTROLLERS, SIGNAL, 302, 302, writes=False),
    Page("job-again", "post", "/jobs/{ended}/again/", CONTROLLERS, None, 302),
    Page("job-open", "post", "/jobs/{running_workspace}/open/", OWNER, None, 409, writes=False),
    Page("requests", "get", "/requests/", EVERYBODY),
    Page("decide-extension", "post", "/requests/{extension}/decide/", ADMIN, {}, 302, 302, writes=False),
    Page("cut-excuse", "post", "/requests/excuses/{excuse}/cut/", MANAGERS, None, 302, 302),
    Page("queue", "get", "/queue/", EVERYBODY),
    Page("search", "get", "/search/?q=runs", EVERYBODY),
    Page("cluster", "get", "/cluster/", EVERYBODY),
    Page("node", "get", "/nodes/{node}/", EVERYBODY),
    Page("node-series", "get", "/nodes/{node}/series/", EVERYBODY),
    Page("projects", "get", "/projects/", EVERYBODY),
    _admin("add-project", "/projects/add/", {"name": "brand-new"}),
    Page("project", "get", "/projects/{project}/", INSIDE),
    Page("change-project", "post", "/projects/{project}/change/", MANAGERS, {"title": "Seeing"}, 302, 302),
    Page(
        "save-project-idle",
        "post",
        "/projects/{project}/idle/",
        MANAGERS,
        {"version": "{policy_version}", "knob-idle_after_s": "30 min"},
        302,
    ),
    Page(
        "set-member",
        "post",
        "/projects/{project}/members/",
        MANAGERS,
        {"username": "stranger-x", "role": "viewer"},
        302,
    ),
    Page("invite-into", "post", "/projects/{project}/invite/", MANAGERS, {"role": "viewer"}),
    Page(
        "save-project-secret",
        "post",
        "/projects/{project}/secrets/",
        MANAGERS,
        {"name": "new", "value": "x"},
        302,
        302,
    ),
    Page(
        "remove-project-secret",
        "post",
        "/projects/{project}/secrets/shared/forget/",
        MANAGERS,
        None,
        302,
        302,
    ),
    Page("quotas", "get", "/quotas/", EVERYBODY),
    _admin("save-quotas", "/quotas/save/", writes=False),
    _admin("undo-quota", "/quotas/undo/{change}/"),
    Page("policy", "get", "/policy/", EVERYBODY),
    _admin("save-policy", "/policy/save/", status=400, writes=False),
    Page("people", "get", "/people/", ADMIN, hidden=403),
    _admin("invite", "/people/invite/", status=200),
    _admin("change-person", "/people/{person}/change/", {"act": "close"}),
    Page("revoke-invitation", "post", "/invitations/{invitation}/revoke/", MANAGERS, None, 302, denied=404),
    Page("add-node", "get", "/nodes/add/", ADMIN, hidden=403),
    _admin("add-node", "/nodes/add/", status=400, writes=False),
    _admin("test-node", "/nodes/{node}/test/"),
    _admin("give-back-gpu", "/nodes/{node}/gpus/{gpu}/give-back/", writes=False),
    _admin("set-labels", "/nodes/{node}/labels/", {"labels": "rack=r1"}),
    _admin("set-interface", "/nodes/{node}/interface/", {"interface": "eth7"}, writes=False),
    _admin("set-pool-network", "/pools/{pool}/network/", {"allow_node_network": "on"}),
    Page("calendar", "get", "/calendar/", EVERYBODY),
    _admin("save-reservation", "/calendar/save/", status=400, writes=False),
    _admin("cancel-reservation", "/calendar/{reservation}/cancel/"),
    _admin("restore-reservation", "/calendar/{reservation}/restore/", writes=False),
    Page("topologies", "get", "/topologies/", EVERYBODY),
    _admin("save-topology", "/topologies/save/", {"name": "fabric", "levels": "rack"}),
    _admin("remove-topology", "/topologies/hall/remove/"),
    # no signed agent is at hand here
    _admin("order-act", "/nodes/{node}/act/", {"act": "preflight"}),
    _admin("upgrade-all", "/rollouts/start/", writes=False),
    Page("rollout", "get", "/rollouts/{rollout}/", ADMIN, hidden=403),
    _admin("set-node-state", "/nodes/{node}/state/", {"act": "cordon", "reason": "a fan"}),
    Page("node-check", "get", "/nodes/{node}/checks/{check}/", ADMIN, hidden=403),
    Page("volumes", "get", "/volumes/", EVERYBODY),
    _admin("save-volume", "/volumes/save/", status=400, writes=False),
    _admin("remove-volume", "/volumes/team/remove/"),
    Page("registries", "get", "/registries/", ADMIN, hidden=403),
    _admin("save-registry", "/registries/save/", status=400, writes=False),
    _admin("remove-registry", "/registries/{registry}/remove/"),
    Page("restored", "get", "/restored/", ADMIN, hidden=403),
    # nothing was restored in this world
    Page("restored-fence", "get", "/restored/nodes/{node}/fence/", ADMIN, hidden=403),
    Page("restored-keep", "get", "/restored/{container}/keep/", ADMIN, hidden=403),
    Page("restored-stop", "get", "/restored/{container}/stop/", ADMIN, hidden=403),
    _admin("restored-fence", "/restored/nodes/{node}/fence/", status=400, writes=False),
    _admin("restored-keep", "/restored/{container}/keep/", status=409, writes=False),
    _admin("restored-stop", "/restored/{container}/stop/", status=409, writes=False),
    Page("environments", "get", "/environments/", EVERYBODY),
    _admin("add-environment", "/environments/add/", status=400, writes=False),
    Page("environment", "get", "/environments/{lab}/", EVERYBODY),
    _admin("save-environment", "/environments/{lab}/save/", status=400, writes=False),
    _admin("change-image", "/environments/{lab}/image/", {"act": "update"}, writes=False),
    _admin("bring-environment", "/environments/{lab}/bring/"),
    _admin("stop-bringing", "/environments/{lab}/bring/stop/"),
    Page("scheduler", "get", "/scheduler/", ADMIN, hidden=403),
    _admin("failed-cycle", "/scheduler/failed/{failed}/", status=200),
    Page("alarms", "get", "/alarms/", ADMIN, hidden=403),
    _admin("acknowledge-alarm", "/alarms/{alarm}/acknowledge/", {"note": "reset it"}),
    _admin("acknowledge-invalid-row", "/alarms/rows/{invalid_row}/acknowledge/", {"note": "mine"}),
    Page("audit", "get", "/audit/", ADMIN, hidden=403),
    Page("api-docs", "get", "/api/docs/", EVERYBODY),
    Page("api-docs-start", "get", "/api/docs/start.js", EVERYBODY),
]

PUBLIC = frozenset({"sign-in", "sign-in-link", "sign-out", "invitation", "healthz", "readyz"})
"""Open to everybody; what they do is in tests/web/test_signin.py and tests/api/test_health.py."""
