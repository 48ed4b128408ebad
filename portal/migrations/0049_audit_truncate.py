"""The audit trail cannot be emptied by TRUNCATE either, not even by its owner."""

from django.db import migrations

REFUSE = """
    CREATE TRIGGER portal_audit_no_truncate BEFORE TRUNCATE ON portal_auditentry
        FOR EACH STATEMENT EXECUTE FUNCTION portal_audit_append_only();
"""


class Migration(migrations.Migration):
    dependencies = [("portal", "0047_job_boundaries")]

    operations = [
        migrations.RunSQL(REFUSE, "DROP TRIGGER IF EXISTS portal_audit_no_truncate ON portal_auditentry"),
    ]
