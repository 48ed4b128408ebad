"""Templates: saved requests for jobs with parameters, and their earlier versions."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.domain.jobs.template_parameters import TemplateCategory, TemplateScope
from portal.models.columns import one_of
from portal.models.public_id import PublicIdField, slug_validator


class Template(models.Model):
    """A saved request with placeholders. ``scope`` says who sees it; shipped templates have no owner."""

    public_id = PublicIdField()
    name = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    title = models.CharField(max_length=200)
    description = models.TextField(blank=True)
    category = models.CharField(max_length=10, default=TemplateCategory.OTHER.value)
    owner = models.ForeignKey("User", null=True, on_delete=models.PROTECT, related_name="templates")
    scope = models.CharField(max_length=8, default=TemplateScope.EVERYONE.value)
    project = models.ForeignKey("Project", null=True, on_delete=models.PROTECT, related_name="templates")
    kind = models.CharField(max_length=12)
    environment = models.ForeignKey(
        "Environment", null=True, on_delete=models.SET_NULL, related_name="templates"
    )
    fields = models.JSONField(default=dict, help_text="Fields of the job, with placeholders {name}.")
    parameters = models.JSONField(default=list, help_text="Declared parameters, in the order of the form.")
    sweep = models.JSONField(
        default=dict, help_text="Fields of a sweep and its parameters; empty: the template is for one job."
    )
    version = models.PositiveIntegerField(default=1)
    enabled = models.BooleanField(default=True)

    class Meta:
        constraints = [
            one_of("scope", TemplateScope, "template_scope"),
            one_of("category", TemplateCategory, "template_category"),
            models.CheckConstraint(
                condition=Q(scope=TemplateScope.PROJECT.value, project__isnull=False)
                | (~Q(scope=TemplateScope.PROJECT.value) & Q(project__isnull=True)),
                name="template_project",
            ),
            models.CheckConstraint(
                condition=~Q(scope=TemplateScope.SELF.value) | Q(owner__isnull=False), name="template_owner"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class TemplateVersion(models.Model):
    """The content of a version of a template; never changed."""

    template = models.ForeignKey(Template, on_delete=models.CASCADE, related_name="versions")
    version = models.PositiveIntegerField()
    kind = models.CharField(max_length=12)
    environment = models.ForeignKey("Environment", null=True, on_delete=models.SET_NULL, related_name="+")
    fields = models.JSONField(default=dict)
    parameters = models.JSONField(default=list)
    sweep = models.JSONField(default=dict)
    created_by = models.CharField(max_length=150, blank=True, help_text="User name; blank: shipped.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["template_id", "-version"]
        constraints = [
            models.UniqueConstraint(fields=["template", "version"], name="template_version_once"),
        ]

    def __str__(self) -> str:
        return f"{self.template_id} version {self.version}"
