"""Knobs of a pool beside those of the cluster, both with a version; ``spread`` becomes one of them."""

from django.db import migrations, models


def spread_as_a_knob(apps, schema_editor):
    apps.get_model("portal", "NodePool").objects.filter(spread=True).update(policy={"placement": "spread"})


def knob_as_spread(apps, schema_editor):
    apps.get_model("portal", "NodePool").objects.filter(policy__placement="spread").update(spread=True)


class Migration(migrations.Migration):
    dependencies = [("portal", "0006_unknown_containers")]

    operations = [
        migrations.AddField(
            model_name="clustersettings",
            name="policy_version",
            field=models.PositiveIntegerField(default=1, help_text="Moves with each change; the ETag."),
        ),
        migrations.AddField(
            model_name="nodepool",
            name="policy",
            field=models.JSONField(default=dict, help_text="Scheduler knobs that differ from the cluster's."),
        ),
        migrations.AddField(
            model_name="nodepool",
            name="policy_version",
            field=models.PositiveIntegerField(default=1, help_text="Moves with each change; the ETag."),
        ),
        migrations.RunPython(spread_as_a_knob, knob_as_spread),
        migrations.RemoveField(model_name="nodepool", name="spread"),
    ]
