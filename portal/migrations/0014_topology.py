"""Where nodes stand: labels, topologies that read them, and how near together a job is to stand."""

import django.core.validators
import portal.models.public_id
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0013_job_ended")]

    operations = [
        migrations.CreateModel(
            name="Topology",
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
                (
                    "name",
                    models.CharField(
                        max_length=63,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$",
                                "Use lower-case letters, digits and hyphens; begin with a letter and end with a letter or digit.",
                            )
                        ],
                    ),
                ),
                ("levels", models.JSONField(default=list, help_text="Label keys, outermost first.")),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "verbose_name_plural": "topologies",
            },
        ),
        migrations.AddField(
            model_name="job",
            name="near",
            field=models.JSONField(
                blank=True,
                help_text="How close together its tasks stand: {topology, required, preferred}; levels or null.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="node",
            name="labels",
            field=models.JSONField(
                blank=True,
                default=dict,
                help_text="Key to value, by administrators: where it stands in a topology.",
            ),
        ),
    ]
