"""Pages that change the cluster: quotas, projects, users, nodes, environments, and the audit trail."""
