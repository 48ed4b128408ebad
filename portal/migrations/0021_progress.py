"""How far attempts have come, as their programs tell it, and how their GPUs lay."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0020_checkpoint'),
    ]

    operations = [
        migrations.CreateModel(
            name='Progress',
            fields=[
                ('attempt', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='progress', serialize=False, to='portal.attempt')),
                ('rank', models.PositiveIntegerField(help_text='The task that tells; the lowest of those that do.')),
                ('since_done', models.FloatField()),
                ('since_at', models.DateTimeField()),
                ('done', models.FloatField()),
                ('at', models.DateTimeField()),
                ('work', models.CharField(help_text='Equal for jobs whose rates may be compared.', max_length=32)),
                ('gpus', models.PositiveIntegerField(help_text='GPUs in all.')),
                ('gpu_model', models.CharField(help_text='Of several models all of them.', max_length=500)),
                ('nodes', models.PositiveIntegerField()),
                ('islands', models.PositiveIntegerField(help_text='NVLink islands, over all nodes.')),
                ('levels', models.PositiveIntegerField(help_text='Levels of the fabric that it crosses.')),
            ],
            options={
                'indexes': [models.Index(fields=['work', '-attempt'], name='progress_of_work')],
                'constraints': [models.CheckConstraint(condition=models.Q(('at__gte', models.F('since_at')), ('done__gte', models.F('since_done')), ('since_done__gte', 0)), name='progress_forward')],
            },
        ),
    ]
