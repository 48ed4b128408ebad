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
    WORKERS,
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
RUN = "0" * 32
VERSION = {"model": "m", "version": "1", "stage": "Staging"}
SHARE = {"user": "{person}", "access": "edit", "duration_s": "3600"}
BULK_HOLD = {"job": "{job}", "action": "hold", "confirmed": "1"}
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
    Page("remove-secret", "post", "/account/secrets/own/delete/", OWNER, None, 302, 302, 302),
    Page("account-sessions-end", "post", "/account/sessions/end/", EVERYBODY, None, 302, writes=False),
    Page("fair-share", "get", "/fair-share/", EVERYBODY),
    Page("inbox", "get", "/inbox/", EVERYBODY),
    Page("inbox-count", "get", "/inbox/count/", EVERYBODY),
    Page("read-notices", "post", "/inbox/read/", EVERYBODY, None, 302),
    Page("open-notice", "post", "/inbox/{notice}/open/", OWNER, None, 302, 404),
    Page("save-notice-preferences", "post", "/inbox/preferences/", EVERYBODY, {"digest_at": "08:00"}, 302),
    Page(
        "save-notice-webhook", "post", "/inbox/channels/slack/", EVERYBODY, {"url": "https://a.example/"}, 302
    ),
    Page("test-notice", "post", "/inbox/channels/desktop/test/", EVERYBODY, None, 302),
    Page("retry-delivery", "post", "/inbox/deliveries/{delivery}/retry/", OWNER, None, 302, 302, 302),
    Page("launch", "get", "/launch/", EVERYBODY),
    Page("launch", "post", "/launch/", EVERYBODY, {"name": "incomplete"}, 400, writes=False),
    Page("launch-check", "post", "/launch/check/", EVERYBODY, {"name": "incomplete"}, writes=False),
    Page(
        "launch-alternatives",
        "post",
        "/launch/alternatives/",
        EVERYBODY,
        {"name": "incomplete"},
        writes=False,
    ),
    Page("plans", "get", "/plan/", EVERYBODY),
    Page("plan", "get", "/plan/{plan}/", INSIDE),
    Page("plan-program", "get", "/plan/programs/train_pipeline.py", EVERYBODY),
    # no scheduler answers here
    Page("create-plan", "post", "/plan/new/", EVERYBODY, {"plan-nodes": "1"}, 400, writes=False),
    Page("create-profile", "post", "/plan/profiles/", EVERYBODY, {"new-name": "x"}, 400, writes=False),
    Page("delete-profile", "post", "/plan/profiles/{profile}/delete/", WORKERS, None, 302, denied=302),
    Page("jobs", "get", "/jobs/", EVERYBODY),
    Page("jobs-csv", "get", "/jobs/jobs.csv", EVERYBODY),
    Page("jobs-bulk", "post", "/jobs/bulk/", CONTROLLERS, BULK_HOLD, 200, 200, 200),
    Page("save-job-view", "post", "/jobs/views/", EVERYBODY, {"name": "new", "query": "?q=a"}, 302),
    Page("delete-job-view", "post", "/jobs/views/{job_view}/delete/", CONTROLLERS, None, 302, denied=302),
    Page("job", "get", "/jobs/{running}/", INSIDE),
    Page("job-logs", "get", "/jobs/{running}/logs/", INSIDE),
    Page("job-logs", "get", "/jobs/{running_workspace}/logs/", OWNER | ADMIN),
    Page("job-log-lines", "get", "/jobs/{running}/logs/lines/?rank=1", INSIDE),
    Page("job-log-search", "get", "/jobs/{running}/logs/search/?rank=1&q=o", INSIDE),
    Page("job-log-download", "get", "/jobs/{running}/logs/download/?rank=1", INSIDE),
    Page("job-scheduling", "get", "/jobs/{running}/scheduling/", INSIDE),
    Page("job-audit", "get", "/jobs/{running}/audit/", CONTROLLERS),
    Page("job-files", "get", "/jobs/{running}/files/", OWNER | MANAGERS),
    Page("job-files", "get", "/jobs/{running_workspace}/files/", OWNER | ADMIN),
    Page("job-files-list", "get", "/jobs/{running}/files/list/", OWNER | MANAGERS),
    # the job has no such directory
    Page("job-file", "get", "/jobs/{running}/files/content/?path=/x", OWNER | MANAGERS, status=404),
    Page("job-file-image", "get", "/jobs/{running}/files/image/?path=/x", OWNER | MANAGERS, status=404),
    Page("job-terminal", "get", "/jobs/{running}/terminal/", OWNER),
    # its ranks are not up yet
    Page("job-terminal-open", "post", "/jobs/{running}/terminals/", OWNER, None, 409, writes=False),
    Page("terminal-state", "get", "/jobs/terminals/{terminal}/", OWNER, denied=404),
    Page("job-metrics", "get", "/jobs/{running}/metrics/", INSIDE),
    Page("job-series", "get", "/jobs/{running}/metrics/series/", INSIDE),
    Page("job-ranks", "get", "/jobs/{running}/ranks/", INSIDE),
    Page("job-checkpoints", "get", "/jobs/{running}/checkpoints/", INSIDE),
    Page("checkpoint-pin", "post", "/checkpoints/{checkpoint}/pin/", CONTROLLERS, {"pinned": "1"}, 302, 302),
    Page("checkpoint-resume", "post", "/checkpoints/{checkpoint}/resume/", OWNER, None, 302, 302),
    Page("usage", "get", "/usage/", EVERYBODY),
    Page("usage-csv", "get", "/usage.csv", EVERYBODY),
    Page("help", "get", "/help/", EVERYBODY),
    Page("help-page", "get", "/help/jobs/", EVERYBODY),
    Page("help-section", "get", "/help/jobs/section/", EVERYBODY),
    Page("job-run", "get", "/jobs/{running}/run/", INSIDE),
    Page("job-rerun", "get", "/jobs/{ended}/rerun/", CONTROLLERS),
    Page("job-rerun", "post", "/jobs/{ended}/rerun/", CONTROLLERS, {}, 302, 302),
    # its event files are in the home of its owner, and no environment has TensorBoard: each is shown why not
    Page(
        "jobs-tensorboard", "post", "/jobs/tensorboard/", INSIDE, {"job": "{running}"}, 302, 302, writes=False
    ),
    Page("job-annotate", "post", "/jobs/{running}/annotate/", CONTROLLERS, {"tags": "a, b"}, 302, 302),
    Page("job-environment-file", "get", "/jobs/{running}/environment/requirements.txt", INSIDE),
    Page("job-help", "get", "/jobs/{running}/help/", INSIDE),
    # it has not failed, so the page shows a refusal
    Page("job-retry", "post", "/jobs/{ended}/retry/", CONTROLLERS, None, 302, 302, writes=False),
    Page("job-cancel", "post", "/jobs/{job}/cancel/", CONTROLLERS, None, 302),
    Page("job-hold", "post", "/jobs/{job}/hold/", CONTROLLERS, {"held": "1"}, 302),
    Page("job-change", "get", "/jobs/{job}/change/", CONTROLLERS),
    Page("job-change", "post", "/jobs/{job}/change/", CONTROLLERS, {"version": "1"}, 400, writes=False),
    Page("job-move", "post", "/jobs/{job}/move/", ADMIN, {"to": "front"}, 302, denied=302),
    Page("job-suspend", "post", "/jobs/{running}/suspend/", CONTROLLERS, None, 302),
    Page("job-resume", "post", "/jobs/{job}/resume/", CONTROLLERS, None, 409, writes=False),
    Page(
        "job-extend",
        "post",
        "/jobs/{running}/extend/",
        CONTROLLERS,
        {"extra_s": "1h"},
        302,
        302,
        writes=False,
    ),
    Page(
        "job-snooze", "post", "/jobs/{running_workspace}/snooze/", CONTROLLERS, None, 302, 302, writes=False
    ),
    Page(
        "job-exempt",
        "post",
        "/jobs/{running_workspace}/exempt/",
        CONTROLLERS,
        {"reason": "a demo"},
        302,
        302,
        writes=False,
    ),
    Page("job-signal", "post", "/jobs/{running}/signal/", CONTROLLERS, SIGNAL, 302, 302, writes=False),
    Page("job-resubmit", "post", "/jobs/{ended}/resubmit/", CONTROLLERS, None, 302),
    Page("job-open", "post", "/jobs/{running_workspace}/open/", OWNER, None, 409, writes=False),
    Page("job-notebooks", "get", "/jobs/{running_workspace}/notebooks/", OWNER),
    # it has not started
    Page(
        "job-notebooks-list", "post", "/jobs/{workspace}/notebooks/list/", OWNER, None, 302, 302, writes=False
    ),
    Page(
        "job-notebook-run", "post", "/jobs/{workspace}/notebooks/run/", OWNER, {"path": "a.ipynb"}, 302, 302
    ),
    Page("job-shares", "get", "/jobs/{workspace}/shares/", CONTROLLERS),
    Page("job-share", "post", "/jobs/{workspace}/share/", OWNER, SHARE, 302, 302),
    Page("revoke-share", "post", "/shares/{share}/revoke/", CONTROLLERS, None, 302, 404),
    Page("job-switch", "get", "/jobs/{workspace}/switch/", CONTROLLERS),
    Page("job-switch", "post", "/jobs/{workspace}/switch/", CONTROLLERS, {"gpus_per_task": "0"}, 302),
    Page("job-runs", "get", "/jobs/{running}/runs/", INSIDE),
    Page("experiments", "get", "/experiments/", EVERYBODY),
    Page("mlflow-link", "get", "/api/mlflow/", EVERYBODY, None, 302),
    Page("mlflow-project-link", "get", "/api/mlflow/{project}/", EVERYBODY, None, 302),
    Page("models", "get", "/models/", EVERYBODY),
    # there is no tracking server in this world
    Page("run-series", "get", f"/experiments/series/?project={{project}}&run={RUN}", INSIDE, None, 503),
    Page("run", "get", f"/experiments/{{project}}/{RUN}/", INSIDE, None, 503),
    Page("run-file", "get", f"/experiments/{{project}}/{RUN}/file/?path=a", INSIDE, None, 503),
    Page(
        "edit-run",
        "post",
        f"/experiments/{{project}}/{RUN}/edit/",
        WORKERS,
        {"note": "a"},
        302,
        302,
        writes=False,
    ),
    Page(
        "register-model",
        "post",
        f"/experiments/{{project}}/{RUN}/register/",
        WORKERS,
        {"path": "model", "model": "m"},
        302,
        302,
        writes=False,
    ),
    Page("change-version", "post", "/models/{project}/version/", WORKERS, VERSION, 302, 302, writes=False),
    Page("approvals", "get", "/approvals/", EVERYBODY),
    Page("make-request", "post", "/approvals/request/", EVERYBODY, {"kind": "project"}, 400, writes=False),
    Page("answer-request", "post", "/approvals/{extension}/answer/", ADMIN, {}, 302, 302, writes=False),
    Page("withdraw-request", "post", "/approvals/{extension}/withdraw/", OWNER, None, 302, 302),
    Page("request-effect", "post", "/approvals/{extension}/effect/", ADMIN, writes=False),
    Page("revoke-exemption", "post", "/approvals/exemptions/{exemption}/revoke/", MANAGERS, None, 302, 302),
    Page("services", "get", "/services/", EVERYBODY),
    Page("service", "get", "/services/{service}/", INSIDE),
    Page("open-service", "post", "/services/{service}/open/", WORKERS),
    Page("change-service", "post", "/services/{service}/change/", CONTROLLERS, {"replicas": "2"}, 302, 302),
    Page("stop-service", "post", "/services/{service}/stop/", CONTROLLERS, None, 302, 302),
    Page("start-service", "post", "/services/{service}/start/", CONTROLLERS, None, 302, 302, writes=False),
    Page(
        "cancel-service-update",
        "post",
        "/services/{service}/cancel-update/",
        CONTROLLERS,
        None,
        302,
        302,
        writes=False,
    ),
    Page("templates", "get", "/templates/", EVERYBODY),
    Page("new-template", "get", "/templates/new/", EVERYBODY),
    Page("new-template", "post", "/templates/new/", EVERYBODY, {"name": "incomplete"}, 400, writes=False),
    Page("edit-template", "get", "/templates/{template}/", EVERYBODY),
    Page(
        "edit-template",
        "post",
        "/templates/{template}/",
        EVERYBODY,
        {"name": "incomplete"},
        400,
        writes=False,
    ),
    Page("import-job", "post", "/launch/import/", EVERYBODY, {"yaml": "a: 1"}, 400, writes=False),
    Page("schedules", "get", "/schedules/", EVERYBODY),
    Page("schedule", "get", "/schedules/{schedule}/", INSIDE),
    Page("change-schedule", "post", "/schedules/{schedule}/change/", CONTROLLERS, {"enabled": "0"}, 302, 302),
    Page("delete-schedule", "post", "/schedules/{schedule}/delete/", CONTROLLERS, None, 302, 302),
    Page("sweeps", "get", "/sweeps/", EVERYBODY),
    Page("import-sweep", "get", "/sweeps/import/", EVERYBODY),
    Page("import-sweep", "post", "/sweeps/import/", EVERYBODY, {"experiment": "a: 1"}, 400, writes=False),
    Page("sweep", "get", "/sweeps/{sweep}/", INSIDE),
    Page("sweep-trials-csv", "get", "/sweeps/{sweep}/trials.csv", INSIDE),
    Page("stop-sweep", "post", "/sweeps/{sweep}/stop/", CONTROLLERS, None, 302, 302),
    Page("pause-sweep", "post", "/sweeps/{sweep}/pause/", CONTROLLERS, None, 302, 302),
    Page("resume-sweep", "post", "/sweeps/{sweep}/resume/", CONTROLLERS, None, 302, 302, writes=False),
    Page("change-sweep", "post", "/sweeps/{sweep}/change/", CONTROLLERS, {"max_parallel": "2"}, 302, 302),
    Page("queue", "get", "/queue/", EVERYBODY),
    Page("search", "get", "/search/?q=runs", EVERYBODY),
    Page("cluster", "get", "/cluster/", EVERYBODY),
    Page("network", "get", "/cluster/network/", EVERYBODY),
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
        {"version": "{policy_version}", "setting-idle_after_s": "30 min"},
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
        "/projects/{project}/secrets/shared/delete/",
        MANAGERS,
        None,
        302,
        302,
    ),
    Page("quotas", "get", "/quotas/", EVERYBODY),
    _admin("save-quotas", "/quotas/save/", writes=False),
    _admin("undo-quota", "/quotas/undo/{change}/"),
    _admin("quota-effect", "/quotas/effect/", {"pool": "main-pool"}, status=200, writes=False),
    _admin("add-quota", "/quotas/add/", {"pool": "main-pool"}, status=400, writes=False),
    _admin("end-quota-addition", "/quotas/additions/{addition}/end/"),
    Page("policy", "get", "/policy/", EVERYBODY),
    _admin("save-policy", "/policy/save/", status=400, writes=False),
    Page("users", "get", "/users/", ADMIN, hidden=403),
    _admin("invite", "/users/invite/", status=200),
    Page("confirm-user-change", "get", "/users/{person}/change/close/", ADMIN, hidden=403),
    _admin("change-user", "/users/{person}/change/", {"act": "close"}),
    Page("revoke-invitation", "post", "/invitations/{invitation}/revoke/", MANAGERS, None, 302, denied=404),
    Page("add-node", "get", "/nodes/add/", ADMIN, hidden=403),
    _admin("add-node", "/nodes/add/", status=400, writes=False),
    _admin("test-node", "/nodes/{node}/test/"),
    _admin("return-gpu-to-service", "/nodes/{node}/gpus/{gpu}/return-to-service/", writes=False),
    _admin("set-labels", "/nodes/{node}/labels/", {"labels": "rack=r1"}),
    _admin("set-interface", "/nodes/{node}/interface/", {"interface": "eth7"}, writes=False),
    _admin("set-pool-network", "/pools/{pool}/network/", {"allow_host_network": "on"}),
    Page("calendar", "get", "/calendar/", EVERYBODY),
    _admin("save-reservation", "/calendar/save/", status=400, writes=False),
    _admin("cancel-reservation", "/calendar/{reservation}/cancel/"),
    _admin("restore-reservation", "/calendar/{reservation}/restore/", writes=False),
    Page("topologies", "get", "/topologies/", EVERYBODY),
    _admin("save-topology", "/topologies/save/", {"name": "fabric", "levels": "rack"}),
    _admin("remove-topology", "/topologies/hall/remove/"),
    # no signed agent is at hand here
    _admin("start-node-operation", "/nodes/{node}/operations/", {"act": "preflight"}),
    _admin("upgrade-all", "/rollouts/start/", writes=False),
    Page("rollout", "get", "/rollouts/{rollout}/", ADMIN, hidden=403),
    _admin("set-node-state", "/nodes/{node}/state/", {"act": "cordon", "reason": "a fan"}),
    Page("node-operation", "get", "/nodes/{node}/operations/{check}/", ADMIN, hidden=403),
    Page("volumes", "get", "/volumes/", EVERYBODY),
    _admin("save-volume", "/volumes/save/", status=400, writes=False),
    _admin("remove-volume", "/volumes/team/remove/"),
    Page("failure-rules", "get", "/failure-rules/", ADMIN, hidden=403),
    _admin("save-failure-rule", "/failure-rules/save/", status=400, writes=False),
    _admin("enable-failure-rule", "/failure-rules/disk_full/enable/", {"enabled": "0"}),
    _admin("remove-failure-rule", "/failure-rules/{rule}/remove/"),
    Page("announcements", "get", "/announcements/", ADMIN, hidden=403),
    _admin("announce", "/announcements/write/", status=400, writes=False),
    _admin("withdraw-announcement", "/announcements/{announcement}/withdraw/"),
    Page("registries", "get", "/registries/", ADMIN, hidden=403),
    _admin("save-registry", "/registries/save/", status=400, writes=False),
    _admin("remove-registry", "/registries/{registry}/remove/"),
    Page("recovery", "get", "/recovery/", ADMIN, hidden=403),
    # nothing was restored in this world
    Page("recovery-fence", "get", "/recovery/nodes/{node}/fence/", ADMIN, hidden=403),
    Page("recovery-adopt", "get", "/recovery/{container}/adopt/", ADMIN, hidden=403),
    Page("recovery-stop", "get", "/recovery/{container}/stop/", ADMIN, hidden=403),
    _admin("recovery-fence", "/recovery/nodes/{node}/fence/", status=400, writes=False),
    _admin("recovery-adopt", "/recovery/{container}/adopt/", status=409, writes=False),
    _admin("recovery-stop", "/recovery/{container}/stop/", status=409, writes=False),
    Page("environments", "get", "/environments/", EVERYBODY),
    _admin("add-environment", "/environments/add/", status=400, writes=False),
    Page("environment", "get", "/environments/{lab}/", EVERYBODY),
    _admin("save-environment", "/environments/{lab}/save/", status=400, writes=False),
    _admin("change-image", "/environments/{lab}/image/", {"act": "update"}, writes=False),
    _admin("prefetch-image", "/environments/{lab}/prefetch/"),
    _admin("cancel-prefetch", "/environments/{lab}/prefetch/cancel/"),
    Page("scheduler", "get", "/scheduler/", ADMIN, hidden=403),
    _admin("failed-cycle", "/scheduler/failed/{failed}/", status=200),
    Page("alerts", "get", "/alerts/", ADMIN, hidden=403),
    _admin("acknowledge-alert", "/alerts/{alert}/acknowledge/", {"note": "reset it"}),
    _admin("acknowledge-invalid-row", "/alerts/rows/{invalid_row}/acknowledge/", {"note": "mine"}),
    Page("audit", "get", "/audit/", ADMIN, hidden=403),
    Page("api-docs", "get", "/api/docs/", EVERYBODY),
    Page("api-docs-start", "get", "/api/docs/start.js", EVERYBODY),
]

PUBLIC = frozenset({"sign-in", "sign-in-link", "sign-out", "invitation", "healthz", "readyz"})
"""Open to everybody; what they do is in tests/web/test_signin.py and tests/api/test_health.py."""
