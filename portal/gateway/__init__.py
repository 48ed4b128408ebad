"""The public port: workspaces on origins of their own, everything else to web."""
