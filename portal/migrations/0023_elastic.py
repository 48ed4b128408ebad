"""Elastic jobs: how few tasks are enough, and which tasks were asked to leave while the others go on."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0022_seen")]

    operations = [
        migrations.AddField(
            model_name="job",
            name="min_tasks",
            field=models.PositiveIntegerField(
                blank=True, help_text="So many of its tasks are enough to run; None: all of them.", null=True
            ),
        ),
        migrations.AddConstraint(
            model_name="job",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("min_tasks__isnull", True),
                    models.Q(
                        ("min_tasks__gte", 1),
                        ("min_tasks__lte", models.F("tasks")),
                        models.Q(("kind", "workspace"), _negated=True),
                    ),
                    _connector="OR",
                ),
                name="job_min_tasks",
            ),
        ),
        migrations.AddField(
            model_name="attempt",
            name="failed_tasks",
            field=models.PositiveIntegerField(
                db_default=0,
                default=0,
                help_text="Tasks of an elastic job that failed while the others went on.",
            ),
        ),
        migrations.AddField(
            model_name="attempt",
            name="grow_after",
            field=models.DateTimeField(
                blank=True,
                help_text="Its missing tasks wait at least until then: one has just failed.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="task",
            name="among",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="How many tasks an elastic job had once this one was placed.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="task",
            name="leave_wanted_at",
            field=models.DateTimeField(
                blank=True, help_text="Asked to leave alone, while the others go on.", null=True
            ),
        ),
        migrations.AddField(
            model_name="task",
            name="leave_reason",
            field=models.CharField(blank=True, db_default="", default="", max_length=40),
        ),
    ]
