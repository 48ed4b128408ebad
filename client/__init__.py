"""Command line and Python SDK; a package of its own that knows no server code."""
