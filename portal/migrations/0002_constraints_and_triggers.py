"""Rules the database enforces: legal state transitions, and an append-only audit trail."""

from collections.abc import Mapping

from django.db import migrations

from portal.domain.states import ATTEMPT_TRANSITIONS, JOB_TRANSITIONS


def _pairs(transitions: Mapping[str, frozenset[str]]) -> str:
    return ", ".join(f"('{old}', '{new}')" for old in transitions for new in sorted(transitions[old]))


def _transition_trigger(table: str, transitions: Mapping[str, frozenset[str]]) -> str:
    name = f"{table}_transitions"
    return f"""
    CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (OLD.state, NEW.state) NOT IN ({_pairs(transitions)}) THEN
            RAISE EXCEPTION 'invalid transition of {table} % from % to %', OLD.id, OLD.state, NEW.state
                USING ERRCODE = 'check_violation';
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER {name} BEFORE UPDATE OF state ON {table}
        FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION {name}();
    """


def _drop_transition_trigger(table: str) -> str:
    return f"DROP TRIGGER {table}_transitions ON {table}; DROP FUNCTION {table}_transitions();"


APPEND_ONLY = """
    CREATE FUNCTION portal_audit_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'the audit trail is append-only' USING ERRCODE = 'insufficient_privilege';
    END $$;
    CREATE TRIGGER portal_audit_append_only BEFORE UPDATE OR DELETE ON portal_auditentry
        FOR EACH ROW EXECUTE FUNCTION portal_audit_append_only();
    CREATE TRIGGER portal_audit_no_truncate BEFORE TRUNCATE ON portal_auditentry
        FOR EACH STATEMENT EXECUTE FUNCTION portal_audit_append_only();
"""
DROP_APPEND_ONLY = """
    DROP TRIGGER portal_audit_no_truncate ON portal_auditentry;
    DROP TRIGGER portal_audit_append_only ON portal_auditentry;
    DROP FUNCTION portal_audit_append_only();
"""


class Migration(migrations.Migration):
    dependencies = [("portal", "0001_initial")]

    operations = [
        *(
            migrations.RunSQL(_transition_trigger(table, transitions), _drop_transition_trigger(table))
            for table, transitions in (
                ("portal_job", JOB_TRANSITIONS),
                ("portal_attempt", ATTEMPT_TRANSITIONS),
                ("portal_task", ATTEMPT_TRANSITIONS),
            )
        ),
        migrations.RunSQL(APPEND_ONLY, DROP_APPEND_ONLY),
    ]
