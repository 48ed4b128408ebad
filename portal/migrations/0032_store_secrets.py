"""Secrets of people and projects, and those that jobs name."""

import django.db.models.deletion
import portal.models.public_id
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("portal", "0031_store_volumes"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="secrets",
            field=models.JSONField(
                db_default=[],
                default=list,
                help_text="[{secret (by name), of, variable or file}, ...]; no values.",
            ),
        ),
        migrations.CreateModel(
            name="Secret",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "public_id",
                    portal.models.public_id.PublicIdField(
                        default=portal.models.public_id.new_public_id,
                        editable=False,
                        max_length=16,
                        unique=True,
                    ),
                ),
                ("name", models.CharField(max_length=63)),
                ("sealed", models.TextField(help_text="The value; it opens only in this row.")),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("changed_at", models.DateTimeField(auto_now=True)),
                ("changed_by", models.CharField(max_length=63)),
                (
                    "owner",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="secrets",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="secrets",
                        to="portal.project",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("owner__isnull", False), ("project__isnull", True)),
                            models.Q(("owner__isnull", True), ("project__isnull", False)),
                            _connector="OR",
                        ),
                        name="secret_of_one",
                    ),
                    models.UniqueConstraint(fields=("owner", "name"), name="secret_of_a_person_once"),
                    models.UniqueConstraint(fields=("project", "name"), name="secret_of_a_project_once"),
                ],
            },
        ),
    ]
