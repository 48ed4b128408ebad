"""Serializers of progress: throughput, GPU layouts, faster layouts of the same work, its scaling, and phases."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.domain.jobs.phases import Phase


class Layout(ResponseSerializer):
    """The layout of the GPUs of a gang."""

    gpu_model = serializers.CharField(
        help_text="Model of the GPUs; several models are joined by a plus sign."
    )
    nodes = serializers.IntegerField()
    islands = serializers.IntegerField(
        help_text="Number of NVLink islands on all nodes; a node that reports none counts as one."
    )
    levels = serializers.IntegerField(
        help_text="Number of topology levels that the layout crosses; 0 within one innermost domain, or if unknown."
    )


class TaskProgress(ResponseSerializer):
    """Progress that the program of an attempt reported, in its own units."""

    done = serializers.FloatField(source="completed_units")
    at = serializers.DateTimeField(source="reported_at", help_text="When the program reported this progress.")
    previous_done = serializers.FloatField(
        source="start_units", help_text="Progress at its start, or at its last restart."
    )
    previous_at = serializers.DateTimeField(source="start_at")
    per_s = serializers.FloatField(
        allow_null=True,
        help_text="Units per second between `previous_at` and `at`; null until these are a minute apart.",
    )
    gpus = serializers.IntegerField(help_text="Total number of GPUs.")
    layout = Layout()


class MeasuredLayout(ResponseSerializer):
    """Speed of comparable jobs of the same project on one layout."""

    layout = Layout()
    per_s = serializers.FloatField(help_text="Median of the attempts, in units per second.")
    percent = serializers.IntegerField(
        help_text="Speed in percent of the fastest known layout, in steps of 5."
    )
    attempts = serializers.IntegerField(
        help_text="Number of attempts that the median is calculated from; the latest ones."
    )


class LauncherRate(ResponseSerializer):
    """Measured throughput of the program with one launcher on this number of GPUs, fastest launcher first.

    A list of them is empty unless two launchers are known.
    """

    launcher = serializers.CharField(
        help_text="Launcher with its variant, such as tensorflow parameter_server."
    )
    per_s = serializers.FloatField(help_text="Median of the attempts, in units per second.")
    attempts = serializers.IntegerField(
        help_text="Number of attempts that the median is calculated from; the latest ones."
    )
    percent = serializers.IntegerField(help_text="Throughput in percent of the fastest launcher.")


class ScalePoint(ResponseSerializer):
    """Measured throughput of the same program of the same project on one number of GPUs."""

    gpus = serializers.IntegerField()
    per_s = serializers.FloatField(help_text="Median of the attempts, in units per second.")
    attempts = serializers.IntegerField(
        help_text="Number of attempts that the median is calculated from; the latest ones."
    )
    speedup = serializers.FloatField(help_text="Throughput relative to the fewest measured GPUs.")
    efficiency_percent = serializers.IntegerField(
        help_text="Throughput in percent of linear growth from the fewest measured GPUs."
    )


class CheaperSize(ResponseSerializer):
    """A measured number of GPUs on which a unit of work costs fewer GPU-seconds."""

    gpus = serializers.IntegerField(source="point.gpus")
    efficiency_percent = serializers.IntegerField(source="point.efficiency_percent")
    saving_percent = serializers.IntegerField(help_text="GPU-seconds saved for each unit of work.")


class JobPhase(ResponseSerializer):
    """A phase of an attempt that was reached."""

    phase = serializers.ChoiceField([each.value for each in Phase])
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="null while it lasts.")
