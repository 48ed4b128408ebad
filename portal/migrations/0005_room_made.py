"""An attempt notes the waiting job for which it was asked to leave."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0004_no_place")]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="stop_for",
            field=models.ForeignKey(
                blank=True,
                help_text="The waiting job for which it was asked to leave.",
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="room_made",
                to="portal.job",
            ),
        ),
        migrations.AddField(
            model_name="attempt",
            name="stop_for_after",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="Attempts that job had made then: with its next one the promise is kept.",
                null=True,
            ),
        ),
    ]
