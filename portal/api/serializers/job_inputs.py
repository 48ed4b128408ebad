"""Parts of what a job asks for: topology levels, volumes, secrets and roles."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer


class TopologyConstraint(ResponseSerializer):
    """Topology levels within which the tasks of a job are placed."""

    topology = serializers.CharField()
    required = serializers.CharField(allow_null=True)  # type: ignore[assignment]
    preferred = serializers.CharField(allow_null=True)


class JobVolume(ResponseSerializer):
    """A volume mount of a job."""

    volume = serializers.CharField(help_text="Name of the volume.")
    target = serializers.CharField(help_text="Mount path in the container.")
    read_only = serializers.BooleanField(  # type: ignore[assignment]
        help_text="Whether the job requests a read-only mount; a read-only volume is always mounted read-only."
    )


class JobSecret(ResponseSerializer):
    """A reference of a job to a secret."""

    optional_fields = frozenset({"variable", "file"})

    secret = serializers.CharField()
    owner_type = serializers.CharField(
        help_text="me: a secret of the owner of the job; project: a secret of its project."
    )
    variable = serializers.CharField()
    file = serializers.CharField()


class Role(ResponseSerializer):
    """A role of a job: equal tasks with consecutive ranks."""

    name = serializers.CharField()
    tasks = serializers.IntegerField()
    command = serializers.ListField(child=serializers.CharField(allow_blank=True))
    gpus_per_task = serializers.IntegerField()
    cpu_milli = serializers.IntegerField(help_text="Per task.")
    memory_mib = serializers.IntegerField(help_text="Per task.")
    ports = serializers.ListField(child=serializers.CharField(), help_text="Names of its ports.")
    start_order = serializers.IntegerField(
        help_text="Its tasks start when all tasks of lower orders run, and listen on the ports of their role."
    )
    may_fail = serializers.BooleanField(help_text="true if a failed task of it does not end the job.")
