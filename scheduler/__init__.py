"""Scheduling engine: reads a snapshot, decides with pure functions, commits and executes the plan."""
