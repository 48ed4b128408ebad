"""Node access: connections to nodes, and the agent program that runs on them."""
