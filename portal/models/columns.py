"""Columns and constraints that many tables have."""

from __future__ import annotations

import datetime as dt
from enum import Enum

from django.db import models
from django.db.models import Q
from django.db.models.expressions import Combinable

OptionalNumber = float | int | str | Combinable | None
OptionalTime = str | dt.datetime | dt.date | Combinable | None


def optional_text(max_length: int, help_text: str = "") -> models.CharField[str, str]:
    """Return a text column that is blank by default, also for rows that exist when it is added."""
    return models.CharField(max_length=max_length, blank=True, default="", db_default="", help_text=help_text)


def one_of(column: str, values: type[Enum], name: str) -> models.CheckConstraint:
    """Return the constraint ``name``: the column has a value of the enumeration."""
    return models.CheckConstraint(condition=Q((f"{column}__in", [each.value for each in values])), name=name)


def required_with(column: str, required: str, name: str) -> models.CheckConstraint:
    """Return the constraint ``name``: ``required`` is set if ``column`` is."""
    unset, known = Q((f"{column}__isnull", True)), Q((f"{required}__isnull", False))
    return models.CheckConstraint(condition=unset | known, name=name)


def optional_time(help_text: str = "") -> models.DateTimeField[OptionalTime, dt.datetime | None]:
    return models.DateTimeField(null=True, blank=True, help_text=help_text)


def optional_number(help_text: str = "") -> models.PositiveIntegerField[OptionalNumber, int | None]:
    return models.PositiveIntegerField(null=True, blank=True, help_text=help_text)


def flag(help_text: str) -> models.BooleanField[bool | Combinable, bool]:
    """Return a column that is False by default, also for rows that exist when it is added."""
    return models.BooleanField(default=False, db_default=False, help_text=help_text)
