"""What the queue played forward said, beside the interval that was told: later forecasts learn from the two."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0011_kept_places")]

    operations = [
        migrations.AddField(
            model_name="forecast",
            name="played_s",
            field=models.FloatField(
                help_text="In how many seconds the queue played forward had it start, before any correction.",
                null=True,
            ),
        ),
    ]
