"""Knobs that a project holds otherwise than its pools, and alarms about GPUs."""

import django.db.models.deletion
import portal.models.public_id
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0038_image_rooms'),
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
        migrations.CreateModel(
            name='GpuAlarm',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', portal.models.public_id.PublicIdField(default=portal.models.public_id.new_public_id, editable=False, max_length=16, unique=True)),
                ('kind', models.CharField(max_length=8)),
                ('code', models.PositiveIntegerField(default=0, help_text='The XID; of a foreign program 0.')),
                ('who', models.CharField(blank=True, help_text='The foreign program, as its node told it.', max_length=200)),
                ('first_at', models.DateTimeField()),
                ('last_at', models.DateTimeField()),
                ('times', models.PositiveBigIntegerField(default=1)),
                ('over_at', models.DateTimeField(blank=True, help_text='When the foreign program was gone.', null=True)),
                ('acknowledged_at', models.DateTimeField(blank=True, null=True)),
                ('note', models.CharField(blank=True, help_text='What who acknowledged it found.', max_length=500)),
                ('acknowledged_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('gpu', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='alarms', to='portal.gpu')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(condition=models.Q(('acknowledged_at__isnull', True)), fields=['kind', 'code'], name='gpu_alarm_open')],
                'constraints': [models.CheckConstraint(condition=models.Q(('kind__in', ['xid', 'foreign'])), name='gpu_alarm_kind'), models.CheckConstraint(condition=models.Q(('acknowledged_at__isnull', True), ('acknowledged_by__isnull', False), _connector='OR'), name='gpu_alarm_acknowledged_by_somebody'), models.UniqueConstraint(condition=models.Q(('acknowledged_at__isnull', True)), fields=('gpu', 'kind', 'code'), name='gpu_alarm_open_once')],
            },
        ),
    ]
