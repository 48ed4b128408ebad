"""Sessions are found by a hash of their key. Every session that was stored in the clear ends: people sign in again."""

from django.db import migrations, models


def end_sessions(apps, schema_editor):
    apps.get_model("sessions", "Session").objects.all().delete()
    apps.get_model("portal", "WorkspaceTicket").objects.all().delete()
    apps.get_model("portal", "WorkspaceSession").objects.all().delete()
    apps.get_model("portal", "Terminal").objects.update(session_key="")


class Migration(migrations.Migration):

    dependencies = [
        ("portal", "0043_invalid_rows"),
        ('sessions', '0001_initial'),
    ]

    operations = [
        migrations.RunPython(end_sessions, migrations.RunPython.noop),
        migrations.CreateModel(
            name='BrowserSession',
            fields=[
                ('session_data', models.TextField(verbose_name='session data')),
                ('expire_date', models.DateTimeField(db_index=True, verbose_name='expire date')),
                ('session_key', models.CharField(help_text="SHA-256 of the cookie's key.", max_length=64, primary_key=True, serialize=False)),
            ],
        ),
        migrations.AlterField(
            model_name='terminal',
            name='session_key',
            field=models.CharField(help_text='Of the row of the portal session: a hash.', max_length=64),
        ),
        migrations.AlterField(
            model_name='workspacesession',
            name='session_key',
            field=models.CharField(help_text='Of the row of the portal session: a hash.', max_length=64),
        ),
        migrations.AlterField(
            model_name='workspaceticket',
            name='session_key',
            field=models.CharField(help_text='Of the row of the portal session: a hash.', max_length=64),
        ),
    ]
