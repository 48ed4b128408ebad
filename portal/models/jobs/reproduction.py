"""What is needed to run a job again: code (also uploaded), packages, the job that it repeats, notes and tags."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.db import models
from django.db.models.functions import Now

from portal.models.columns import optional_number, optional_text, optional_time

MAX_TAG_LENGTH = 50


class EnvironmentRecord(models.Model):
    """Code and packages of a job, recorded beside its lowest rank when its first attempt started."""

    job = models.OneToOneField(
        "Job", on_delete=models.CASCADE, primary_key=True, related_name="environment_record"
    )
    requested_at = models.DateTimeField(help_text="When its node was asked.")
    recorded_at = optional_time("null: nothing was recorded.")
    problem = optional_text(300, "Why nothing was recorded.")
    git_directory = optional_text(1000, "Top directory of its working tree; blank: not in a git repository.")
    git_commit = optional_text(64)
    git_branch = optional_text(200, "Blank: none is checked out.")
    git_remote = optional_text(500, "URL of origin, without credentials.")
    git_diff = models.TextField(
        blank=True, default="", help_text="Uncommitted changes, cut off if too large."
    )
    git_diff_bytes = optional_number("Size of all uncommitted changes; null: unknown.")
    untracked_files = models.JSONField(default=list, help_text="At most 100.")
    python = optional_text(400, "Path of the interpreter.")
    python_version = optional_text(40)
    packages = models.JSONField(default=list, help_text="Lines as of pip freeze.")
    conda_packages = models.JSONField(default=list, help_text="Name, version and build.")
    node = optional_text(63, "Name of the node.")
    driver = optional_text(40, "Version of the NVIDIA driver of the node; blank: none.")
    gpu_model = optional_text(100, "Model of its GPUs; blank: none.")

    @property
    def diff_is_complete(self) -> bool:
        return self.git_diff_bytes == len(self.git_diff.encode())


class Rerun(models.Model):
    """``job`` was submitted to repeat ``source`` exactly."""

    job = models.OneToOneField("Job", on_delete=models.CASCADE, primary_key=True, related_name="rerun")
    source = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="reruns")


class JobAnnotation(models.Model):
    """Note and tags of a job. A separate table, because the scheduler rereads a job whenever its row is written."""

    job = models.OneToOneField("Job", on_delete=models.CASCADE, primary_key=True, related_name="annotation")
    note = optional_text(5000)
    tags = ArrayField(models.CharField(max_length=MAX_TAG_LENGTH), default=list)

    class Meta:
        indexes = [GinIndex(fields=["tags"], name="job_by_tag")]


class CodeArchive(models.Model):
    """An archive that jobs of one project can unpack, stored once by its content."""

    project = models.ForeignKey("Project", on_delete=models.CASCADE, related_name="code_archives")
    sha256 = models.CharField(max_length=64, help_text="SHA-256 of the content; jobs refer to it.")
    content = models.BinaryField()
    size_bytes = models.PositiveIntegerField()
    entries = models.PositiveIntegerField(help_text="Files and folders in it.")
    unpacked_bytes = models.PositiveBigIntegerField()
    uploaded_by = models.ForeignKey("User", null=True, on_delete=models.SET_NULL, related_name="+")
    used_at = models.DateTimeField(
        db_default=Now(), help_text="When it was last uploaded, or a job submitted with it."
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "sha256"], name="code_archive_once"),
        ]

    def __str__(self) -> str:
        return self.sha256[:12]
