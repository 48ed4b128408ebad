"""What nodes run that a restored record does not know, and jobs known only by their containers."""

import django.db.models.deletion
import portal.models.public_id
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("portal", "0005_room_made"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="stub",
            field=models.BooleanField(
                default=False,
                help_text="Known only by its container, found after a restore: it cannot start again.",
            ),
        ),
        migrations.CreateModel(
            name="UnknownContainer",
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
                ("name", models.CharField(max_length=120)),
                ("job", models.CharField(help_text="Public id on its labels.", max_length=64)),
                ("attempt", models.PositiveIntegerField()),
                ("rank", models.PositiveIntegerField()),
                ("owner", models.CharField(blank=True, help_text="Public id on its labels.", max_length=64)),
                (
                    "project",
                    models.CharField(blank=True, help_text="Public id on its labels.", max_length=64),
                ),
                ("gpus", models.JSONField(default=list, help_text="[{uuid, milli}] as the node holds them.")),
                (
                    "ports",
                    models.JSONField(
                        default=dict, help_text="Container port -> port on the node's loopback."
                    ),
                ),
                ("started_at", models.DateTimeField(null=True)),
                ("first_seen_at", models.DateTimeField(auto_now_add=True)),
                ("wanted", models.CharField(blank=True, max_length=4)),
                ("decided_at", models.DateTimeField(null=True)),
                (
                    "gone_at",
                    models.DateTimeField(
                        help_text="Proof that it lives no more, or an admin's word.", null=True
                    ),
                ),
                (
                    "decided_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="unknown_containers",
                        to="portal.node",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("node", "name"), name="unknown_container_once"),
                    models.CheckConstraint(
                        condition=models.Q(("wanted__in", ["", "stop", "keep"])),
                        name="unknown_container_wanted",
                    ),
                ],
            },
        ),
    ]
