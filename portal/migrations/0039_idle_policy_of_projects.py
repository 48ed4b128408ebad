"""Knobs that a project holds otherwise than its pools."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0036_compose_environments'),
    ]

    operations = [
        migrations.AddField(
            model_name='project',
            name='policy',
            field=models.JSONField(db_default={}, default=dict, help_text='Knobs that it holds otherwise than its pools; so do those below it.'),
        ),
        migrations.AddField(
            model_name='project',
            name='policy_version',
            field=models.PositiveIntegerField(db_default=1, default=1, help_text='Moves with each change of these; the ETag.'),
        ),
    ]
