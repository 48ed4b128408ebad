"""Adds which amounts of a job its user typed on a page, so that the others follow its GPUs."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("portal", "0005_deletion_of_old_history"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="typed_amounts",
            field=models.JSONField(
                help_text="Which of PROPORTIONAL_AMOUNTS a user typed on a page: they stay when the GPUs change. "
                "Null: unknown.",
                null=True,
            ),
        ),
    ]
