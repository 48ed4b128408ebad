"""Replays: recorded work run through the pure core, with no database and no clock but their own."""
