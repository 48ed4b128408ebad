"""Environments that only some projects may run, and images that are to be brought to nodes before a job needs them."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0035_words_acts'),
    ]

    operations = [
        migrations.AddField(
            model_name='environment',
            name='projects',
            field=models.ManyToManyField(blank=True, help_text='Only these, and those below them, may run it; none: all.', related_name='environments', to='portal.project'),
        ),
        migrations.AddField(
            model_name='environmentonnode',
            name='wanted_at',
            field=models.DateTimeField(blank=True, help_text='Since when it is to be brought there; null: nobody asked, or it is over.', null=True),
        ),
        migrations.AddIndex(
            model_name='environmentonnode',
            index=models.Index(condition=models.Q(('wanted_at__isnull', False)), fields=['node'], name='environment_on_node_wanted'),
        ),
    ]
