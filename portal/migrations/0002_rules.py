"""Rules the database keeps by itself: legal moves of state, and an audit trail that only grows."""

from django.db import migrations

from portal.words.states import ATTEMPT_TRANSITIONS, JOB_TRANSITIONS


def _pairs(moves) -> str:
    return ", ".join(f"('{old}', '{new}')" for old in moves for new in sorted(moves[old]))


def _guard(table: str, moves) -> str:
    name = f"{table}_moves"
    return f"""
    CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (OLD.state, NEW.state) NOT IN ({_pairs(moves)}) THEN
            RAISE EXCEPTION 'illegal move of {table} % from % to %', OLD.id, OLD.state, NEW.state
                USING ERRCODE = 'check_violation';
        END IF;
        RETURN NEW;
    END $$;
    DROP TRIGGER IF EXISTS {name} ON {table};
    CREATE TRIGGER {name} BEFORE UPDATE OF state ON {table}
        FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION {name}();
    """


def _unguard(table: str) -> str:
    return f"DROP TRIGGER IF EXISTS {table}_moves ON {table}; DROP FUNCTION IF EXISTS {table}_moves();"


AUDIT = """
    CREATE OR REPLACE FUNCTION portal_audit_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'the audit trail is append-only' USING ERRCODE = 'insufficient_privilege';
    END $$;
    CREATE TRIGGER portal_audit_append_only BEFORE UPDATE OR DELETE ON portal_auditentry
        FOR EACH ROW EXECUTE FUNCTION portal_audit_append_only();
"""
AUDIT_BACK = """
    DROP TRIGGER IF EXISTS portal_audit_append_only ON portal_auditentry;
    DROP FUNCTION IF EXISTS portal_audit_append_only();
"""


class Migration(migrations.Migration):
    dependencies = [("portal", "0001_record")]

    operations = [
        migrations.RunSQL(_guard("portal_job", JOB_TRANSITIONS), _unguard("portal_job")),
        migrations.RunSQL(_guard("portal_attempt", ATTEMPT_TRANSITIONS), _unguard("portal_attempt")),
        migrations.RunSQL(_guard("portal_task", ATTEMPT_TRANSITIONS), _unguard("portal_task")),
        migrations.RunSQL(AUDIT, AUDIT_BACK),
    ]
