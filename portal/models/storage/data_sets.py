"""Data sets: named directories or files of volumes, with their versions."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.domain.storage.data_sets import (
    MAX_LABEL_LENGTH,
    MAX_NOTE_LENGTH,
    MAX_PATH_LENGTH,
    DataSetVisibility,
)
from portal.models.columns import one_of, optional_text, optional_time
from portal.models.public_id import PublicIdField, slug_validator


class DataSet(models.Model):
    """An entry of the catalogue. Its name cannot change: jobs have it in the name of a variable."""

    public_id = PublicIdField()
    name = models.CharField(max_length=63, validators=[slug_validator])
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="data_sets")
    description = models.TextField(blank=True)
    visibility = models.CharField(max_length=8, default=DataSetVisibility.PROJECT.value)
    created_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            one_of("visibility", DataSetVisibility, "data_set_visibility"),
            models.UniqueConstraint(fields=["project", "name"], name="data_set_name_once"),
        ]

    def __str__(self) -> str:
        return self.name


class DataSetVersion(models.Model):
    """A directory or file that a data set is or was; never changed, apart from its measured size."""

    public_id = PublicIdField()
    data_set = models.ForeignKey(DataSet, on_delete=models.CASCADE, related_name="versions")
    label = models.CharField(max_length=MAX_LABEL_LENGTH)
    volume = models.ForeignKey("Volume", on_delete=models.PROTECT, related_name="data_set_versions")
    path = models.CharField(
        max_length=MAX_PATH_LENGTH, blank=True, help_text="Below the volume; blank: all of it."
    )
    note = optional_text(MAX_NOTE_LENGTH)
    created_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    size_bytes = models.PositiveBigIntegerField(null=True, blank=True, help_text="null: not measured.")
    file_count = models.PositiveBigIntegerField(null=True, blank=True)
    measured_at = optional_time()
    node = models.ForeignKey(
        "Node",
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Measures it, or measured it last.",
    )
    measure_requested_at = optional_time("Since when it is being measured; null: it is not.")
    measure_problem = optional_text(300, "Why it could not be measured the last time; blank: it could.")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["data_set", "label"], name="data_set_version_once"),
        ]
        indexes = [
            models.Index(
                fields=["node"],
                name="data_set_version_to_measure",
                condition=Q(measure_requested_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.data_set_id} {self.label}"
