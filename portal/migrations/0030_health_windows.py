"""Maintenance that asks who is still there to leave when it begins."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0029_idle_watch'),
    ]

    operations = [
        migrations.AddField(
            model_name='reservation',
            name='cleared_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='reservation',
            name='clears',
            field=models.BooleanField(db_default=False, default=False, help_text='Who still stands there when it begins is asked to leave.'),
        ),
    ]
