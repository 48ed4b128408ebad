"""Jobs that start after other jobs. Only jobs that are there already can be named, so there are no circles."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0018_quota_of_user")]

    operations = [
        migrations.AddField(
            model_name="job",
            name="after_any",
            field=models.BooleanField(
                default=False, help_text="It starts after others however these end; else they must complete."
            ),
        ),
        migrations.CreateModel(
            name="Dependency",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "after",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="next_jobs",
                        to="portal.job",
                    ),
                ),
                (
                    "job",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="dependencies",
                        to="portal.job",
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
                "constraints": [
                    models.UniqueConstraint(fields=["job", "after"], name="dependency_once"),
                    models.CheckConstraint(
                        condition=models.Q(after__lt=models.F("job")), name="dependency_on_an_older_job"
                    ),
                ],
            },
        ),
    ]
