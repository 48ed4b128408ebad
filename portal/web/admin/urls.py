"""Addresses of the pages that change the cluster."""

from __future__ import annotations

from django.urls import path

from portal.web.admin import (
    audit,
    environments,
    nodes,
    people,
    policy,
    projects,
    quotas,
    restored,
    scheduler,
    topologies,
)

urlpatterns = [
    path("quotas/", quotas.quotas, name="quotas"),
    path("quotas/save/", quotas.save_quotas, name="save-quotas"),
    path("quotas/undo/<int:change_id>/", quotas.undo_quota_change, name="undo-quota"),
    path("policy/", policy.policy_page, name="policy"),
    path("policy/save/", policy.save_policy, name="save-policy"),
    path("projects/", projects.project_list, name="projects"),
    path("projects/add/", projects.add_project, name="add-project"),
    path("projects/<slug:public_id>/", projects.project_page, name="project"),
    path("projects/<slug:public_id>/change/", projects.change_project, name="change-project"),
    path("projects/<slug:public_id>/members/", projects.set_member, name="set-member"),
    path("projects/<slug:public_id>/invite/", projects.invite_into, name="invite-into"),
    path("people/", people.people_list, name="people"),
    path("people/invite/", people.invite, name="invite"),
    path("people/<slug:public_id>/change/", people.change_person, name="change-person"),
    path("invitations/<slug:public_id>/revoke/", people.revoke_invitation, name="revoke-invitation"),
    path("nodes/add/", nodes.add_node, name="add-node"),
    path("nodes/<slug:public_id>/test/", nodes.test_node, name="test-node"),
    path("nodes/<slug:public_id>/gpus/<str:uuid>/give-back/", nodes.give_back_gpu, name="give-back-gpu"),
    path("nodes/<slug:public_id>/labels/", nodes.set_labels, name="set-labels"),
    path("topologies/", topologies.topologies_page, name="topologies"),
    path("topologies/save/", topologies.save_topology, name="save-topology"),
    path("topologies/<slug:name>/remove/", topologies.remove_topology, name="remove-topology"),
    path("nodes/<slug:public_id>/state/", nodes.set_node_state, name="set-node-state"),
    path("nodes/<slug:public_id>/checks/<slug:check_id>/", nodes.node_check, name="node-check"),
    path("restored/", restored.restored_page, name="restored"),
    path("restored/nodes/<slug:public_id>/fence/", restored.fence, name="restored-fence"),
    path("restored/<slug:public_id>/keep/", restored.keep, name="restored-keep"),
    path("restored/<slug:public_id>/stop/", restored.stop, name="restored-stop"),
    path("environments/", environments.environment_list, name="environments"),
    path("environments/add/", environments.save_environment, name="add-environment"),
    path("environments/<slug:public_id>/", environments.environment_page, name="environment"),
    path("environments/<slug:public_id>/save/", environments.save_environment, name="save-environment"),
    path("scheduler/", scheduler.scheduler_page, name="scheduler"),
    path("scheduler/failed/<slug:public_id>/", scheduler.failed_cycle, name="failed-cycle"),
    path("audit/", audit.audit, name="audit"),
]
