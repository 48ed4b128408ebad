"""Reservations of nodes, for projects or for maintenance, in place of a table of GPUs that nothing ever wrote to."""

import django.contrib.postgres.constraints
import django.contrib.postgres.fields.ranges
import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import portal.models.public_id


class Migration(migrations.Migration):
    dependencies = [("portal", "0015_gpu_facts")]

    operations = [
        migrations.DeleteModel(name="Reservation"),
        migrations.CreateModel(
            name="Reservation",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "public_id",
                    portal.models.public_id.PublicIdField(
                        default=portal.models.public_id.new_public_id,
                        editable=False,
                        max_length=16,
                        unique=True,
                    ),
                ),
                ("name", models.CharField(max_length=100)),
                (
                    "during",
                    django.contrib.postgres.fields.ranges.DateTimeRangeField(
                        help_text="From its begin up to, not including, its end."
                    ),
                ),
                ("reason", models.CharField(blank=True, max_length=500)),
                (
                    "version",
                    models.PositiveIntegerField(default=1, help_text="Moves with each change; the ETag."),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("cancelled_at", models.DateTimeField(blank=True, null=True)),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "pool",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="reservations",
                        to="portal.nodepool",
                    ),
                ),
                (
                    "projects",
                    models.ManyToManyField(blank=True, related_name="reservations", to="portal.project"),
                ),
            ],
        ),
        migrations.CreateModel(
            name="ReservedNode",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "during",
                    django.contrib.postgres.fields.ranges.DateTimeRangeField(
                        help_text="That of its reservation."
                    ),
                ),
                ("live", models.BooleanField(default=True, help_text="False: the reservation is cancelled.")),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="reserved", to="portal.node"
                    ),
                ),
                (
                    "reservation",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="reserved",
                        to="portal.reservation",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("reservation", "node"), name="reserved_node_once"),
                    django.contrib.postgres.constraints.ExclusionConstraint(
                        condition=models.Q(("live", True)),
                        expressions=[("node", "="), ("during", "&&")],
                        name="reserved_node_once_at_a_time",
                    ),
                ],
            },
        ),
    ]
