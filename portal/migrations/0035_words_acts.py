"""Acts on nodes over their control channel, upgrades of many nodes, and signals that people send to jobs."""

import django.db.models.deletion
import portal.models.public_id
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0034_term_terminals'),
    ]

    operations = [
        migrations.CreateModel(
            name='Rollout',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', portal.models.public_id.PublicIdField(default=portal.models.public_id.new_public_id, editable=False, max_length=16, unique=True)),
                ('started_at', models.DateTimeField(auto_now_add=True)),
                ('finished_at', models.DateTimeField(blank=True, null=True)),
                ('ok', models.BooleanField(help_text='null: it has not finished.', null=True)),
                ('sentence', models.CharField(blank=True, help_text='How it ended.', max_length=500)),
            ],
        ),
        migrations.CreateModel(
            name='SentSignal',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('signal', models.CharField(max_length=8)),
                ('asked_at', models.DateTimeField(auto_now_add=True)),
                ('sent_at', models.DateTimeField(blank=True, null=True)),
                ('answered_at', models.DateTimeField(blank=True, help_text='null: nobody knows whether it arrived.', null=True)),
            ],
        ),
        migrations.RemoveConstraint(
            model_name='nodecheck',
            name='node_check_kind',
        ),
        migrations.AddField(
            model_name='nodecheck',
            name='begun_at',
            field=models.DateTimeField(blank=True, help_text='Of one over the control channel; null: it waits for its turn.', null=True),
        ),
        migrations.AddField(
            model_name='nodecheck',
            name='program',
            field=models.CharField(blank=True, db_default='', default='', help_text='Digest of what an upgrade has sent.', max_length=64),
        ),
        migrations.AlterField(
            model_name='nodecheck',
            name='kind',
            field=models.CharField(default='test', max_length=12),
        ),
        migrations.AddField(
            model_name='rollout',
            name='actor',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL),
        ),
        migrations.AddField(
            model_name='nodecheck',
            name='rollout',
            field=models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='checks', to='portal.rollout'),
        ),
        migrations.AddIndex(
            model_name='nodecheck',
            index=models.Index(condition=models.Q(('begun_at__isnull', False), ('finished_at__isnull', True)), fields=['node'], name='node_check_due'),
        ),
        migrations.AddConstraint(
            model_name='nodecheck',
            constraint=models.CheckConstraint(condition=models.Q(('kind__in', ['test', 'enrol', 'upgrade', 'preflight', 'gc'])), name='node_check_kind'),
        ),
        migrations.AddField(
            model_name='sentsignal',
            name='actor',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL),
        ),
        migrations.AddField(
            model_name='sentsignal',
            name='attempt',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='signals', to='portal.attempt'),
        ),
        migrations.AddField(
            model_name='sentsignal',
            name='node',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='portal.node'),
        ),
    ]
