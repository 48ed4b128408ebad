"""A job may ask for MIG slices of a profile, and for GPUs that are new enough."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0016_reservations")]

    operations = [
        migrations.AddField(
            model_name="job",
            name="mig_profile",
            field=models.CharField(
                blank=True,
                help_text="It asks for MIG slices of this profile; blank: for whole GPUs.",
                max_length=32,
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="min_compute_capability",
            field=models.FloatField(blank=True, help_text="Such as 8.0.", null=True),
        ),
    ]
