"""Images that stay on a node because they were wanted there, what images ask of a driver, and nodes that come back."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('portal', '0037_net_fabric'),
    ]

    operations = [
        migrations.AddField(
            model_name='environment',
            name='image_cuda',
            field=models.CharField(blank=True, db_default='', default='', help_text='CUDA that its image asks of the driver, told by a node that has it; blank: none, or unknown.', max_length=8),
        ),
        migrations.AddField(
            model_name='environment',
            name='min_cuda',
            field=models.CharField(blank=True, db_default='', default='', help_text='By administrators, in place of image_cuda: a version, or none; blank: what the image says.', max_length=8),
        ),
        migrations.AddField(
            model_name='environmentonnode',
            name='ahead',
            field=models.BooleanField(db_default=False, default=False, help_text='An administrator wanted it there ahead of jobs: it stays while it is offered.'),
        ),
        migrations.AddField(
            model_name='nodecheck',
            name='reason',
            field=models.CharField(blank=True, db_default='', default='', help_text='Why it comes back, by who asked.', max_length=500),
        ),
        migrations.AddField(
            model_name='nodecheck',
            name='returns',
            field=models.BooleanField(db_default=False, default=False, help_text='Of a check: when it finds nothing amiss, the node is taken back into service.'),
        ),
    ]
