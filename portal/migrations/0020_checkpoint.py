"""When an attempt last said that it saved its work: from then on is what it would lose."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0019_dependencies")]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="checkpoint_at",
            field=models.DateTimeField(
                blank=True, help_text="When it last said that it saved its work.", null=True
            ),
        ),
    ]
