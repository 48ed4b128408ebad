"""Replays: recorded work run through the core on a simulated clock, without a database."""
