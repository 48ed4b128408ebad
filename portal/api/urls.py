"""URLs of REST: ``/api/v1/``, its documentation, and health checks."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import Resolver404, URLPattern, URLResolver, include, path, re_path, resolve
from django.views.decorators.csrf import csrf_exempt

from portal.access import AccessPolicy, access_policy
from portal.api import schema
from portal.api.accounts import users
from portal.api.cluster import health, metrics, portal_health, recovery
from portal.api.environments import pools_and_environments, registries
from portal.api.experiments import mlflow
from portal.api.framework import problems
from portal.api.jobs import (
    actions,
    checkpoints,
    code,
    failures,
    files,
    job_lists,
    job_templates,
    jobs,
    launchers,
    logs,
    notebooks,
    pipeline_plans,
    preview,
    ranks,
    reproduction,
    schedules,
)
from portal.api.nodes import alerts, capacity, inventory, node_operations, topologies
from portal.api.notices import announcements, notices
from portal.api.projects import projects, quota_additions, quota_effect, quotas, secrets
from portal.api.reports import usage
from portal.api.requests import user_requests
from portal.api.scheduling import policy, queue, reservations, scheduler
from portal.api.serving import model_servers
from portal.api.storage import data_sets, volumes
from portal.api.sweeps import sweeps
from portal.api.workspaces import saved_environments, sharing, ssh, workspaces

V1: list[URLPattern | URLResolver] = [
    path("me/", users.CurrentUserView.as_view()),
    path("tokens/", users.TokensView.as_view()),
    path("tokens/<slug:token>/", users.TokenView.as_view()),
    path("projects/", projects.ProjectsView.as_view()),
    path("projects/<slug:project>/", projects.ProjectView.as_view()),
    path("projects/<slug:project>/members/", projects.MembersView.as_view()),
    path("projects/<slug:project>/code/", code.CodeView.as_view()),
    path("projects/<slug:project>/members/<slug:user>/", projects.MemberView.as_view()),
    *announcements.ROUTES,
    *capacity.ROUTES,
    *quota_effect.ROUTES,
    *quota_additions.ROUTES,
    *quotas.ROUTES,
    *user_requests.ROUTES,
    *secrets.ROUTES,
    *data_sets.ROUTES,
    *notices.ROUTES,
    path("jobs/preview/", preview.JobPreviewView.as_view()),
    path("jobs/preview/alternatives/", preview.StartAlternativesView.as_view()),
    path("jobs/<slug:job>/alternatives/", preview.JobAlternativesView.as_view()),
    path("jobs/", jobs.JobsView.as_view()),
    *job_lists.ROUTES,
    path("jobs/<slug:job>/", jobs.JobView.as_view()),
    path("jobs/<slug:job>/spec.yaml", jobs.JobSpecView.as_view()),
    path("jobs/<slug:job>/kubernetes.yaml", jobs.JobKubernetesView.as_view()),
    *actions.ROUTES,
    *failures.ROUTES,
    *reproduction.ROUTES,
    *pipeline_plans.ROUTES,
    *model_servers.ROUTES,
    *sweeps.ROUTES,
    *schedules.ROUTES,
    *job_templates.ROUTES,
    *checkpoints.ROUTES,
    path("jobs/<slug:job>/logs/", logs.JobLogsView.as_view()),
    path("jobs/<slug:job>/logs/search/", logs.JobLogSearchView.as_view()),
    path("jobs/<slug:job>/logs/download/", logs.JobLogFileView.as_view()),
    path("jobs/<slug:job>/files/", files.JobFilesView.as_view()),
    path("jobs/<slug:job>/files/content/", files.JobFileView.as_view()),
    path("jobs/<slug:job>/files/archive/", files.JobFileArchiveView.as_view()),
    path("jobs/<slug:job>/files/directories/", files.JobDirectoriesView.as_view()),
    path("jobs/<slug:job>/ranks/", ranks.JobRanksView.as_view()),
    path("jobs/<slug:job>/events/", jobs.JobEventsView.as_view(), name="api-job-events"),
    path("jobs/<slug:job>/launch/", launchers.JobLaunchView.as_view()),
    path("launchers/", launchers.LaunchersView.as_view()),
    path("workspaces/", workspaces.WorkspacesView.as_view()),
    path("workspaces/<slug:workspace>/", workspaces.WorkspaceView.as_view()),
    path("workspaces/<slug:workspace>/open/", workspaces.WorkspaceOpenView.as_view()),
    path("queue/", queue.QueueView.as_view()),
    *notebooks.ROUTES,
    *saved_environments.ROUTES,
    *sharing.ROUTES,
    path("jobs/<slug:job>/ssh/", ssh.JobSshView.as_view()),
    *inventory.ROUTES,
    *pools_and_environments.ROUTES,
    *policy.ROUTES,
    *node_operations.ROUTES,
    *reservations.ROUTES,
    path("registries/", registries.RegistriesView.as_view()),
    path("registries/<slug:registry>/", registries.RegistryView.as_view()),
    path("topologies/", topologies.TopologiesView.as_view()),
    path("topologies/<slug:topology>/", topologies.TopologyView.as_view()),
    path("storage-usage/", volumes.StorageUsageView.as_view()),
    path("volumes/", volumes.VolumesView.as_view()),
    path("volumes/<slug:volume>/", volumes.VolumeView.as_view()),
    *recovery.ROUTES,
    path("portal-health/", portal_health.PortalHealthView.as_view()),
    path("scheduler/", scheduler.SchedulerView.as_view()),
    path("scheduler/failed-cycles/", scheduler.FailedCyclesView.as_view()),
    path("scheduler/failed-cycles/<slug:cycle>/", scheduler.FailedCycleView.as_view()),
    *alerts.ROUTES,
    path("usage/", usage.UsageView.as_view()),
    path("usage/start-phases/", usage.StartPhasesView.as_view()),
    path("usage/work/", usage.WorkView.as_view()),
    path("usage/report/", usage.ReportView.as_view()),
]


@access_policy(AccessPolicy.PUBLIC)
@csrf_exempt
def api_not_found(request: HttpRequest) -> HttpResponse:
    """Answer every other path below /api/ with a problem instead of a page."""
    message = problems.MESSAGES[404]
    if not request.path.endswith("/"):
        try:
            if resolve(request.path + "/").func is not api_not_found:
                message = f"Addresses end with a slash: {request.path}/"
        except Resolver404:
            pass
    return problems.problem_response(404, problems.CODES[404], message)


urlpatterns: list[URLPattern | URLResolver] = [
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
    path("metrics", metrics.MetricsView.as_view(), name="metrics"),
    path("api/v1/", include(V1)),
    path("api/schema/", schema.SchemaView.as_view(), name="api-schema"),
    path("api/docs/", schema.docs, name="api-docs"),
    path("api/docs/start.js", schema.docs_script, name="api-docs-start"),
    re_path(r"^api/mlflow/(?:(?P<project>[a-z][a-z0-9]{9})/)?api/(?P<path>(?s:.+))\Z", mlflow.mlflow_api),
    re_path(
        r"^api(?!/mlflow/(?:[a-z0-9]{10}/)?$)(?:/.*)?$", api_not_found
    ),  # that page is in portal/web/urls.py
]
