"""Addresses of the pages."""

from __future__ import annotations

from django.urls import include, path

from portal.web import (
    account,
    cluster,
    home,
    job,
    job_idle,
    job_signal,
    job_time,
    jobs,
    launch,
    metrics,
    queue,
    requests,
    search,
    signin,
)
from portal.web import logs as job_logs

urlpatterns = [
    path("", home.home, name="home"),
    path("sign-in/", signin.sign_in, name="sign-in"),
    path("sign-in/link/", signin.link, name="sign-in-link"),
    path("sign-out/", signin.sign_out, name="sign-out"),
    path("invitation/", signin.invitation, name="invitation"),
    path("account/", account.account, name="account"),
    path("account/name/", account.change_name, name="account-name"),
    path("account/password/", account.change_password, name="account-password"),
    path("account/tokens/", account.make_token, name="account-token"),
    path("account/tokens/<slug:public_id>/revoke/", account.revoke_token, name="account-token-revoke"),
    path("account/sessions/end/", account.end_sessions, name="account-sessions-end"),
    path("launch/", launch.launch, name="launch"),
    path("launch/check/", launch.check, name="launch-check"),
    path("jobs/", jobs.jobs, name="jobs"),
    path("jobs/cancel/", jobs.cancel_many, name="jobs-cancel"),
    path("jobs/<slug:public_id>/", job.job, name="job"),
    path("jobs/<slug:public_id>/logs/", job_logs.logs, name="job-logs"),
    path("jobs/<slug:public_id>/logs/lines/", job_logs.lines, name="job-log-lines"),
    path("jobs/<slug:public_id>/logs/download/", job_logs.download, name="job-log-download"),
    path("jobs/<slug:public_id>/metrics/", metrics.metrics, name="job-metrics"),
    path("jobs/<slug:public_id>/metrics/series/", metrics.series, name="job-series"),
    path("jobs/<slug:public_id>/run/", job.run, name="job-run"),
    path("jobs/<slug:public_id>/cancel/", job.cancel, name="job-cancel"),
    path("jobs/<slug:public_id>/hold/", job.hold, name="job-hold"),
    path("jobs/<slug:public_id>/suspend/", job.suspend, name="job-suspend"),
    path("jobs/<slug:public_id>/resume/", job.resume, name="job-resume"),
    path("jobs/<slug:public_id>/extend/", job_time.extend, name="job-extend"),
    path("jobs/<slug:public_id>/snooze/", job_idle.snooze, name="job-snooze"),
    path("jobs/<slug:public_id>/excuse/", job_idle.excuse, name="job-excuse"),
    path("jobs/<slug:public_id>/signal/", job_signal.send_signal, name="job-signal"),
    path("jobs/<slug:public_id>/again/", job.again, name="job-again"),
    path("jobs/<slug:public_id>/open/", job.open_workspace, name="job-open"),
    path("requests/", requests.requests, name="requests"),
    path("requests/<slug:public_id>/decide/", requests.decide_extension, name="decide-extension"),
    path("requests/excuses/<slug:public_id>/cut/", job_idle.cut, name="cut-excuse"),
    path("queue/", queue.queue, name="queue"),
    path("search/", search.search, name="search"),
    path("cluster/", cluster.cluster, name="cluster"),
    path("", include("portal.web.admin.urls")),  # before a node's page: nodes/add/ is no node
    path("nodes/<slug:public_id>/", cluster.node, name="node"),
    path("nodes/<slug:public_id>/series/", metrics.node_series, name="node-series"),
]
