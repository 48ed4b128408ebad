"""Backup and restore in the documented shape: an owner that is no superuser, and the services' role."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from portal.database.roles import APPEND_ONLY_TABLES, EXPIRING_TABLES
from portal.standalone.postgres_tools import find_tools
from tests.standalone.postgres_servers import (
    OWNER,
    SERVICES,
    OwnPostgres,
    leftovers,
    own_postgres,
    versions,
)

SEED = """
import json
from django.test import Client
from portal.services.accounts.tokens import Scope, do_create_token, do_revoke_token
from portal.services.accounts.users import do_create_magic_link
from portal.services.projects.secrets import do_save_secret
from tests import factories
admin = factories.user("restored-admin", admin=True)
member = factories.user("restored-member")
project = factories.project("vision", member=member)
def token(name, scope):
    return do_create_token(admin, name=name, scopes=[scope])
def session(user):
    client = Client(SERVER_NAME="localhost")
    client.force_login(user)
    return {name: morsel.value for name, morsel in client.cookies.items()}
do_save_secret(member, member, "hf-token", "hidden")
revoked, revoked_text = token("revoked later", Scope.READ)
print(json.dumps({
    "token": token("kept", Scope.READ)[1], "metrics": token("prometheus", Scope.METRICS)[1],
    "revoked": revoked_text, "revoked_id": revoked.public_id, "session": session(member),
    "ended": session(member), "link": do_create_magic_link(admin, member),
}))
"""
LATER = """
import json, sys
from django.test import Client
from portal.models import Project, User
from portal.services.accounts.tokens import Scope, do_create_token, do_revoke_token
from tests import factories
before = json.loads({before!r})
admin, member = (User.objects.get(username=name) for name in ("restored-admin", "restored-member"))
do_revoke_token(admin, before["revoked_id"])
Client(SERVER_NAME="localhost").post("/sign-in/link/", {{"code": before["link"]}}, follow=True)
ended = Client(SERVER_NAME="localhost")
ended.cookies.load(before["ended"])
ended.logout()
new = Client(SERVER_NAME="localhost")
new.force_login(member)
factories.project("later")
print(json.dumps({{"token": do_create_token(admin, name="later", scopes=[Scope.READ])[1],
    "session": {{name: morsel.value for name, morsel in new.cookies.items()}}}}))
"""
TRY = """
import json
from django.test import Client
from portal.errors import FairwayError
from portal.models import ClusterSettings, Project, User
from portal.services.projects import secrets
from portal.services.encryption import decrypt
from portal.models import Secret
before, later = json.loads({before!r}), json.loads({later!r})
def by_token(text, path="/api/v1/me/"):
    return Client(SERVER_NAME="localhost").get(path, HTTP_AUTHORIZATION=f"Bearer {{text}}").status_code
def by_session(cookies):
    client = Client(SERVER_NAME="localhost")
    client.cookies.load(cookies)
    return client.get("/account/").status_code
by_link = Client(SERVER_NAME="localhost")
by_link.post("/sign-in/link/", {{"code": before["link"]}}, follow=True)
row = Secret.objects.get(name="hf-token")
print(json.dumps({{
    "token": by_token(before["token"]), "metrics": by_token(before["metrics"], "/metrics"),
    "revoked token": by_token(before["revoked"]), "later token": by_token(later["token"]),
    "session": by_session(before["session"]), "ended session": by_session(before["ended"]),
    "later session": by_session(later["session"]),
    "used link": by_link.get("/account/").status_code,
    "secret": decrypt(row.encrypted_value, secrets._encryption_context(row)),
    "projects": sorted(Project.objects.values_list("name", flat=True)),
    "recovery": ClusterSettings.objects.get(id=1).recovery_mode,
}}))
"""


@dataclass
class Installation:
    """Prepared in the documented shape, with rows; backed up, and used since."""

    server: OwnPostgres
    place: Path
    backup: Path
    before: dict[str, Any]
    later: dict[str, Any]
    prepared: str


@pytest.fixture(scope="module", params=versions(every_run=slice(1)))
def installation(request: pytest.FixtureRequest) -> Iterator[Installation]:
    place = Path(tempfile.mkdtemp(prefix="fairway-restore-"))
    with own_postgres(request.param) as server:
        server.create_roles()
        server.create_database("first")
        data = place / "first"
        prepared = server.manage("prepare", database="first", data=data)
        assert prepared.returncode == 0, prepared.stderr
        before = said(server, SEED, "first", data)
        done = server.manage("backup", str(place / "monday.tar"), database="first", data=data)
        assert done.returncode == 0, done.stderr
        later = said(server, LATER.format(before=json.dumps(before)), "first", data)
        yield Installation(server, place, place / "monday.tar", before, later, prepared.stderr)
    shutil.rmtree(place)


def said(server: OwnPostgres, program: str, database: str, data: Path) -> dict[str, Any]:
    done = server.manage("shell", "--verbosity", "0", database=database, data=data, program=program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def tables(server: OwnPostgres, database: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The owner of each table and sequence, and what the services' role may do with it."""
    rows = server.execute(
        "SELECT relation.oid::regclass::text, pg_get_userbyid(relowner)::text, array(SELECT word FROM unnest("
        " CASE WHEN relkind = 'S' THEN array['USAGE', 'SELECT', 'UPDATE'] ELSE array['SELECT', 'INSERT', 'UPDATE',"
        " 'DELETE', 'TRUNCATE', 'TRIGGER', 'REFERENCES'] END) AS word WHERE CASE WHEN relkind = 'S'"
        " THEN has_sequence_privilege(%s, relation.oid, word)"
        " ELSE has_table_privilege(%s, relation.oid, word) END)"
        " FROM pg_class AS relation WHERE relkind IN ('r', 'S')"
        " AND relnamespace IN ('public'::regnamespace, 'mlflow'::regnamespace)",
        SERVICES,
        SERVICES,
        database=database,
    )
    return {name: (owner, tuple(words)) for name, owner, words in rows}


