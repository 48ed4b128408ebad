"""Jobs that keep places are found by themselves: a cycle asks for them, and they are few."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0039_idle_policy_and_alarms")]

    operations = [
        migrations.AddIndex(
            model_name="job",
            index=models.Index(condition=models.Q(kept__isnull=False), fields=["id"], name="job_kept"),
        ),
    ]
