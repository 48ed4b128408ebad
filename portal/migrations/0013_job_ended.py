"""Finds the jobs that ended last without a look at all: how long jobs run is learned from them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0012_played")]

    operations = [
        migrations.AddIndex(
            model_name="job",
            index=models.Index(
                fields=["-ended_at", "-id"],
                name="job_ended",
                condition=models.Q(started_at__isnull=False, ended_at__isnull=False),
            ),
        ),
    ]
