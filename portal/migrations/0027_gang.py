"""Gangs: where their ranks meet, two steps of a start, launchers, and the network that pools lend."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("portal", "0026_health_trust"),
    ]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="prepared_at",
            field=models.DateTimeField(
                blank=True, help_text="All its tasks were prepared; they may begin.", null=True
            ),
        ),
        migrations.AddField(
            model_name="attempt",
            name="together",
            field=models.BooleanField(
                db_default=False, default=False, help_text="None of its tasks begins before all are prepared."
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="launcher",
            field=models.CharField(
                db_default="none",
                default="none",
                help_text="How its ranks are told of each other.",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="retry_failures",
            field=models.BooleanField(
                db_default=False, default=False, help_text="A command that fails is tried again, too."
            ),
        ),
        migrations.AddField(
            model_name="node",
            name="interface",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="By it the ranks of gangs meet; blank: the one that its agent found.",
                max_length=15,
            ),
        ),
        migrations.AddField(
            model_name="nodepool",
            name="fabric_devices",
            field=models.JSONField(
                db_default=[],
                default=list,
                help_text="Devices that such tasks get, such as /dev/infiniband/uverbs0.",
            ),
        ),
        migrations.AddField(
            model_name="task",
            name="prepared_at",
            field=models.DateTimeField(blank=True, help_text="Its node can start it at once.", null=True),
        ),
        migrations.AddField(
            model_name="task",
            name="sent_at",
            field=models.DateTimeField(
                blank=True,
                help_text="First command that went out for it; known where its attempt begins together.",
                null=True,
            ),
        ),
        migrations.CreateModel(
            name="Rendezvous",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("port", models.PositiveIntegerField()),
                (
                    "address",
                    models.CharField(
                        blank=True,
                        help_text="Of that node; blank: all ranks stand on it, and it knows.",
                        max_length=45,
                    ),
                ),
                (
                    "node_network",
                    models.BooleanField(
                        default=False,
                        help_text="They are on the network of their nodes, not on their job's own.",
                    ),
                ),
                ("devices", models.JSONField(default=list, help_text="Of the fabric, for each task.")),
                (
                    "interfaces",
                    models.JSONField(default=dict, help_text="Public id of a node -> its interface."),
                ),
                ("live", models.BooleanField(default=True, help_text="False: the attempt has ended.")),
                (
                    "attempt",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="rendezvous",
                        to="portal.attempt",
                    ),
                ),
                (
                    "node",
                    models.ForeignKey(
                        help_text="That of rank 0.",
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="portal.node",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("live", True)),
                        fields=("node", "port"),
                        name="rendezvous_port_once",
                    )
                ],
            },
        ),
    ]
