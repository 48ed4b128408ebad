"""Real nodes on one machine: network namespaces with their own root, sshd and container store."""
