"""What a tag names on a node is kept with that node, and no longer in the row that all share."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0049_audit_truncate")]

    operations = [
        migrations.RemoveField(model_name="environment", name="check_tag"),
        migrations.RemoveField(model_name="environment", name="image_retagged"),
        migrations.RemoveField(model_name="environment", name="image_retagged_on"),
        migrations.AlterField(
            model_name="environment",
            name="image_resolved_by",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                max_length=200,
                help_text="Names of the nodes that agreed on it, or of the administrator who chose it.",
            ),
        ),
        migrations.AddField(
            model_name="environmentonnode",
            name="image_pin",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                max_length=600,
                help_text="The image that the tag names there, as this node reported; blank: none, or not reported.",
            ),
        ),
        migrations.AddField(
            model_name="environmentonnode",
            name="check_tag",
            field=models.BooleanField(
                default=False,
                db_default=False,
                help_text="The next time that this node brings it, it pulls the tag, not the digest.",
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="image_attempt",
            field=models.PositiveIntegerField(
                blank=True,
                null=True,
                help_text="Number of the attempt whose node alone named that image; null: the environment did.",
            ),
        ),
    ]
