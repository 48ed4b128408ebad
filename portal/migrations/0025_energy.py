"""What the GPUs of each attempt used, in joules."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0024_filters")]

    operations = [
        migrations.CreateModel(
            name="AttemptEnergy",
            fields=[
                (
                    "attempt",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="energy",
                        serialize=False,
                        to="portal.attempt",
                    ),
                ),
                ("joules", models.FloatField()),
            ],
        ),
    ]
