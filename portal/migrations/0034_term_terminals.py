"""Terminals in running tasks."""

import django.db.models.deletion
import django.db.models.functions.datetime
import portal.models.public_id
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0033_store_registries'),
    ]

    operations = [
        migrations.CreateModel(
            name='Terminal',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', portal.models.public_id.PublicIdField(default=portal.models.public_id.new_public_id, editable=False, max_length=16, unique=True)),
                ('session_key', models.CharField(max_length=64)),
                ('secret', models.CharField(help_text='Sealed: by it the node knows the gateway.', max_length=255)),
                ('cols', models.PositiveIntegerField()),
                ('rows', models.PositiveIntegerField()),
                ('asked_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('port', models.PositiveIntegerField(help_text="On the node's loopback; null: not opened yet.", null=True)),
                ('refusal', models.CharField(blank=True, default='', help_text='Why it was not opened.', max_length=300)),
                ('entered_at', models.DateTimeField(null=True)),
                ('closed_at', models.DateTimeField(null=True)),
                ('task', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='terminals', to='portal.task')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('closed_at__isnull', True), ('port__isnull', True), ('refusal', '')), fields=['task'], name='terminal_to_open'), models.Index(condition=models.Q(('closed_at__isnull', True)), fields=['user'], name='terminal_open')],
            },
        ),
    ]
