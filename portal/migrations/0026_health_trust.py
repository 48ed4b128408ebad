"""How far nodes are trusted with work, and what befell them."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0025_energy'),
    ]

    operations = [
        migrations.CreateModel(
            name='NodeTrouble',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('trouble', models.CharField(max_length=16)),
                ('sentence', models.CharField(blank=True, max_length=500)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.AddField(
            model_name='node',
            name='on_trial',
            field=models.ForeignKey(blank=True, help_text='The one attempt with which it is tried.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='portal.attempt'),
        ),
        migrations.AddField(
            model_name='node',
            name='tripped_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='node',
            name='trips',
            field=models.PositiveIntegerField(db_default=0, default=0, help_text='How often it was aside of late.'),
        ),
        migrations.AddField(
            model_name='node',
            name='trust',
            field=models.CharField(db_default='trusted', default='trusted', max_length=8),
        ),
        migrations.AddField(
            model_name='node',
            name='trust_cause',
            field=models.CharField(blank=True, db_default='', default='', max_length=16),
        ),
        migrations.AddField(
            model_name='node',
            name='trust_sentence',
            field=models.CharField(blank=True, db_default='', default='', help_text='Why it is not trusted.', max_length=500),
        ),
        migrations.AddField(
            model_name='node',
            name='trust_since',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='node',
            name='try_at',
            field=models.DateTimeField(blank=True, help_text='Aside until then; null: until it is rid.', null=True),
        ),
        migrations.AddConstraint(
            model_name='node',
            constraint=models.CheckConstraint(condition=models.Q(('trust__in', ['trusted', 'aside', 'trial'])), name='node_trust'),
        ),
        migrations.AddField(
            model_name='nodetrouble',
            name='job',
            field=models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='portal.job'),
        ),
        migrations.AddField(
            model_name='nodetrouble',
            name='node',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='troubles', to='portal.node'),
        ),
        migrations.AddIndex(
            model_name='nodetrouble',
            index=models.Index(fields=['node', '-at'], name='trouble_of_node'),
        ),
        migrations.AddIndex(
            model_name='nodetrouble',
            index=models.Index(fields=['at'], name='trouble_by_age'),
        ),
        migrations.AddConstraint(
            model_name='nodetrouble',
            constraint=models.CheckConstraint(condition=models.Q(('trouble__in', ['start_refused', 'failed_soon', 'no_answer', 'link_lost', 'stuck'])), name='node_trouble_kind'),
        ),
    ]
