"""Logins to registries."""

import portal.models.public_id
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("portal", "0032_store_secrets"),
    ]

    operations = [
        migrations.CreateModel(
            name="RegistryLogin",
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
                (
                    "host",
                    models.CharField(
                        help_text="As images name it, port included.", max_length=255, unique=True
                    ),
                ),
                ("username", models.CharField(max_length=255)),
                ("sealed", models.TextField(help_text="The password; it opens only in this row.")),
                ("changed_at", models.DateTimeField(auto_now=True)),
                ("changed_by", models.CharField(max_length=63)),
            ],
        ),
    ]
