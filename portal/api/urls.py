"""The URL table of REST: ``/api/v1/``, its description, and the health of this process."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import Resolver404, URLPattern, URLResolver, include, path, re_path, resolve
from django.views.decorators.csrf import csrf_exempt

from portal.access import Policy, policy
from portal.api import (
    alarms,
    asking,
    cluster,
    description,
    environments,
    health,
    idle,
    jobs,
    logs,
    metrics,
    node_acts,
    node_network,
    people,
    problems,
    project_policy,
    projects,
    queue,
    quotas,
    registries,
    reservations,
    restored,
    scheduler,
    secrets,
    sent_signals,
    time_limits,
    topologies,
    usage,
    volumes,
    workspaces,
)
from portal.api import policy as policy_routes

V1: list[URLPattern | URLResolver] = [
    path("me/", people.MeRoute.as_view()),
    path("tokens/", people.TokensRoute.as_view()),
    path("tokens/<slug:token>/", people.TokenRoute.as_view()),
    path("projects/", projects.ProjectsRoute.as_view()),
    path("projects/<slug:project>/", projects.ProjectRoute.as_view()),
    path("projects/<slug:project>/members/", projects.MembersRoute.as_view()),
    path("projects/<slug:project>/members/<slug:person>/", projects.MemberRoute.as_view()),
    path("projects/<slug:project>/quotas/", quotas.ProjectQuotasRoute.as_view()),
    path("projects/<slug:project>/quotas/<slug:pool>/", quotas.ProjectQuotaRoute.as_view()),
    path("projects/<slug:project>/secrets/", secrets.ProjectSecretsRoute.as_view()),
    path("projects/<slug:project>/secrets/<slug:secret>/", secrets.ProjectSecretRoute.as_view()),
    path("secrets/", secrets.SecretsRoute.as_view()),
    path("secrets/<slug:secret>/", secrets.SecretRoute.as_view()),
    path("quotas/", quotas.QuotasRoute.as_view()),
    path("quotas/<slug:quota>/", quotas.QuotaRoute.as_view()),
    path("quotas/<slug:quota>/changes/", quotas.QuotaChangesRoute.as_view()),
    path("quotas/<slug:quota>/undo/", quotas.QuotaUndoRoute.as_view()),
    path("jobs/", jobs.JobsRoute.as_view()),
    path("jobs/<slug:job>/", jobs.JobRoute.as_view()),
    path("jobs/<slug:job>/cancel/", jobs.JobCancelRoute.as_view()),
    path("jobs/<slug:job>/hold/", jobs.JobHoldRoute.as_view()),
    path("jobs/<slug:job>/release/", jobs.JobReleaseRoute.as_view()),
    path("jobs/<slug:job>/suspend/", jobs.JobSuspendRoute.as_view()),
    path("jobs/<slug:job>/resume/", jobs.JobResumeRoute.as_view()),
    path("jobs/<slug:job>/start-again/", jobs.JobStartAgainRoute.as_view()),
    path("jobs/<slug:job>/extend/", time_limits.JobExtendRoute.as_view()),
    path("jobs/<slug:job>/snooze/", idle.JobSnoozeRoute.as_view()),
    path("jobs/<slug:job>/signal/", sent_signals.JobSignalRoute.as_view()),
    path("jobs/<slug:job>/excuse/", idle.JobExcuseRoute.as_view()),
    path("excuses/", idle.ExcusesRoute.as_view()),
    path("excuses/<slug:excuse>/cut/", idle.ExcuseCutRoute.as_view()),
    path("extensions/", time_limits.ExtensionsRoute.as_view()),
    path("extensions/<slug:extension>/", time_limits.ExtensionRoute.as_view()),
    path("extensions/<slug:extension>/grant/", time_limits.ExtensionGrantRoute.as_view()),
    path("extensions/<slug:extension>/refuse/", time_limits.ExtensionRefuseRoute.as_view()),
    path("jobs/<slug:job>/logs/", logs.JobLogsRoute.as_view()),
    path("jobs/<slug:job>/logs/search/", logs.JobLogSearchRoute.as_view()),
    path("jobs/<slug:job>/logs/download/", logs.JobLogFileRoute.as_view()),
    path("jobs/<slug:job>/events/", jobs.JobEventsRoute.as_view()),
    path("workspaces/", workspaces.WorkspacesRoute.as_view()),
    path("workspaces/<slug:workspace>/", workspaces.WorkspaceRoute.as_view()),
    path("workspaces/<slug:workspace>/open/", workspaces.WorkspaceOpenRoute.as_view()),
    path("workspaces/<slug:workspace>/stop/", workspaces.WorkspaceStopRoute.as_view()),
    path("workspaces/<slug:workspace>/start-again/", workspaces.WorkspaceStartAgainRoute.as_view()),
    path("queue/", queue.QueueRoute.as_view()),
    path("ask/", asking.AskRoute.as_view()),
    path("pools/", cluster.PoolsRoute.as_view()),
    path("pools/<slug:pool>/", cluster.PoolRoute.as_view()),
    path("pools/<slug:pool>/network/", node_network.PoolNetworkRoute.as_view()),
    path("projects/<slug:project>/policy/", project_policy.ProjectPolicyRoute.as_view()),
    path("pools/<slug:pool>/policy/", policy_routes.PoolPolicyRoute.as_view()),
    path("policy/", policy_routes.ClusterPolicyRoute.as_view()),
    path("nodes/", cluster.NodesRoute.as_view()),
    path("nodes/<slug:node>/", cluster.NodeRoute.as_view()),
    path("nodes/<slug:node>/cordon/", node_acts.NodeCordonRoute.as_view()),
    path("nodes/<slug:node>/uncordon/", node_acts.NodeUncordonRoute.as_view()),
    path("nodes/<slug:node>/drain/", node_acts.NodeDrainRoute.as_view()),
    path("nodes/<slug:node>/retire/", node_acts.NodeRetireRoute.as_view()),
    path("nodes/<slug:node>/fence/", node_acts.NodeFenceRoute.as_view()),
    path("nodes/<slug:node>/trust/", node_acts.NodeTrustRoute.as_view()),
    path("nodes/<slug:node>/labels/", node_acts.NodeLabelsRoute.as_view()),
    path("nodes/<slug:node>/interface/", node_network.NodeInterfaceRoute.as_view()),
    path("nodes/<slug:node>/test/", node_acts.NodeTestRoute.as_view()),
    path("nodes/<slug:node>/upgrade/", node_acts.NodeUpgradeRoute.as_view()),
    path("nodes/<slug:node>/preflight/", node_acts.NodePreflightRoute.as_view()),
    path("nodes/<slug:node>/gc/", node_acts.NodeTidyRoute.as_view()),
    path("rollouts/", node_acts.RolloutsRoute.as_view()),
    path("rollouts/<slug:rollout>/", node_acts.RolloutRoute.as_view()),
    path("nodes/<slug:node>/checks/<slug:check>/", node_acts.NodeCheckRoute.as_view()),
    path("reservations/", reservations.ReservationsRoute.as_view()),
    path("reservations/<slug:reservation>/", reservations.ReservationRoute.as_view()),
    path("reservations/<slug:reservation>/restore/", reservations.ReservationRestoreRoute.as_view()),
    path("registries/", registries.RegistriesRoute.as_view()),
    path("registries/<slug:registry>/", registries.RegistryRoute.as_view()),
    path("topologies/", topologies.TopologiesRoute.as_view()),
    path("topologies/<slug:topology>/", topologies.TopologyRoute.as_view()),
    path("volumes/", volumes.VolumesRoute.as_view()),
    path("volumes/<slug:volume>/", volumes.VolumeRoute.as_view()),
    path("restored/", restored.RestoredRoute.as_view()),
    path("restored/containers/", restored.UnknownContainersRoute.as_view()),
    path("restored/containers/<slug:container>/keep/", restored.KeepContainerRoute.as_view()),
    path("restored/containers/<slug:container>/stop/", restored.StopContainerRoute.as_view()),
    path("scheduler/", scheduler.SchedulerRoute.as_view()),
    path("scheduler/failed/", scheduler.FailedCyclesRoute.as_view()),
    path("scheduler/failed/<slug:cycle>/", scheduler.FailedCycleRoute.as_view()),
    path("alarms/", alarms.AlarmsRoute.as_view()),
    path("alarms/<slug:alarm>/acknowledge/", alarms.AlarmAcknowledgeRoute.as_view()),
    path("scheduler/invalid-rows/", alarms.InvalidRowsRoute.as_view()),
    path("scheduler/invalid-rows/<slug:row>/acknowledge/", alarms.InvalidRowAcknowledgeRoute.as_view()),
    path("gpus/", cluster.GpusRoute.as_view()),
    path("gpus/<slug:uuid>/", cluster.GpuRoute.as_view()),
    path("gpus/<slug:uuid>/give-back/", node_acts.GpuGiveBackRoute.as_view()),
    path("environments/", cluster.EnvironmentsRoute.as_view()),
    path("environments/<slug:environment>/", cluster.EnvironmentRoute.as_view()),
    path("environments/<slug:environment>/check-tag/", environments.CheckTagRoute.as_view()),
    path("environments/<slug:environment>/update-image/", environments.UpdateImageRoute.as_view()),
    path("templates/", cluster.TemplatesRoute.as_view()),
    path("templates/<slug:template>/", cluster.TemplateRoute.as_view()),
    path("usage/", usage.UsageRoute.as_view()),
]


@policy(Policy.PUBLIC)
@csrf_exempt
def nothing_here(request: HttpRequest) -> HttpResponse:
    """Every other address below /api/: a problem, never a page."""
    sentence = problems.SENTENCES[404]
    if not request.path.endswith("/"):
        try:
            if resolve(request.path + "/").func is not nothing_here:
                sentence = f"Addresses end with a slash: {request.path}/"
        except Resolver404:
            pass
    return problems.problem(404, problems.CODES[404], sentence)


urlpatterns: list[URLPattern | URLResolver] = [
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
    path("metrics", metrics.MetricsRoute.as_view(), name="metrics"),
    path("api/v1/", include(V1)),
    path("api/schema/", description.SchemaRoute.as_view(), name="api-schema"),
    path("api/docs/", description.docs, name="api-docs"),
    path("api/docs/start.js", description.docs_start, name="api-docs-start"),
    re_path(r"^api(?:/.*)?$", nothing_here),
]
