"""What nodes tell of their GPUs: PCIe address, NUMA node, the driver's own memory,
uncorrected errors, and links of pairs."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("portal", "0021_progress")]

    operations = [
        migrations.AddField(
            model_name="gpu",
            name="bus_id",
            field=models.CharField(
                blank=True, help_text="Its PCIe address; blank: not told.", max_length=32
            ),
        ),
        migrations.AddField(
            model_name="gpu",
            name="ecc_uncorrected",
            field=models.PositiveBigIntegerField(
                blank=True,
                help_text="Uncorrected memory errors since its driver was loaded, at the last hello.",
                null=True,
            ),
        ),
        migrations.AlterField(
            model_name="gpu",
            name="health_reason",
            field=models.CharField(blank=True, help_text="Of one that is ok: a warning.", max_length=500),
        ),
        migrations.AddField(
            model_name="gpu",
            name="numa",
            field=models.PositiveSmallIntegerField(
                blank=True,
                help_text="The NUMA node it hangs on; null: not told, or there is but one.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="gpu",
            name="reserved_mib",
            field=models.PositiveIntegerField(
                blank=True,
                help_text="Of its memory, what the driver keeps for itself; null: not told.",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="link",
            name="level",
            field=models.CharField(
                blank=True,
                help_text="Where the two meet on the PCIe bus, as the node's driver says it.",
                max_length=12,
            ),
        ),
        migrations.AddField(
            model_name="link",
            name="lines",
            field=models.PositiveSmallIntegerField(null=True, help_text="How many NVLinks; null: not told."),
        ),
        migrations.AddConstraint(
            model_name="link",
            constraint=models.UniqueConstraint(fields=("kind", "gpu_a", "gpu_b"), name="link_of_gpus_once"),
        ),
    ]
