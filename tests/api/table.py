"""Every operation of the API: how to call it in the world, and who may."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from portal.services.accounts.tokens import Scope
from tests.api.fixture_data import ACTORS, BROWSER

NOBODY = frozenset({"anonymous", "deactivated"})
OUTSIDE = frozenset({"stranger", "former"})
EVERYBODY = frozenset(ACTORS) - NOBODY
INSIDE = EVERYBODY - OUTSIDE
WORKERS = frozenset({"member", "colleague", "manager", "admin"})
CONTROLLERS = frozenset({"member", "manager", "admin"})
MANAGERS = frozenset({"manager", "admin"})
ADMIN = frozenset({"admin"})
OWNER = frozenset({"member"})
JOINERS = OUTSIDE | {"viewer"}

READ, JOBS, WORKSPACES, SSH, PROJECTS, QUOTAS, REQUESTS, METRICS, TOKENS = (
    frozenset({scope})
    for scope in (
        Scope.READ,
        Scope.JOBS,
        Scope.WORKSPACES,
        Scope.SSH,
        Scope.PROJECTS,
        Scope.QUOTAS,
        Scope.REQUESTS,
        Scope.METRICS,
        Scope.TOKENS,
    )
)
BY_KIND = JOBS | WORKSPACES
"""An act on a job: ``workspaces`` for a workspace, ``jobs`` for any other."""

JOB = {"name": "more", "project": "vision", "environment": "batch", "command": ["true"]}
LAB = {"name": "more", "project": "vision", "environment": "lab"}
SERVICE = {"job": {**JOB, "name": "served", "command": ["serve"]}, "readiness_path": "/health"}
SCHEDULE = {"job": JOB, "cron": "0 6 * * *", "time_zone": "Europe/Berlin"}
SWEEP = {
    "job": {**JOB, "command": ["train", "{lr}"]},
    "searcher": "grid",
    "parameters": {"lr": [0.1, 0.2]},
}
EXPERIMENT = {
    "experiment": "name: e\nentrypoint: train.py\nsearcher: {name: single, metric: loss}",
    "project": "vision",
    "environment": "batch",
}
TEMPLATE = {
    "name": "train",
    "title": "Train",
    "fields": {"command": ["train", "{lr}"]},
    "parameters": [{"name": "lr", "type": "number", "default": 0.1}],
}
SHARE = {"user": "colleague-x", "access": "edit", "duration_s": 3600}
HOOK = {"project": "vision", "channel": "slack", "url": "https://a.example/x", "events": ["job_failed"]}
SAVE = {"name": "torch-and-more", "purpose": "Vision."}
REPORTS = {"reports": [{"step": 2, "value": 0.25}]}
LENT = {
    "allow_host_network": True,
    "fabric_interface": "10.9.0.0/16",
    "fabric_devices": ["/dev/infiniband/uverbs*"],
}
KEEP = {
    "name": "course",
    "pool": "main-pool",
    "count": 1,
    "projects": ["vision"],
    "starts_at": "2027-11-06T08:00:00Z",
    "ends_at": "2027-11-06T12:00:00Z",
}
LEVELS = {"name": "fabric", "levels": ["block", "rack"]}
VOLUME = {
    "name": "sets",
    "kind": "host_path",
    "path": "/data/sets",
    "read_only": True,
    "nodes": ["node-one"],
    "projects": ["vision"],
}
NEW_KEY = {"fingerprint": f"SHA256:{'A' * 43}", "reason": "a new disk"}
PROFILE = {"project": "vision", "name": "mlp", "profile": {"nodes": []}}
PLAN = {"profile": "mlp", "gpus_per_node": 2, "node_bandwidth": 1e10}
VALUE = {"value": "never shown"}
ANNOUNCEMENT = {
    "message": "The cluster is upgraded on Friday.",
    "ends_at": (dt.datetime.now(dt.UTC) + dt.timedelta(days=2)).isoformat(),
}
LOGIN = {"host": "registry.example.org:5000", "username": "fairway", "password": "never shown"}
RULE = {"title": "No licence", "cause": "c.", "fix": "f.", "pattern": "license server"}
SETTINGS = {"settings": {"usage_weight": 0.5, "usage_half_life_s": None}}
IDLE_SETTINGS = {"settings": {"idle_after_s": 1800, "idle_snooze_limit": None}}
JOIN = {"kind": "project", "project": "vision", "role": "member", "reason": "a paper"}
MORE = {"kind": "quota", "project": "vision", "pool": "main-pool", "extra_milli": 2000, "reason": "a paper"}
EFFECT = {"quotas": [{"project": "vision", "pool": "main-pool", "guaranteed_milli": 4000}]}
NUMBERS = {"guaranteed_milli": 1000, "limit_milli": 4000, "weight": 2.0, "priority": 1}


@dataclass(frozen=True)
class Row:
    """One operation. ``denied`` is what an insider without the right gets, ``hidden`` what an outsider gets."""

    name: str
    method: str
    path: str
    allowed: frozenset[str]
    body: Any = None
    status: int = 200
    denied: int = 403
    hidden: int = 404
    if_match: bool | str = False  # True: the ETag of the world's quota
    scope: frozenset[Scope] | None = None

    def expected(self, actor: str) -> int:
        """The status the actor gets."""
        if actor in NOBODY:
            return 401
        if actor in self.allowed:
            return self.status
        return self.hidden if actor in OUTSIDE else self.denied

    @property
    def scopes(self) -> frozenset[Scope]:
        """What a token needs where it is not ``admin``: to read, what is not for administrators alone, ``read``."""
        reads = self.method == "get" and self.allowed != ADMIN
        return self.scope or (READ if reads else frozenset({Scope.ADMIN}))


ROWS = [
    Row("me", "get", "me/", EVERYBODY),
    Row("tokens_list", "get", "tokens/", EVERYBODY),
    Row(
        "tokens_create",
        "post",
        "tokens/",
        EVERYBODY,
        {"name": "new", "scopes": ["tokens"]},
        201,
        scope=TOKENS,
    ),
    Row("tokens_revoke", "delete", "tokens/{token}/", OWNER, status=204, denied=404, scope=TOKENS),
    Row("projects_list", "get", "projects/", EVERYBODY),
    Row(
        "projects_create", "post", "projects/", ADMIN, {"name": "brand-new"}, 201, hidden=403, scope=PROJECTS
    ),
    Row("projects_get", "get", "projects/{project}/", INSIDE),
    Row("projects_change", "patch", "projects/{project}/", MANAGERS, {"title": "Seeing"}, scope=PROJECTS),
    Row("members_list", "get", "projects/{project}/members/", INSIDE),
    Row(
        "members_put",
        "put",
        "projects/{project}/members/{newcomer}/",
        MANAGERS,
        {"role": "viewer"},
        scope=PROJECTS,
    ),
    Row(
        "members_delete",
        "delete",
        "projects/{project}/members/{colleague}/",
        MANAGERS,
        status=204,
        scope=PROJECTS,
    ),
    Row("project_quotas_list", "get", "projects/{project}/quotas/", INSIDE),
    Row("project_quota_get", "get", "projects/{project}/quotas/{pool}/", INSIDE),
    Row(
        "project_quota_put",
        "put",
        "projects/{project}/quotas/{pool}/",
        ADMIN,
        NUMBERS,
        if_match=True,
        scope=QUOTAS,
    ),
    Row(
        "project_quota_patch",
        "patch",
        "projects/{project}/quotas/{pool}/",
        ADMIN,
        {"weight": 3},
        if_match=True,
        scope=QUOTAS,
    ),
    Row("quotas_list", "get", "quotas/", EVERYBODY),
    Row("quotas_get", "get", "quotas/{quota}/", INSIDE),
    Row("quotas_put", "put", "quotas/{quota}/", ADMIN, NUMBERS, if_match=True, scope=QUOTAS),
    Row("quotas_patch", "patch", "quotas/{quota}/", ADMIN, {"weight": 3}, if_match=True, scope=QUOTAS),
    Row("quota_changes", "get", "quotas/{quota}/changes/", INSIDE),
    Row("policy_get", "get", "policy/", EVERYBODY),
    Row("policy_change", "patch", "policy/", ADMIN, SETTINGS, if_match="*", hidden=403),
    Row("pool_policy_get", "get", "pools/{pool}/policy/", EVERYBODY),
    Row("pool_policy_change", "patch", "pools/{pool}/policy/", ADMIN, SETTINGS, if_match="*", hidden=403),
    Row("project_policy_get", "get", "projects/{project}/policy/", INSIDE),
    Row(
        "project_policy_change",
        "patch",
        "projects/{project}/policy/",
        MANAGERS,
        IDLE_SETTINGS,
        if_match="*",
        scope=PROJECTS,
    ),
    Row("alerts_list", "get", "alerts/", ADMIN, hidden=403),
    Row("invalid_rows_list", "get", "scheduler/invalid-rows/", ADMIN, hidden=403),
    Row(
        "invalid_rows_acknowledge",
        "post",
        "scheduler/invalid-rows/{invalid_row}/acknowledge/",
        ADMIN,
        {"note": "corrected"},
        hidden=403,
    ),
    Row("alerts_acknowledge", "post", "alerts/{alert}/acknowledge/", ADMIN, {"note": "reset it"}, hidden=403),
    Row("quota_undo", "post", "quotas/{quota}/undo/", ADMIN, {}, if_match=True, scope=QUOTAS),
    Row("jobs_list", "get", "jobs/", EVERYBODY),
    Row("jobs_submit", "post", "jobs/", WORKERS, JOB, 201, hidden=422, scope=JOBS),
    Row("jobs_get", "get", "jobs/{running}/", INSIDE),
    # its ranks are not up yet; one that is sent is in tests/scheduler/test_node_operations.py
    Row(
        "jobs_signal",
        "post",
        "jobs/{running}/signal/",
        CONTROLLERS,
        {"signal": "SIGUSR1"},
        409,
        scope=BY_KIND,
    ),
    Row("jobs_change", "patch", "jobs/{job}/", CONTROLLERS, {"time_limit_s": 60}, scope=BY_KIND),
    Row("jobs_alternatives", "get", "jobs/{job}/alternatives/", CONTROLLERS, scope=READ),
    Row(
        "jobs_preview_change",
        "post",
        "jobs/{job}/preview-change/",
        CONTROLLERS,
        {"priority": -1},
        scope=BY_KIND,
    ),
    Row("jobs_move", "post", "jobs/{job}/move/", ADMIN, {"to": "front"}, scope=BY_KIND),
    Row("jobs_bulk", "post", "jobs/bulk/", INSIDE, {"action": "hold", "jobs": ["{job}"]}, scope=BY_KIND),
    Row("job_views_list", "get", "job-views/", EVERYBODY),
    Row("job_views_save", "post", "job-views/", EVERYBODY, {"name": "new", "query": "?q=a"}, 201, scope=JOBS),
    Row("job_views_delete", "delete", "job-views/{job_view}/", CONTROLLERS, None, 204, scope=JOBS),
    Row("bulk_operations_get", "get", "bulk-operations/{bulk_operation}/", OWNER | {"former"}, denied=404),
    Row("jobs_cancel", "post", "jobs/{job}/cancel/", CONTROLLERS, {}, scope=BY_KIND),
    Row("jobs_hold", "post", "jobs/{job}/hold/", CONTROLLERS, {}, scope=BY_KIND),
    Row("jobs_release", "post", "jobs/{job}/release/", CONTROLLERS, {}, scope=BY_KIND),
    Row(
        "jobs_restart_elsewhere",
        "post",
        "jobs/{running}/restart-elsewhere/",
        CONTROLLERS,
        {"rank": 0},
        scope=BY_KIND,
    ),
    # it has reported no checkpoint
    Row(
        "jobs_check_checkpoints",
        "post",
        "jobs/{running}/check-checkpoints/",
        CONTROLLERS,
        {},
        409,
        scope=BY_KIND,
    ),
    Row("jobs_suspend", "post", "jobs/{running}/suspend/", CONTROLLERS, {}, scope=BY_KIND),
    Row("jobs_resume", "post", "jobs/{job}/resume/", CONTROLLERS, {}, 409, scope=BY_KIND),
    # neither runs on a GPU; the acts themselves are in tests/scheduler/test_idle_pass.py
    Row("jobs_snooze", "post", "jobs/{job}/snooze/", CONTROLLERS, {}, 409, scope=BY_KIND),
    Row(
        "jobs_idle_exemption",
        "post",
        "jobs/{job}/idle-exemption/",
        CONTROLLERS,
        {"reason": "a demo at noon"},
        409,
        scope=BY_KIND,
    ),
    Row("idle_exemptions_list", "get", "idle-exemptions/", EVERYBODY),
    Row(
        "idle_exemptions_revoke",
        "post",
        "idle-exemptions/{exemption}/revoke/",
        MANAGERS,
        {},
        scope=WORKSPACES,
    ),
    Row("jobs_extend", "post", "jobs/{running}/extend/", CONTROLLERS, {"extra_s": 3600}, 409, scope=BY_KIND),
    Row("requests_list", "get", "requests/", EVERYBODY),
    Row("requests_get", "get", "requests/{extension}/", INSIDE),
    Row("requests_get", "get", "requests/{quota_request}/", CONTROLLERS, denied=404),
    Row("requests_create", "post", "requests/", JOINERS, JOIN, 201, denied=422, scope=REQUESTS),
    # no scheduler answers here
    Row("requests_create", "post", "requests/", WORKERS, MORE, 201, hidden=422, scope=REQUESTS),
    # its job does not run yet; that managers decide where only their own are delayed is in test_time_limits
    Row("requests_approve", "post", "requests/{extension}/approve/", ADMIN, {}, 409, scope=REQUESTS),
    Row("requests_deny", "post", "requests/{extension}/deny/", ADMIN, {"answer": "no"}, 409, scope=REQUESTS),
    Row("requests_withdraw", "post", "requests/{extension}/withdraw/", OWNER, {}, scope=REQUESTS),
    Row("quotas_replay", "post", "quotas/replays/", ADMIN, EFFECT, 202, hidden=403, scope=READ),
    Row("quotas_replay_get", "get", "quotas/replays/{replay}/", ADMIN, denied=404, scope=READ),
    Row("requests_replay", "post", "requests/{extension}/replay/", ADMIN, {}, 409, scope=REQUESTS),
    Row("quotas_effect", "post", "quotas/effect/", ADMIN, EFFECT, 503, hidden=403, scope=READ),
    Row("quota_additions_list", "get", "quota-additions/", EVERYBODY),
    Row(
        "project_quota_additions_create",
        "post",
        "projects/{project}/quotas/{pool}/additions/",
        ADMIN,
        {"extra_milli": 1000, "ends_at": "2027-03-01T08:00:00Z"},
        201,
        hidden=403,
        scope=QUOTAS,
    ),
    Row(
        "quota_additions_end", "post", "quota-additions/{addition}/end/", ADMIN, {}, hidden=403, scope=QUOTAS
    ),
    Row("jobs_resubmit", "post", "jobs/{ended}/resubmit/", CONTROLLERS, {}, 201, scope=BY_KIND),
    # it was cancelled, so there is no failure to fix
    Row("jobs_retry", "post", "jobs/{ended}/retry/", CONTROLLERS, {}, 409, scope=BY_KIND),
    Row("jobs_support_text", "get", "jobs/{running}/support-text/", INSIDE),
    Row("jobs_reports", "get", "jobs/{running}/reports/", INSIDE),
    Row("jobs_report", "post", "jobs/{running}/reports/", CONTROLLERS, REPORTS, scope=JOBS),
    Row("services_list", "get", "services/", EVERYBODY),
    Row("services_deploy", "post", "services/", WORKERS, SERVICE, 201, hidden=422, scope=JOBS),
    Row("services_get", "get", "services/{service}/", INSIDE),
    Row("services_change", "patch", "services/{service}/", CONTROLLERS, {"replicas": 2}, scope=JOBS),
    Row("services_versions", "get", "services/{service}/versions/", INSIDE),
    Row("services_update", "post", "services/{service}/versions/", OWNER, {"port": 80}, scope=JOBS),
    Row("services_replicas", "get", "services/{service}/replicas/", INSIDE),
    Row("services_stop", "post", "services/{service}/stop/", CONTROLLERS, {}, scope=JOBS),
    Row("services_start", "post", "services/{service}/start/", CONTROLLERS, {}, 409, scope=JOBS),
    Row(
        "services_cancel_update",
        "post",
        "services/{service}/cancel-update/",
        CONTROLLERS,
        {},
        409,
        scope=JOBS,
    ),
    Row("jobs_spec", "get", "jobs/{job}/spec.yaml", INSIDE),
    Row("jobs_kubernetes", "get", "jobs/{job}/kubernetes.yaml", INSIDE),
    Row("schedules_list", "get", "schedules/", EVERYBODY),
    Row("schedules_create", "post", "schedules/", WORKERS, SCHEDULE, 201, hidden=422, scope=JOBS),
    Row("schedules_get", "get", "schedules/{schedule}/", INSIDE),
    Row("schedules_change", "patch", "schedules/{schedule}/", CONTROLLERS, {"overlap": "allow"}, scope=JOBS),
    Row("schedules_delete", "delete", "schedules/{schedule}/", CONTROLLERS, None, 204, scope=JOBS),
    Row("schedules_runs", "get", "schedules/{schedule}/runs/", INSIDE),
    Row("sweeps_list", "get", "sweeps/", EVERYBODY),
    Row("sweeps_create", "post", "sweeps/", WORKERS, SWEEP, 201, hidden=422, scope=JOBS),
    Row("sweeps_import", "post", "sweeps/import/", WORKERS, EXPERIMENT, 201, hidden=422, scope=JOBS),
    Row("sweeps_get", "get", "sweeps/{sweep}/", INSIDE),
    Row("sweeps_change", "patch", "sweeps/{sweep}/", CONTROLLERS, {"max_parallel": 2}, scope=JOBS),
    Row("sweeps_trials", "get", "sweeps/{sweep}/trials/", INSIDE),
    Row("sweeps_stop", "post", "sweeps/{sweep}/stop/", CONTROLLERS, {}, scope=JOBS),
    Row("sweeps_pause", "post", "sweeps/{sweep}/pause/", CONTROLLERS, {}, scope=JOBS),
    Row("sweeps_resume", "post", "sweeps/{sweep}/resume/", CONTROLLERS, {}, 409, scope=JOBS),
    Row("sweeps_stop_trial", "post", "sweeps/{sweep}/trials/stop/", CONTROLLERS, {"number": 0}, scope=JOBS),
    # it is running
    Row(
        "sweeps_resume_trial",
        "post",
        "sweeps/{sweep}/trials/resume/",
        CONTROLLERS,
        {"number": 0},
        409,
        scope=JOBS,
    ),
    Row(
        "sweeps_repeat_trial",
        "post",
        "sweeps/{sweep}/trials/repeat/",
        CONTROLLERS,
        {"number": 0},
        409,
        scope=JOBS,
    ),
    Row("jobs_environment", "get", "jobs/{running}/environment/", INSIDE),
    Row("jobs_rerun", "post", "jobs/{ended}/rerun/", CONTROLLERS, {"dry_run": True}, scope=BY_KIND),
    # its event files are in the home of its owner, and no environment has TensorBoard
    Row("jobs_tensorboard", "post", "jobs/{ended}/tensorboard/", OWNER, {}, 409, scope=WORKSPACES),
    Row("jobs_annotate", "post", "jobs/{running}/annotate/", CONTROLLERS, {"tags": ["a"]}, scope=BY_KIND),
    Row("jobs_ranks", "get", "jobs/{running}/ranks/", INSIDE),
    Row("jobs_checkpoints", "get", "jobs/{running}/checkpoints/", INSIDE),
    Row("checkpoints_pin", "post", "checkpoints/{checkpoint}/pin/", CONTROLLERS, {}, scope=JOBS),
    Row("checkpoints_unpin", "post", "checkpoints/{checkpoint}/unpin/", CONTROLLERS, {}, scope=JOBS),
    # it is in the home of its owner
    Row("checkpoints_resume", "post", "checkpoints/{checkpoint}/resume/", OWNER, {}, 201, scope=JOBS),
    Row("jobs_events", "get", "jobs/{running}/events/", INSIDE),
    # its ranks are not up yet
    Row("jobs_ssh", "post", "jobs/{running}/ssh/", OWNER, {}, 409, scope=SSH),
    Row("jobs_launch", "get", "jobs/{running}/launch/?attempt=1", CONTROLLERS),
    Row("launchers_list", "get", "launchers/", EVERYBODY),
    Row("jobs_logs", "get", "jobs/{running}/logs/?rank=1", INSIDE),
    Row("jobs_log_search", "get", "jobs/{running}/logs/search/?q=o&rank=1", INSIDE),
    Row("jobs_log_file", "get", "jobs/{running}/logs/download/?rank=1", INSIDE),
    Row("jobs_files", "get", "jobs/{running}/files/", OWNER | MANAGERS),
    # the job has no such directory
    Row("jobs_file", "get", "jobs/{running}/files/content/?path=/x", OWNER | MANAGERS, None, 404),
    Row(
        "jobs_file_write",
        "put",
        "jobs/{running}/files/content/?path=/x",
        OWNER,
        None,
        404,
        scope=BY_KIND,
    ),
    Row("jobs_files_delete", "delete", "jobs/{running}/files/?path=/x", OWNER, None, 404, scope=BY_KIND),
    Row(
        "jobs_directories_create",
        "post",
        "jobs/{running}/files/directories/",
        OWNER,
        {"path": "/x"},
        404,
        scope=BY_KIND,
    ),
    Row("project_code_upload", "post", "projects/vision/code/", WORKERS, None, 422, hidden=404, scope=JOBS),
    Row("jobs_file_archive", "get", "jobs/{running}/files/archive/?path=/x", OWNER | MANAGERS, None, 404),
    Row("workspaces_list", "get", "workspaces/", EVERYBODY),
    Row("workspaces_launch", "post", "workspaces/", WORKERS, LAB, 201, hidden=422, scope=WORKSPACES),
    Row("workspaces_get", "get", "workspaces/{workspace}/", INSIDE),
    # nobody may enter another person's workspace, not even an admin; the owner's is not ready yet
    Row("workspaces_open", "post", "workspaces/{workspace}/open/", OWNER, {}, 409, scope=WORKSPACES),
    Row("jobs_saved_environments", "get", "jobs/{running}/saved-environments/", INSIDE),
    # its ranks are not up yet
    Row(
        "jobs_save_environment",
        "post",
        "jobs/{running}/save-environment/",
        CONTROLLERS,
        SAVE,
        409,
        scope=BY_KIND,
    ),
    Row(
        "saved_environments_delete",
        "post",
        "saved-environments/{saved}/delete/",
        OWNER | ADMIN,
        {},
        denied=404,
        scope=JOBS,
    ),
    Row("workspaces_notebooks", "get", "workspaces/{workspace}/notebooks/", OWNER),
    # it has not started
    Row(
        "workspaces_list_notebooks",
        "post",
        "workspaces/{workspace}/notebooks/",
        OWNER,
        {},
        409,
        scope=WORKSPACES,
    ),
    Row(
        "workspaces_notebook_template",
        "post",
        "workspaces/{workspace}/notebook-template/",
        OWNER,
        {"path": "a.ipynb"},
        201,
        scope=WORKSPACES,
    ),
    Row("workspace_shares_list", "get", "workspaces/{workspace}/shares/", CONTROLLERS),
    Row("workspaces_share", "post", "workspaces/{workspace}/share/", OWNER, SHARE, 201, scope=WORKSPACES),
    Row(
        "workspace_shares_revoke",
        "post",
        "workspace-shares/{share}/revoke/",
        CONTROLLERS,
        {},
        denied=404,
        scope=WORKSPACES,
    ),
    Row(
        "workspaces_switch",
        "post",
        "workspaces/{workspace}/switch/",
        CONTROLLERS,
        {"gpus_per_task": 0},
        scope=WORKSPACES,
    ),
    Row("workspaces_stop", "post", "workspaces/{workspace}/stop/", CONTROLLERS, {}, scope=WORKSPACES),
    Row(
        "workspaces_resubmit",
        "post",
        "workspaces/{ended_workspace}/resubmit/",
        OWNER,
        {},
        201,
        scope=WORKSPACES,
    ),
    Row("queue", "get", "queue/", EVERYBODY),
    Row("jobs_preview", "post", "jobs/preview/", WORKERS, JOB, hidden=422, scope=READ),
    Row(
        "jobs_preview_alternatives",
        "post",
        "jobs/preview/alternatives/",
        WORKERS,
        JOB,
        hidden=422,
        scope=READ,
    ),
    Row("profiles_list", "get", "profiles/", EVERYBODY),
    # no scheduler answers here
    Row("profiles_create", "post", "profiles/", WORKERS, PROFILE, 503, hidden=422, scope=JOBS),
    Row("profiles_get", "get", "profiles/{profile}/", INSIDE),
    Row("profiles_delete", "delete", "profiles/{profile}/", WORKERS, status=204, scope=JOBS),
    Row("plans_list", "get", "plans/", EVERYBODY),
    Row("plans_create", "post", "plans/", WORKERS, PLAN, 503, hidden=422, scope=JOBS),
    Row("plans_get", "get", "plans/{plan}/", INSIDE),
    Row("pools_list", "get", "pools/", EVERYBODY),
    Row("pools_get", "get", "pools/{pool}/", EVERYBODY),
    Row("nodes_list", "get", "nodes/", EVERYBODY),
    Row("nodes_get", "get", "nodes/{node}/", EVERYBODY),
    Row("node_links_list", "get", "node-links/", EVERYBODY),
    Row("nodes_cordon", "post", "nodes/{node}/cordon/", ADMIN, {"reason": "a fan"}, hidden=403),
    # it has never answered; it answers; it runs something; a second of these is in test_node_acts
    Row("nodes_uncordon", "post", "nodes/{node}/uncordon/", ADMIN, {}, 409, hidden=403),
    Row(
        "nodes_clear_quarantine",
        "post",
        "nodes/{node}/clear-quarantine/",
        ADMIN,
        {"reason": "new cable"},
        hidden=403,
    ),
    Row("nodes_fence", "post", "nodes/{node}/fence/", ADMIN, {"reason": "off"}, 409, hidden=403),
    Row("nodes_retire", "post", "nodes/{node}/retire/", ADMIN, {}, 409, hidden=403),
    Row("nodes_drain_get", "get", "nodes/{node}/drain-jobs/", ADMIN, hidden=403),
    Row("nodes_drain", "post", "nodes/{node}/drain/", ADMIN, {"jobs": "wait"}, hidden=403),
    Row("nodes_labels_put", "put", "nodes/{node}/labels/", ADMIN, {"labels": {"rack": "r1"}}, hidden=403),
    Row("pools_network_put", "put", "pools/{pool}/network/", ADMIN, LENT, hidden=403),
    Row("nodes_interface_put", "put", "nodes/{node}/interface/", ADMIN, {"interface": ""}, hidden=403),
    Row("reservations_list", "get", "reservations/", EVERYBODY),
    Row("reservations_create", "post", "reservations/", ADMIN, KEEP, 201, hidden=403),
    Row("reservations_get", "get", "reservations/{reservation}/", EVERYBODY),
    Row(
        "reservations_change",
        "patch",
        "reservations/{reservation}/",
        ADMIN,
        {"name": "other"},
        if_match="*",
        hidden=403,
    ),
    Row("reservations_cancel", "delete", "reservations/{reservation}/", ADMIN, status=204, hidden=403),
    Row("reservations_restore", "post", "reservations/{reservation}/restore/", ADMIN, {}, hidden=403),
    Row("notices_list", "get", "notices/", EVERYBODY),
    Row("notices_read", "post", "notices/{notice}/read/", OWNER, {}, denied=404),
    Row("notices_read_all", "post", "notices/read/", EVERYBODY, {}),
    Row("notices_preferences", "get", "notices/preferences/", EVERYBODY),
    Row(
        "notices_set_preferences",
        "put",
        "notices/preferences/",
        EVERYBODY,
        {"channels": {"job_started": ["inbox", "digest"]}, "quiet_start": "22:00", "quiet_end": "07:00"},
    ),
    Row("notices_webhooks_list", "get", "notices/webhooks/", EVERYBODY),
    Row("notices_set_webhook", "put", "notices/webhooks/slack/", EVERYBODY, {"url": "https://a.example/x"}),
    Row("notices_remove_webhook", "delete", "notices/webhooks/webhook/", OWNER, status=204, denied=404),
    Row("notices_test", "post", "notices/channels/desktop/test/", EVERYBODY, {}, 201),
    Row("notices_deliveries_list", "get", "notices/deliveries/", EVERYBODY),
    Row("notices_retry", "post", "notices/deliveries/{delivery}/retry/", OWNER, {}, 204, denied=404),
    Row("notices_browsers_list", "get", "notices/browsers/", EVERYBODY),
    Row("notices_push_key", "get", "notices/browsers/key/", EVERYBODY),
    Row("notices_subscribe_browser", "post", "notices/browsers/", EVERYBODY, BROWSER, 201),
    Row(
        "notices_unsubscribe_browser", "delete", "notices/browsers/{browser}/", OWNER, status=204, denied=404
    ),
    Row("webhooks_list", "get", "webhooks/", EVERYBODY),
    Row("webhooks_set", "post", "webhooks/", MANAGERS, HOOK, 201, scope=PROJECTS),
    Row("webhooks_test", "post", "webhooks/{hook}/test/", MANAGERS, {}, 201, denied=404, scope=PROJECTS),
    Row("webhooks_deliveries", "get", "webhooks/{hook}/deliveries/", MANAGERS, denied=404),
    Row("webhooks_remove", "delete", "webhooks/{hook}/", MANAGERS, status=204, denied=404, scope=PROJECTS),
    Row("secrets_list", "get", "secrets/", EVERYBODY),
    Row("secrets_put", "put", "secrets/hub-token/", EVERYBODY, VALUE),
    Row("secrets_remove", "delete", "secrets/own/", OWNER, status=204, denied=404),
    Row("project_secrets_list", "get", "projects/{project}/secrets/", WORKERS),
    Row(
        "project_secrets_put", "put", "projects/{project}/secrets/hub-token/", MANAGERS, VALUE, scope=PROJECTS
    ),
    Row(
        "project_secrets_remove",
        "delete",
        "projects/{project}/secrets/shared/",
        MANAGERS,
        status=204,
        scope=PROJECTS,
    ),
    Row("storage_usage_list", "get", "storage-usage/", EVERYBODY),
    Row("volumes_list", "get", "volumes/", EVERYBODY),
    Row("volumes_create", "post", "volumes/", ADMIN, VOLUME, 201, hidden=403),
    Row("volumes_get", "get", "volumes/{volume}/", INSIDE),
    Row("volumes_put", "put", "volumes/{volume}/", ADMIN, {"path": "/data/other"}),
    Row("volumes_remove", "delete", "volumes/{volume}/", ADMIN, status=204),
    Row("data_sets_list", "get", "data-sets/", EVERYBODY),
    Row(
        "data_sets_create",
        "post",
        "data-sets/",
        WORKERS,
        {"name": "more", "project": "vision"},
        201,
        hidden=422,
        scope=JOBS,
    ),
    Row("data_sets_get", "get", "data-sets/{data_set}/", INSIDE),
    Row("data_sets_change", "patch", "data-sets/{data_set}/", WORKERS, {"description": "New."}, scope=JOBS),
    Row("data_sets_delete", "delete", "data-sets/{data_set}/", MANAGERS, status=204, scope=JOBS),
    Row(
        "data_set_versions_create",
        "post",
        "data-sets/{data_set}/versions/",
        WORKERS,
        {"label": "v2", "volume": "team", "path": "a/b"},
        201,
        scope=JOBS,
    ),
    Row("data_set_versions_get", "get", "data-set-versions/{data_set_version}/", INSIDE),
    Row(
        "data_set_versions_measure",
        "post",
        "data-set-versions/{data_set_version}/measure/",
        WORKERS,
        {},
        scope=JOBS,
    ),
    Row(
        "data_set_versions_delete",
        "delete",
        "data-set-versions/{data_set_version}/",
        MANAGERS,
        status=204,
        scope=JOBS,
    ),
    Row("failure_rules_list", "get", "failure-rules/", ADMIN, hidden=403),
    Row("failure_rules_try", "post", "failure-rules/try/", ADMIN, RULE, hidden=403),
    Row("failure_rules_get", "get", "failure-rules/{rule}/", ADMIN, hidden=403),
    Row("failure_rules_put", "put", "failure-rules/new_rule/", ADMIN, RULE, hidden=403),
    Row("failure_rules_remove", "delete", "failure-rules/{rule}/", ADMIN, status=204, hidden=403),
    Row("me_capacity", "get", "me/capacity/", EVERYBODY),
    Row("me_fair_shares", "get", "me/fair-shares/", EVERYBODY),
    Row("announcements_list", "get", "announcements/", EVERYBODY),
    Row("announcements_create", "post", "announcements/", ADMIN, ANNOUNCEMENT, 201, hidden=403),
    Row(
        "announcements_withdraw",
        "delete",
        "announcements/{announcement}/",
        ADMIN,
        status=204,
        hidden=403,
    ),
    Row("registries_list", "get", "registries/", ADMIN, hidden=403),
    Row("registries_save", "post", "registries/", ADMIN, LOGIN, hidden=403),
    Row("registries_remove", "delete", "registries/{registry}/", ADMIN, status=204, hidden=403),
    Row("topologies_list", "get", "topologies/", EVERYBODY),
    Row("topologies_create", "post", "topologies/", ADMIN, LEVELS, 201, hidden=403),
    Row("topologies_get", "get", "topologies/{topology}/", EVERYBODY),
    Row("topologies_put", "put", "topologies/{topology}/", ADMIN, {"levels": ["rack"]}, hidden=403),
    Row("topologies_remove", "delete", "topologies/{topology}/", ADMIN, status=204, hidden=403),
    # nothing listens at its address
    Row("nodes_host_keys_get", "get", "nodes/{node}/host-keys/", ADMIN, hidden=403),
    Row("nodes_confirm_key", "post", "nodes/{node}/confirm-key/", ADMIN, NEW_KEY, 409, hidden=403),
    Row("nodes_rename", "post", "nodes/{node}/rename/", ADMIN, {"name": "rack-one"}, hidden=403),
    Row("nodes_move", "post", "nodes/{node}/move/", ADMIN, {"host": "node-one.example"}, 201, hidden=403),
    # no signed agent is at hand here
    Row("nodes_setup_script", "get", "nodes/{node}/setup-script/", ADMIN, status=503, hidden=403),
    Row("nodes_test", "post", "nodes/{node}/test/", ADMIN, {}, 201, hidden=403),
    # no signed agent is at hand here; tests/services/test_node_operations.py has one
    Row("nodes_upgrade", "post", "nodes/{node}/upgrade/", ADMIN, {}, 503, hidden=403),
    Row("nodes_check", "post", "nodes/{node}/check/", ADMIN, {}, 201, hidden=403),
    Row("nodes_gc", "post", "nodes/{node}/gc/", ADMIN, {}, 201, hidden=403),
    Row("rollouts_start", "post", "rollouts/", ADMIN, {}, 503, hidden=403),
    Row("rollouts_get", "get", "rollouts/{rollout}/", ADMIN, hidden=403),
    Row("nodes_operation_get", "get", "nodes/{node}/operations/{check}/", ADMIN, hidden=403),
    Row("gpus_return_to_service", "post", "gpus/{gpu}/return-to-service/", ADMIN, {}, hidden=403),
    Row("recovery_get", "get", "recovery/", ADMIN, hidden=403),
    Row("recovery_containers", "get", "recovery/containers/", ADMIN, hidden=403),
    # nothing was restored in this world
    Row("recovery_adopt", "post", "recovery/containers/{container}/adopt/", ADMIN, {}, 409, hidden=403),
    Row("recovery_stop", "post", "recovery/containers/{container}/stop/", ADMIN, {}, 409, hidden=403),
    Row("scheduler_get", "get", "scheduler/", EVERYBODY),
    Row("portal_health_get", "get", "portal-health/", ADMIN, hidden=403),
    Row("metrics", "get", "/metrics", ADMIN, hidden=403, scope=METRICS),
    Row("failed_cycles_list", "get", "scheduler/failed-cycles/", ADMIN, hidden=403),
    Row("failed_cycles_download", "get", "scheduler/failed-cycles/{failed}/", ADMIN, hidden=403),
    Row("gpus_list", "get", "gpus/", EVERYBODY),
    Row("gpus_get", "get", "gpus/{gpu}/", EVERYBODY),
    Row("environments_list", "get", "environments/", EVERYBODY),
    Row("environments_get", "get", "environments/{lab}/", EVERYBODY),
    Row("environments_check_tag", "post", "environments/{lab}/check-tag/", ADMIN, {}, hidden=403),
    Row("environments_update_image", "post", "environments/{lab}/update-image/", ADMIN, {}, 409, hidden=403),
    Row("templates_list", "get", "templates/", EVERYBODY),
    Row("templates_create", "post", "templates/", EVERYBODY, TEMPLATE, 201, scope=JOBS),
    Row("templates_get", "get", "templates/{template}/", EVERYBODY),
    Row("templates_change", "patch", "templates/{own_template}/", CONTROLLERS, {"title": "New"}, scope=JOBS),
    Row("templates_versions", "get", "templates/{template}/versions/", EVERYBODY),
    Row("usage", "get", "usage/", EVERYBODY),
    Row("start_phases", "get", "usage/start-phases/", EVERYBODY),
    Row("usage_work", "get", "usage/work/", EVERYBODY),
    Row("usage_report", "get", "usage/report/", EVERYBODY),
    Row("schema", "get", "../schema/", EVERYBODY),
]
