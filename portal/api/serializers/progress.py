"""Serializers of progress: throughput, GPU layouts, and faster layouts of the same work."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.serializers.references import timestamp
from portal.domain.throughput import Layout as LayoutWords
from portal.models import AttemptProgress as ProgressRow
from portal.selectors.jobs.progress import MeasuredLayout as KnownLayoutRow


class Layout(serializers.Serializer[Any]):
    """The layout of the GPUs of a gang."""

    gpu_model = serializers.CharField(help_text="Of several models all of them, joined by a plus sign.")
    nodes = serializers.IntegerField()
    islands = serializers.IntegerField(
        help_text="NVLink islands, over all nodes; a node that tells none counts as one."
    )
    levels = serializers.IntegerField(help_text="Levels of the fabric that it crosses.")


class TaskProgress(serializers.Serializer[Any]):
    """Progress that the program of an attempt reported, in its own units."""

    done = serializers.FloatField()
    at = serializers.DateTimeField(help_text="When it wrote that.")
    previous_done = serializers.FloatField(help_text="Where it began, or last began anew.")
    previous_at = serializers.DateTimeField()
    per_s = serializers.FloatField(
        allow_null=True, help_text="Units a second between the two; null until they are a minute apart."
    )
    gpus = serializers.IntegerField(help_text="GPUs in all.")
    layout = Layout()


class MeasuredLayout(serializers.Serializer[Any]):
    """How fast jobs of the same project that do the same work ran on one layout."""

    layout = Layout()
    per_s = serializers.FloatField(help_text="The median.")
    percent = serializers.IntegerField(help_text="Of the fastest that is known, in steps of 5.")
    attempts = serializers.IntegerField(help_text="Of so many attempts, the latest.")


def layout(row: LayoutWords) -> dict[str, Any]:
    return row._asdict()


def progress(row: ProgressRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "done": row.completed_units,
        "at": timestamp(row.reported_at),
        "previous_done": row.start_units,
        "previous_at": timestamp(row.start_at),
        "per_s": row.per_s,
        "gpus": row.gpus,
        "layout": layout(row.layout),
    }


def measured_layout(row: KnownLayoutRow) -> dict[str, Any]:
    """Return a layout and its throughput relative to the fastest."""
    return {
        "layout": layout(row.layout),
        "per_s": row.per_s,
        "percent": row.percent,
        "attempts": row.attempts,
    }
