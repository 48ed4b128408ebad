"""Pages that change the cluster: quotas, projects, people, nodes, environments, and the trail of all that."""
