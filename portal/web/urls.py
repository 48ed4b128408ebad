"""URLs of the pages."""

from __future__ import annotations

from django.urls import include, path

from portal.web import account, approvals, cluster, home, job_list, queue, search, sign_in, usage
from portal.web.job import actions, checkpoints, metrics, overview, ranks, terminal
from portal.web.job import logs as job_logs
from portal.web.launch import views

urlpatterns = [
    path("", home.home, name="home"),
    path("sign-in/", sign_in.sign_in, name="sign-in"),
    path("sign-in/link/", sign_in.sign_in_link, name="sign-in-link"),
    path("sign-out/", sign_in.sign_out, name="sign-out"),
    path("invitation/", sign_in.invitation, name="invitation"),
    path("account/", account.account, name="account"),
    path("account/name/", account.change_name, name="account-name"),
    path("account/password/", account.change_password, name="account-password"),
    path("account/tokens/", account.create_token, name="account-token"),
    path("account/tokens/<slug:public_id>/revoke/", account.revoke_token, name="account-token-revoke"),
    path("account/secrets/", account.save_secret, name="save-secret"),
    path("account/secrets/<slug:name>/delete/", account.remove_secret, name="remove-secret"),
    path("projects/<slug:public_id>/secrets/", account.save_secret, name="save-project-secret"),
    path(
        "projects/<slug:public_id>/secrets/<slug:name>/delete/",
        account.remove_secret,
        name="remove-project-secret",
    ),
    path("account/sessions/end/", account.end_sessions, name="account-sessions-end"),
    path("launch/", views.launch, name="launch"),
    path("launch/check/", views.preview, name="launch-check"),
    path("jobs/", job_list.jobs, name="jobs"),
    path("jobs/cancel/", job_list.bulk_cancel, name="jobs-cancel"),
    path("jobs/<slug:public_id>/", overview.job, name="job"),
    path("jobs/<slug:public_id>/logs/", job_logs.logs, name="job-logs"),
    path("jobs/<slug:public_id>/logs/lines/", job_logs.lines, name="job-log-lines"),
    path("jobs/<slug:public_id>/logs/search/", job_logs.search, name="job-log-search"),
    path("jobs/<slug:public_id>/logs/download/", job_logs.download, name="job-log-download"),
    path("jobs/<slug:public_id>/terminal/", terminal.terminal, name="job-terminal"),
    path("jobs/<slug:public_id>/terminals/", terminal.open_terminal, name="job-terminal-open"),
    path("jobs/terminals/<slug:public_id>/", terminal.terminal_state, name="terminal-state"),
    path("jobs/<slug:public_id>/metrics/", metrics.metrics, name="job-metrics"),
    path("jobs/<slug:public_id>/metrics/series/", metrics.series, name="job-series"),
    path("jobs/<slug:public_id>/ranks/", ranks.ranks, name="job-ranks"),
    path("jobs/<slug:public_id>/checkpoints/", checkpoints.checkpoints, name="job-checkpoints"),
    path("checkpoints/<slug:public_id>/pin/", checkpoints.pin, name="checkpoint-pin"),
    path("checkpoints/<slug:public_id>/resume/", checkpoints.resume, name="checkpoint-resume"),
    path("jobs/<slug:public_id>/run/", overview.request_page, name="job-run"),
    path("jobs/<slug:public_id>/cancel/", actions.cancel, name="job-cancel"),
    path("jobs/<slug:public_id>/hold/", actions.hold, name="job-hold"),
    path("jobs/<slug:public_id>/suspend/", actions.suspend, name="job-suspend"),
    path("jobs/<slug:public_id>/resume/", actions.resume, name="job-resume"),
    path("jobs/<slug:public_id>/extend/", actions.request_extension, name="job-extend"),
    path("jobs/<slug:public_id>/snooze/", actions.snooze, name="job-snooze"),
    path("jobs/<slug:public_id>/exempt/", actions.exempt, name="job-exempt"),
    path("jobs/<slug:public_id>/signal/", actions.send_signal, name="job-signal"),
    path("jobs/<slug:public_id>/resubmit/", actions.resubmit, name="job-resubmit"),
    path("jobs/<slug:public_id>/open/", actions.open_workspace, name="job-open"),
    path("approvals/", approvals.approvals, name="approvals"),
    path("approvals/<slug:public_id>/decide/", approvals.decide_extension, name="decide-extension"),
    path("approvals/exemptions/<slug:public_id>/revoke/", actions.revoke_exemption, name="revoke-exemption"),
    path("queue/", queue.queue, name="queue"),
    path("usage/", usage.usage, name="usage"),
    path("search/", search.search, name="search"),
    path("cluster/", cluster.cluster, name="cluster"),
    path("cluster/network/", cluster.network, name="network"),
    path("", include("portal.web.admin.urls")),  # before the node page, since "add" is not a node id
    path("nodes/<slug:public_id>/", cluster.node, name="node"),
    path("nodes/<slug:public_id>/series/", metrics.node_series, name="node-series"),
]
