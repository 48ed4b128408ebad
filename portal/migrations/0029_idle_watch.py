"""What is known of the use of workspaces, their countdowns, and reasons to keep them."""

import django.db.models.functions.datetime
import portal.models.public_id
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0028_idle_extensions'),
    ]

    operations = [
        migrations.CreateModel(
            name='Activity',
            fields=[
                ('attempt', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='activity', serialize=False, to='portal.attempt')),
                ('tool_since', models.DateTimeField(help_text='Since then its tool was looked at without a gap.', null=True)),
                ('tool_seen_at', models.DateTimeField(help_text='When its tool was last looked at, and known.', null=True)),
                ('tool_used_at', models.DateTimeField(help_text='When its tool was last known to be used.', null=True)),
                ('gpu_quiet_since', models.DateTimeField(help_text='Begin of the quiet minutes without a gap.', null=True)),
                ('gpu_quiet_until', models.DateTimeField(help_text='Their end; null: the last one was not quiet.', null=True)),
                ('gpu_used_at', models.DateTimeField(help_text='End of the last minute in which a GPU was used.', null=True)),
                ('countdown_at', models.DateTimeField(help_text='Since when its people are told that it is idle.', null=True)),
                ('quiet_since', models.DateTimeField(help_text='As told then: nobody used it since.', null=True)),
                ('stops_at', models.DateTimeField(help_text='When it is suspended; null: it is only told.', null=True)),
                ('snoozed_at', models.DateTimeField(null=True)),
                ('snoozed_until', models.DateTimeField(null=True)),
                ('snoozes', models.PositiveIntegerField(default=0, help_text='Since it was last used.')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('stops_at__isnull', True), ('countdown_at__isnull', False), _connector='OR'), name='activity_stops_after_a_countdown')],
            },
        ),
        migrations.CreateModel(
            name='Excuse',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', portal.models.public_id.PublicIdField(default=portal.models.public_id.new_public_id, editable=False, max_length=16, unique=True)),
                ('text', models.CharField(max_length=500)),
                ('at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('until', models.DateTimeField()),
                ('cut_at', models.DateTimeField(blank=True, null=True)),
                ('by', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('cut_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='excuses', to='portal.job')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(condition=models.Q(('cut_at__isnull', True)), fields=['until'], name='excuse_live')],
                'constraints': [models.UniqueConstraint(fields=('job', 'until'), name='excuse_once'), models.CheckConstraint(condition=models.Q(('cut_at__isnull', True), ('cut_by__isnull', False), _connector='OR'), name='excuse_cut_by_somebody')],
            },
        ),
    ]
