"""Serializers of progress: throughput, GPU layouts, and faster layouts of the same work."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer


class Layout(ResponseSerializer):
    """The layout of the GPUs of a gang."""

    gpu_model = serializers.CharField(help_text="Of several models all of them, joined by a plus sign.")
    nodes = serializers.IntegerField()
    islands = serializers.IntegerField(
        help_text="NVLink islands, over all nodes; a node that tells none counts as one."
    )
    levels = serializers.IntegerField(help_text="Levels of the fabric that it crosses.")


class TaskProgress(ResponseSerializer):
    """Progress that the program of an attempt reported, in its own units."""

    done = serializers.FloatField(source="completed_units")
    at = serializers.DateTimeField(source="reported_at", help_text="When it wrote that.")
    previous_done = serializers.FloatField(
        source="start_units", help_text="Where it began, or last began anew."
    )
    previous_at = serializers.DateTimeField(source="start_at")
    per_s = serializers.FloatField(
        allow_null=True, help_text="Units a second between the two; null until they are a minute apart."
    )
    gpus = serializers.IntegerField(help_text="GPUs in all.")
    layout = Layout()


class MeasuredLayout(ResponseSerializer):
    """How fast jobs of the same project that do the same work ran on one layout."""

    layout = Layout()
    per_s = serializers.FloatField(help_text="The median.")
    percent = serializers.IntegerField(help_text="Of the fastest that is known, in steps of 5.")
    attempts = serializers.IntegerField(help_text="Of so many attempts, the latest.")
