"""A quota may bound what one person holds in a project at once; nothing set is no limit."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0017_gpu_kinds")]

    operations = [
        migrations.AddField(
            model_name="quota",
            name="user_limit_milli",
            field=models.PositiveIntegerField(
                blank=True, help_text="What one person may hold at once; None means no limit.", null=True
            ),
        ),
    ]
