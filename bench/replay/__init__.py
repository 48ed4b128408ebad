"""Replays of published traces and scenarios, to compare decisions with those of other schedulers."""
