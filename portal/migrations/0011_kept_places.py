"""Places that the scheduler keeps for a job until others have left them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0010_totals")]

    operations = [
        migrations.AddField(
            model_name="job",
            name="kept",
            field=models.JSONField(
                help_text="Places that the scheduler keeps for it: [rank, node, [[GPU uuid, milli], ...]] each.",
                null=True,
            ),
        ),
    ]
