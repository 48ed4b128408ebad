"""What bounds a job: the image it is pinned to, where its project lets it connect, and the addresses of nodes."""

from django.db import migrations, models

PIN_HELP = (
    "The one image that it runs: name@sha256:... of a registry, or sha256:... of one that was loaded; "
    "blank: not resolved yet."
)
JOB_HELP = "The image of all its attempts, recorded at submit; blank: its first start sets it."


class Migration(migrations.Migration):
    dependencies = [("portal", "0045_hashed_sessions")]

    operations = [
        migrations.AddConstraint(
            model_name="node",
            constraint=models.CheckConstraint(
                condition=models.Q(("account__regex", "^[a-z][a-z0-9-]{0,30}$")), name="node_account"
            ),
        ),
        migrations.AlterField(
            model_name="environment",
            name="image_digest",
            field=models.CharField(blank=True, max_length=600, help_text=PIN_HELP),
        ),
        migrations.AddField(
            model_name="environment",
            name="image_resolved_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="environment",
            name="image_resolved_by",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                max_length=63,
                help_text="Name of the node that resolved its tag.",
            ),
        ),
        migrations.AddField(
            model_name="environment",
            name="image_retagged",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                max_length=600,
                help_text="Another image that its tag names on a node; blank: none is known.",
            ),
        ),
        migrations.AddField(
            model_name="environment",
            name="image_retagged_on",
            field=models.CharField(blank=True, db_default="", default="", max_length=63),
        ),
        migrations.AddField(
            model_name="environment",
            name="check_tag",
            field=models.BooleanField(
                db_default=False,
                default=False,
                help_text="The next node that brings it pulls its tag, not its digest.",
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="image_digest",
            field=models.CharField(blank=True, db_default="", default="", max_length=600, help_text=JOB_HELP),
        ),
        migrations.AddField(
            model_name="project",
            name="egress_allow",
            field=models.JSONField(
                blank=True,
                db_default=[],
                default=list,
                help_text="Where jobs may connect while the policy is listed: networks, with ports; empty: as above it.",
            ),
        ),
        migrations.AddField(
            model_name="node",
            name="addresses",
            field=models.JSONField(
                blank=True,
                null=True,
                help_text="Its addresses as it told them when it was enrolled or taken into service; "
                "null: not told yet.",
            ),
        ),
    ]
