"""What keeps jobs off GPUs: a driver too old for their environment, and programs that are no job's."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0023_elastic")]

    operations = [
        migrations.AddField(
            model_name="environment",
            name="min_driver",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="NVIDIA's driver must be at least this one, such as 525.60.13; blank: any will do.",
                max_length=20,
            ),
        ),
        migrations.AddField(
            model_name="gpu",
            name="foreign_user",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="Whose program that is no job's works on it, told by the node; while so nothing new comes.",
                max_length=200,
            ),
        ),
    ]
