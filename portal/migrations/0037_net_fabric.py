"""What a pool names for gangs on several nodes, what nodes lack of it, and whether nodes reach each other."""


import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0036_compose_environments'),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name='nodetrouble',
            name='node_trouble_kind',
        ),
        migrations.AddField(
            model_name='node',
            name='lacks',
            field=models.CharField(blank=True, db_default='', default='', help_text='What it has not of what its pool names for gangs on several nodes, as sentences.', max_length=1000),
        ),
        migrations.AddField(
            model_name='nodepool',
            name='fabric_adapters',
            field=models.CharField(blank=True, db_default='', default='', help_text='What NCCL_IB_HCA says there.', max_length=200),
        ),
        migrations.AddField(
            model_name='nodepool',
            name='fabric_interface',
            field=models.CharField(blank=True, db_default='', default='', help_text='By it, or in this network, its nodes reach each other; blank: as each agent finds.', max_length=50),
        ),
        migrations.AddField(
            model_name='nodepool',
            name='fabric_network',
            field=models.CharField(blank=True, db_default='', default='', help_text="A network of the engine that such tasks join in place of their node's.", max_length=63),
        ),
        migrations.AddField(
            model_name='nodetrouble',
            name='peer',
            field=models.ForeignKey(blank=True, help_text='The other one, of a trouble between two.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='portal.node'),
        ),
        migrations.AddField(
            model_name='rendezvous',
            name='adapters',
            field=models.CharField(blank=True, db_default='', default='', help_text='What NCCL_IB_HCA says.', max_length=200),
        ),
        migrations.AddField(
            model_name='rendezvous',
            name='doubted',
            field=models.BooleanField(db_default=False, default=False, help_text='A node did not reach it, so its node was asked again.'),
        ),
        migrations.AddField(
            model_name='rendezvous',
            name='network',
            field=models.CharField(blank=True, db_default='', default='', help_text='Of the engine, in place of that.', max_length=63),
        ),
        migrations.AddField(
            model_name='rendezvous',
            name='tried',
            field=models.BooleanField(db_default=False, default=False, help_text='Before any rank begins, the other nodes try to reach it.'),
        ),
        migrations.AddField(
            model_name='rendezvous',
            name='trying_since',
            field=models.DateTimeField(blank=True, help_text='All are prepared, and its node listens; null: not yet, or anew.', null=True),
        ),
        migrations.AddField(
            model_name='task',
            name='reached_at',
            field=models.DateTimeField(blank=True, help_text='Its node reached the place where its gang will meet.', null=True),
        ),
        migrations.AddConstraint(
            model_name='nodetrouble',
            constraint=models.CheckConstraint(condition=models.Q(('trouble__in', ['start_refused', 'failed_soon', 'no_answer', 'link_lost', 'stuck', 'cut_off'])), name='node_trouble_kind'),
        ),
        migrations.AddConstraint(
            model_name='rendezvous',
            constraint=models.UniqueConstraint(condition=models.Q(('live', True), models.Q(('network', ''), _negated=True)), fields=('network', 'address'), name='rendezvous_address_once'),
        ),
    ]
