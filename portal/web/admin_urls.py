"""URLs of the pages that change the cluster."""

from __future__ import annotations

from django.urls import path

from portal.web.accounts import users
from portal.web.cluster import audit, recovery
from portal.web.environments import environments, registries
from portal.web.jobs import failure_rules
from portal.web.nodes import alerts, drains, identity, node_operations, nodes, topologies
from portal.web.notices import announcements, webhooks
from portal.web.projects import projects, quotas
from portal.web.scheduling import policy, reservations, scheduler
from portal.web.storage import volumes

urlpatterns = [
    path("quotas/", quotas.quotas, name="quotas"),
    path("quotas/save/", quotas.save_quotas, name="save-quotas"),
    path("quotas/effect/", quotas.simulate_quotas, name="quota-effect"),
    path("quotas/replay/", quotas.replay_quotas, name="replay-quotas"),
    path("quotas/replays/<slug:public_id>/", quotas.quota_replay, name="quota-replay"),
    path("quotas/add/", quotas.add_quota, name="add-quota"),
    path("quotas/additions/<slug:public_id>/end/", quotas.end_addition, name="end-quota-addition"),
    path("quotas/undo/<int:change_id>/", quotas.undo_quota_change, name="undo-quota"),
    path("policy/", policy.policy_page, name="policy"),
    path("policy/save/", policy.save_policy, name="save-policy"),
    path("projects/", projects.project_list, name="projects"),
    path("projects/add/", projects.add_project, name="add-project"),
    path("projects/<slug:public_id>/", projects.project_page, name="project"),
    path("projects/<slug:public_id>/change/", projects.change_project, name="change-project"),
    path("projects/<slug:public_id>/idle/", projects.save_idle, name="save-project-idle"),
    path("projects/<slug:public_id>/members/", projects.set_member, name="set-member"),
    path("projects/<slug:public_id>/invite/", projects.invite_into, name="invite-into"),
    path("projects/<slug:public_id>/webhooks/", webhooks.project_webhooks, name="project-webhooks"),
    path("webhooks/", webhooks.cluster_webhooks, name="cluster-webhooks"),
    path("users/", users.user_list, name="users"),
    path("users/invite/", users.invite, name="invite"),
    path("users/<slug:public_id>/change/", users.change_user, name="change-user"),
    path("users/<slug:public_id>/change/<slug:act>/", users.confirm_change, name="confirm-user-change"),
    path("invitations/<slug:public_id>/revoke/", users.revoke_invitation, name="revoke-invitation"),
    path("nodes/add/", nodes.add_node, name="add-node"),
    path("nodes/<slug:public_id>/test/", nodes.test_node, name="test-node"),
    path("nodes/<slug:public_id>/enrol/", identity.enrol_node, name="enrol-node"),
    path("nodes/<slug:public_id>/host-key/", identity.host_key, name="node-host-key"),
    path("nodes/<slug:public_id>/rename/", identity.rename_node, name="rename-node"),
    path("nodes/<slug:public_id>/move/", identity.move_node, name="move-node"),
    path(
        "nodes/<slug:public_id>/gpus/<str:uuid>/return-to-service/",
        node_operations.return_gpu_to_service,
        name="return-gpu-to-service",
    ),
    path("nodes/<slug:public_id>/labels/", node_operations.set_labels, name="set-labels"),
    path("nodes/<slug:public_id>/interface/", node_operations.set_interface, name="set-interface"),
    path("pools/<slug:public_id>/network/", node_operations.set_pool_network, name="set-pool-network"),
    path("calendar/", reservations.calendar, name="calendar"),
    path("calendar/save/", reservations.save_reservation, name="save-reservation"),
    path("calendar/<slug:public_id>/cancel/", reservations.cancel_reservation, name="cancel-reservation"),
    path("calendar/<slug:public_id>/restore/", reservations.restore_reservation, name="restore-reservation"),
    path("topologies/", topologies.topologies_page, name="topologies"),
    path("topologies/save/", topologies.save_topology, name="save-topology"),
    path("topologies/<slug:name>/remove/", topologies.remove_topology, name="remove-topology"),
    path("nodes/<slug:public_id>/operations/", node_operations.start_operation, name="start-node-operation"),
    path("rollouts/start/", node_operations.upgrade_all, name="upgrade-all"),
    path("rollouts/<slug:public_id>/", node_operations.rollout_page, name="rollout"),
    path("nodes/<slug:public_id>/drain/", drains.drain_node, name="drain-node"),
    path("nodes/<slug:public_id>/state/", node_operations.set_node_state, name="set-node-state"),
    path(
        "nodes/<slug:public_id>/operations/<slug:check_id>/",
        node_operations.node_operation,
        name="node-operation",
    ),
    path("volumes/", volumes.volumes_page, name="volumes"),
    path("volumes/save/", volumes.save_volume, name="save-volume"),
    path("volumes/<slug:name>/remove/", volumes.remove_volume, name="remove-volume"),
    path("failure-rules/", failure_rules.failure_rules_page, name="failure-rules"),
    path("failure-rules/save/", failure_rules.save_failure_rule, name="save-failure-rule"),
    path("failure-rules/<slug:code>/enable/", failure_rules.enable_failure_rule, name="enable-failure-rule"),
    path("failure-rules/<slug:code>/remove/", failure_rules.remove_failure_rule, name="remove-failure-rule"),
    path("announcements/", announcements.announcements_page, name="announcements"),
    path("announcements/write/", announcements.announce, name="announce"),
    path(
        "announcements/<slug:public_id>/withdraw/",
        announcements.withdraw_announcement,
        name="withdraw-announcement",
    ),
    path("registries/", registries.registries_page, name="registries"),
    path("registries/save/", registries.save_registry, name="save-registry"),
    path("registries/<slug:public_id>/remove/", registries.remove_registry, name="remove-registry"),
    path("recovery/", recovery.recovery_page, name="recovery"),
    path("recovery/nodes/<slug:public_id>/fence/", recovery.fence, name="recovery-fence"),
    path("recovery/<slug:public_id>/adopt/", recovery.decide, {"act": "adopt"}, name="recovery-adopt"),
    path("recovery/<slug:public_id>/stop/", recovery.decide, {"act": "stop"}, name="recovery-stop"),
    path("environments/", environments.environment_list, name="environments"),
    path("environments/add/", environments.save_environment, name="add-environment"),
    path("environments/<slug:public_id>/", environments.environment_page, name="environment"),
    path("environments/<slug:public_id>/save/", environments.save_environment, name="save-environment"),
    path("environments/<slug:public_id>/prefetch/", environments.prefetch_image, name="prefetch-image"),
    path("environments/<slug:public_id>/image/", environments.change_image, name="change-image"),
    path(
        "environments/<slug:public_id>/prefetch/cancel/", environments.cancel_prefetch, name="cancel-prefetch"
    ),
    path("scheduler/", scheduler.scheduler_page, name="scheduler"),
    path("scheduler/failed/<slug:public_id>/", scheduler.failed_cycle, name="failed-cycle"),
    path("alerts/", alerts.alerts_page, name="alerts"),
    path("alerts/<slug:public_id>/acknowledge/", alerts.acknowledge, name="acknowledge-alert"),
    path(
        "alerts/rows/<slug:public_id>/acknowledge/",
        alerts.acknowledge_invalid_row,
        name="acknowledge-invalid-row",
    ),
    path("audit/", audit.audit, name="audit"),
]
