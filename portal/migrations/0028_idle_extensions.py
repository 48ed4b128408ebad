"""Requests for more time for running jobs."""

import django.db.models.functions.datetime
import portal.models.public_id
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0027_gang'),
    ]

    operations = [
        migrations.CreateModel(
            name='Extension',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', portal.models.public_id.PublicIdField(default=portal.models.public_id.new_public_id, editable=False, max_length=16, unique=True)),
                ('asked_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('more_s', models.PositiveIntegerField()),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('state', models.CharField(help_text='waiting, granted, refused, or lapsed: the job ended.', max_length=10)),
                ('known', models.BooleanField(help_text='The scheduler said whom it would delay.')),
                ('delayed_count', models.PositiveIntegerField(default=0)),
                ('delays', models.JSONField(default=list, help_text='The longest first, at most 20: {job, by_s}; by_s null: nobody knows for how long.')),
                ('beyond', models.BooleanField(default=True, help_text='It delays, or may delay, others than the jobs of its project and those below it.')),
                ('reservations', models.JSONField(default=list, help_text='Names of reservations in the time that is added.')),
                ('decided_at', models.DateTimeField(blank=True, null=True)),
                ('answer', models.CharField(blank=True, help_text='What who decided wrote.', max_length=500)),
                ('asked_by', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('attempt', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='portal.attempt')),
                ('decided_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='extensions', to='portal.job')),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.CheckConstraint(condition=models.Q(('state__in', ['waiting', 'granted', 'refused', 'lapsed'])), name='extension_state'), models.CheckConstraint(condition=models.Q(('more_s__gte', 1)), name='extension_more'), models.UniqueConstraint(condition=models.Q(('state', 'waiting')), fields=('job',), name='extension_one_waits')],
            },
        ),
    ]
