"""Volumes that administrators declare, and those that jobs name."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("portal", "0030_health_windows"),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name="volume",
            name="volume_kind",
        ),
        # The column stays until the next version: processes of the last one still read it.
        migrations.SeparateDatabaseAndState(
            state_operations=[migrations.RemoveField(model_name="volume", name="project")]
        ),
        migrations.AddField(
            model_name="job",
            name="volumes",
            field=models.JSONField(
                db_default=[], default=list, help_text="[{volume (by name), target, read_only}, ...]"
            ),
        ),
        migrations.AddField(
            model_name="volume",
            name="description",
            field=models.CharField(blank=True, db_default="", default="", max_length=500),
        ),
        migrations.AddField(
            model_name="volume",
            name="nodes",
            field=models.ManyToManyField(
                blank=True,
                help_text="Only these have it; none: all.",
                related_name="declared_volumes",
                to="portal.node",
            ),
        ),
        migrations.AddField(
            model_name="volume",
            name="pool",
            field=models.ForeignKey(
                blank=True,
                help_text="Only nodes of this pool have it; None: of any.",
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="volumes",
                to="portal.nodepool",
            ),
        ),
        migrations.AddField(
            model_name="volume",
            name="projects",
            field=models.ManyToManyField(
                blank=True,
                help_text="Only these may use it; none: all.",
                related_name="volumes",
                to="portal.project",
            ),
        ),
        migrations.AddField(
            model_name="volume",
            name="quota_mib",
            field=models.PositiveBigIntegerField(
                blank=True, help_text="What one folder may hold, where the file system sees to it.", null=True
            ),
        ),
        migrations.AddField(
            model_name="volume",
            name="read_only",
            field=models.BooleanField(db_default=False, default=False, help_text="No job changes it."),
        ),
        migrations.AddConstraint(
            model_name="volume",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["home", "project", "dataset", "path", "nfs", "scratch"])),
                name="volume_kind",
            ),
        ),
        migrations.AddConstraint(
            model_name="volume",
            constraint=models.CheckConstraint(
                condition=models.Q(("owner__isnull", True), ("kind", "home"), _connector="OR"),
                name="volume_of_a_person_is_home",
            ),
        ),
        migrations.AddConstraint(
            model_name="volume",
            constraint=models.UniqueConstraint(
                condition=models.Q(("owner__isnull", True)), fields=("name",), name="volume_declared_once"
            ),
        ),
        migrations.AddConstraint(
            model_name="volume",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "home"), ("owner__isnull", True)),
                fields=("kind",),
                name="volume_one_declared_home",
            ),
        ),
    ]