def test_the_owner_owns_every_table_and_the_services_role_uses_them(installation: Installation) -> None:
    found = tables(installation.server, "first")
    assert {owner for owner, _ in found.values()} == {OWNER}
    assert {"mlflow.experiments", "mlflow.alembic_version", "portal_job"} <= set(found)
    use, read = ("SELECT", "INSERT", "UPDATE", "DELETE"), ("SELECT",)
    limited = {"django_migrations": read, "mlflow.alembic_version": read}
    limited |= dict.fromkeys(APPEND_ONLY_TABLES, ("SELECT", "INSERT"))
    limited |= dict.fromkeys(EXPIRING_TABLES, ("SELECT", "INSERT", "DELETE"))
    sequences = {name for name, (_, words) in found.items() if "USAGE" in words}
    for name, (_, words) in found.items():
        assert words == (("USAGE", "SELECT") if name in sequences else limited.get(name, use)), name
    rows = installation.server.execute(
        "SELECT nspname::text, pg_get_userbyid(nspowner)::text, has_schema_privilege(%s, oid, 'CREATE')"
        " FROM pg_namespace WHERE nspname IN ('public', 'mlflow')",
        SERVICES,
        database="first",
    )
    assert {name: may_create for name, _, may_create in rows} == {"public": False, "mlflow": False}
    assert dict(row[:2] for row in rows)["mlflow"] == OWNER
    assert "Backup and restore" not in installation.prepared


def test_what_is_restored_equals_what_was_backed_up(installation: Installation) -> None:
    server, data = installation.server, installation.place / "second"
    server.create_database("second")
    done = server.manage("restore", str(installation.backup), database="second", data=data)
    assert done.returncode == 0, done.stderr
    assert tables(server, "second") == tables(server, "first")
    for name in ("secret_key", "keys/control_ed25519", "keys/control_ed25519.pub"):
        assert (data / name).read_bytes() == (installation.place / "first" / name).read_bytes()
    assert not (data / "run/restore.json").exists()
    again = server.manage("prepare", database="second", data=data)
    assert again.returncode == 0 and "Backup and restore" not in again.stderr, again.stderr

    before, later = json.dumps(installation.before), json.dumps(installation.later)
    works = said(server, TRY.format(before=before, later=later), "second", data)
    assert works == {
        "token": 200, "metrics": 200, "revoked token": 200, "later token": 401,
        "session": 200, "ended session": 200, "later session": 302,
        "used link": 200, "secret": "hidden", "projects": ["default", "vision"], "recovery": True,
    }  # fmt: skip
    assert "API tokens: 3 of the backup work, 1 of them for /metrics" in done.stdout
    assert "Sessions: 2 of the backup continue" in done.stdout
    assert "Links: 2 sign-in links" in done.stdout, "that of the first administrator, and the used one"
    assert "cannot be read" not in done.stdout
    backed_up = server.manage("backup", str(installation.place / "again.tar"), database="second", data=data)
    assert backed_up.returncode == 0, backed_up.stderr


