"""Lets retention delete old rows of histories; triggers refuse the deletion of newer ones, also to the owner."""

from django.db import migrations

KEEP_RECENT = """
    CREATE FUNCTION portal_keep_recent_rows() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (to_jsonb(OLD) ->> TG_ARGV[0])::timestamptz > now() - TG_ARGV[1]::interval THEN
            RAISE EXCEPTION 'rows of % are kept for %', TG_TABLE_NAME, TG_ARGV[1]
                USING ERRCODE = 'insufficient_privilege';
        END IF;
        RETURN OLD;
    END $$;
    CREATE TRIGGER portal_jobevent_keep_recent BEFORE DELETE ON portal_jobevent
        FOR EACH ROW EXECUTE FUNCTION portal_keep_recent_rows('at', '30 days');
    CREATE TRIGGER portal_attemptwork_keep_recent BEFORE DELETE ON portal_attemptwork
        FOR EACH ROW EXECUTE FUNCTION portal_keep_recent_rows('ended_at', '400 days');
    DROP TRIGGER portal_audit_append_only ON portal_auditentry;
    CREATE TRIGGER portal_audit_append_only BEFORE UPDATE ON portal_auditentry
        FOR EACH ROW EXECUTE FUNCTION portal_audit_append_only();
    CREATE TRIGGER portal_auditentry_keep_recent BEFORE DELETE ON portal_auditentry
        FOR EACH ROW EXECUTE FUNCTION portal_keep_recent_rows('at', '400 days');
"""
KEEP_ALL = """
    DROP TRIGGER portal_auditentry_keep_recent ON portal_auditentry;
    DROP TRIGGER portal_audit_append_only ON portal_auditentry;
    CREATE TRIGGER portal_audit_append_only BEFORE UPDATE OR DELETE ON portal_auditentry
        FOR EACH ROW EXECUTE FUNCTION portal_audit_append_only();
    DROP TRIGGER portal_attemptwork_keep_recent ON portal_attemptwork;
    DROP TRIGGER portal_jobevent_keep_recent ON portal_jobevent;
    DROP FUNCTION portal_keep_recent_rows();
"""


class Migration(migrations.Migration):
    dependencies = [("portal", "0004_bulk_operations")]

    operations = [migrations.RunSQL(KEEP_RECENT, KEEP_ALL)]
