"""Serializers of log pages and search results."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers


class LogConnectionLoss(serializers.Serializer[Any]):
    """A lost connection to the node of a log."""

    node = serializers.CharField()
    since = serializers.DateTimeField(allow_null=True)
    message = serializers.CharField()


class LogPage(serializers.Serializer[Any]):
    """A part of a task's log, by byte offsets."""

    text = serializers.CharField(allow_blank=True, help_text="Bytes that are not UTF-8 read as U+FFFD.")
    offset = serializers.IntegerField()
    next_offset = serializers.IntegerField()
    size = serializers.IntegerField(help_text="Bytes mirrored so far.")
    complete = serializers.BooleanField(help_text="The task has ended and all of its log is here.")
    dropped = serializers.IntegerField(help_text="Bytes after these, beyond what is kept of one log.")
    removed = serializers.BooleanField(help_text="It was here, and is older than logs are kept.")
    lost = LogConnectionLoss(
        allow_null=True,
        help_text="The node does not answer, so the log may have grown there: go on asking at `next_offset`.",
    )
    attempt = serializers.IntegerField()
    rank = serializers.IntegerField()


class LogMatch(serializers.Serializer[Any]):
    """A matching line; ``offset`` is its start, as in ``logs/``."""

    rank = serializers.IntegerField()
    offset = serializers.IntegerField()
    time = serializers.CharField(allow_null=True, help_text="As the node's engine wrote it down.")
    stream = serializers.CharField(
        allow_blank=True, help_text="stdout or stderr; blank where it is not known."
    )
    text = serializers.CharField(allow_blank=True)


class LogMatches(serializers.Serializer[Any]):
    """Matching lines, ordered by rank and offset."""

    matches = LogMatch(many=True)
    next = serializers.CharField(
        allow_null=True, help_text="Where to go on; null: all that is here was searched."
    )