def test_secrets_that_another_key_cannot_read_are_named(installation: Installation) -> None:
    server, data = installation.server, installation.place / "other-key"
    server.create_database("other-key")
    key = {"FAIRWAY_SECRET_KEY": "".join(map(chr, range(48, 123)))}
    done = server.manage("restore", str(installation.backup), database="other-key", data=data, **key)
    assert done.returncode == 0, done.stderr
    assert "Secrets: 1 of 1 stored secrets cannot be read" in done.stdout
    kept = server.manage(
        "backup", str(installation.place / "key.tar"), database="other-key", data=data, **key
    )
    assert "does not contain FAIRWAY_SECRET_KEY" in kept.stdout, kept.stderr


def test_a_refusal_is_one_sentence_and_leaves_nothing(installation: Installation) -> None:
    server, data, file = installation.server, installation.place / "refused", str(installation.backup)
    server.create_database("refused")

    def refusal(**variables: str) -> str:
        done = server.manage("restore", file, database="refused", data=data, **variables)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert leftovers(server, "refused", data) == []
        return done.stderr

    address = server.environment("refused", data)["DATABASE_OWNER_URL"]
    assert "password authentication failed" in refusal(
        DATABASE_OWNER_URL=address.replace("only-here", "wrong")
    )
    server.execute(
        f'ALTER DATABASE refused OWNER TO postgres; GRANT CREATE ON SCHEMA public TO "{OWNER}"',
        database="refused",
    )
    assert f'GRANT CREATE ON DATABASE "refused" TO "{OWNER}"' in refusal()
    server.execute(f'GRANT CREATE ON DATABASE refused TO "{OWNER}"')
    server.execute(f'REVOKE CREATE ON SCHEMA public FROM "{OWNER}"', database="refused")
    assert f'GRANT CREATE ON SCHEMA public TO "{OWNER}"' in refusal()
    server.execute(f'ALTER DATABASE refused OWNER TO "{OWNER}"')
    damaged = installation.place / "damaged-dump.tar"
    _break_dump(installation.backup, damaged)
    file = str(damaged)
    assert "pg_restore failed" in refusal()
    file = str(installation.backup)
    server.execute("CREATE TABLE mine (id int)", database="refused")
    done = server.manage("restore", file, database="refused", data=data)
    assert "The database is not empty (public.mine)" in done.stderr
    server.execute("DROP TABLE mine", database="refused")
    done = server.manage("restore", file, database="refused", data=data)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_server_without_the_extension_is_refused(installation: Installation) -> None:
    data = installation.place / "without-extension"
    with own_postgres(16) as server:
        server.create_roles()
        server.create_database("bare")
        done = server.manage("restore", str(installation.backup), database="bare", data=data)
        assert "The database server has no extension btree_gist" in done.stderr, done.stderr
        assert done.returncode == 1 and leftovers(server, "bare", data) == []


def test_a_backup_moves_to_a_newer_version_and_not_to_an_older_one(installation: Installation) -> None:
    """From each version to the newest; a file that only newer programs read is refused by an older server."""
    newest = max(find_tools("pg_dump", 15), key=lambda tool: tool.major).major
    data = installation.place / "moved"
    with own_postgres(newest) as server:
        server.create_roles()
        server.create_database("moved")
        done = server.manage("restore", str(installation.backup), database="moved", data=data)
        assert done.returncode == 0, done.stderr
        file = installation.place / "newest.tar"
        done = server.manage("backup", str(file), database="moved", data=data)
        assert done.returncode == 0, done.stderr
    installation.server.create_database("older")
    data = installation.place / "older"
    done = installation.server.manage("restore", str(file), database="older", data=data)
    if installation.server.binaries.major >= 17:
        assert done.returncode == 0, done.stderr
    else:
        assert "restore it into PostgreSQL 17 or newer" in done.stderr, done.stderr
        assert done.returncode == 1 and leftovers(installation.server, "older", data) == []


def _break_dump(source: Path, target: Path) -> None:
    """The same backup, whose dump ends in the middle, with the checksum of that."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        contents = {each.name: old.extractfile(each).read() for each in old.getmembers()}  # type: ignore[union-attr]
        dump = contents["database.dump"]
        contents["database.dump"] = dump[: len(dump) * 3 // 4]
        manifest = json.loads(contents["manifest.json"])
        manifest["files"]["database.dump"] = hashlib.sha256(contents["database.dump"]).hexdigest()
        contents["manifest.json"] = json.dumps(manifest).encode()
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
