"""The help text of the failure classes of a job names no module; tables stay as they are."""

from __future__ import annotations

from django.db import migrations, models

from portal.models.jobs import default_failure_classes


class Migration(migrations.Migration):
    dependencies = [("portal", "0006_job_typed_amounts")]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AlterField(
                    model_name="job",
                    name="retry_on",
                    field=models.JSONField(
                        db_default=["node_failure"],
                        default=default_failure_classes,
                        help_text="Failure classes after which it is retried.",
                    ),
                ),
            ],
        ),
    ]
