"""What nodes tell of their GPUs beside model and memory: NVLink islands, compute capability, MIG slices."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0014_topology")]

    operations = [
        migrations.AddField(
            model_name="gpu",
            name="compute_capability",
            field=models.FloatField(blank=True, help_text="Such as 9.0; null: not told.", null=True),
        ),
        migrations.AddField(
            model_name="gpu",
            name="island",
            field=models.PositiveSmallIntegerField(
                blank=True,
                help_text="Equal numbers on a node are joined by NVLink; null: not known.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="gpu",
            name="mig_profile",
            field=models.CharField(
                blank=True, help_text="Of a MIG slice, such as 1g.10gb; blank: a whole GPU.", max_length=32
            ),
        ),
    ]
