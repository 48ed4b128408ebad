"""A database and a data folder of different clusters are refused before either is changed."""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from agents.keys import PURPOSES, cluster_of_keys, key_path, make_keys
from portal.database.roles import as_owner
from portal.models import ClusterSettings
from portal.services.nodes import enrolment
from portal.standalone import cluster_match
from portal.standalone.cluster_match import check_same_cluster
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

CLUSTER = "kept2345ab"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: object) -> Iterator[DataDir]:
    monkeypatch.setenv("FAIRWAY_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("FAIRWAY_SECRET_KEY", raising=False)
    made = DataDir(tmp_path / "data", None)
    made.prepare()
    settings.DATA_DIR, settings.KEY_DIR = made.root, made.keys  # type: ignore[attr-defined]
    return made


@pytest.fixture
def cluster() -> None:
    ClusterSettings.objects.all().delete()
    ClusterSettings.objects.create(id=1, cluster_id=CLUSTER)
    factories.user()


@pytest.fixture
def new_database() -> None:
    ClusterSettings.objects.all().delete()


def files(folder: DataDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("cluster")
def test_a_database_whose_keys_are_elsewhere_is_refused_and_no_key_is_written(folder: DataDir) -> None:
    before = files(folder)
    with pytest.raises(
        StartError, match=f"belongs to the cluster {CLUSTER}, whose keys are not in"
    ) as caught:
        check_same_cluster(folder)
    assert all(f"{purpose}_ed25519" in str(caught.value) for purpose in PURPOSES)
    with pytest.raises(CommandError, match="restore a backup into a new data folder"):
        call_command("prepare")
    assert files(folder) == before


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("lost", [*PURPOSES, "secret_key"])
def test_a_data_folder_that_lost_a_key_gets_no_new_one(folder: DataDir, lost: str) -> None:
    make_keys(folder.keys, CLUSTER)
    folder.ensure_secret_key()
    check_same_cluster(folder)
    path = folder.secret_key if lost == "secret_key" else key_path(folder.keys, lost)  # type: ignore[arg-type]
    path.unlink()
    with pytest.raises(StartError, match=rf"missing: {path.name}\)"):
        check_same_cluster(folder)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("lost", ["empty", "folder", "dangling link", "link to itself"])
def test_a_key_that_is_no_key_is_missing(folder: DataDir, lost: str) -> None:
    make_keys(folder.keys, CLUSTER)
    folder.ensure_secret_key()
    path = key_path(folder.keys, "watch")
    content = path.read_bytes()
    path.unlink()
    if lost == "empty":
        path.touch()
    elif lost == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if lost == "link to itself" else folder.root / "nowhere")
    with pytest.raises(StartError, match=r"missing: watch_ed25519\)"):
        check_same_cluster(folder)
    path.rmdir() if lost == "folder" else path.unlink()
    (folder.root / "elsewhere").write_bytes(content)
    path.symlink_to(folder.root / "elsewhere")
    check_same_cluster(folder)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"ssh-ed25519", None])
def test_public_keys_that_cannot_be_read_name_no_cluster(folder: DataDir, content: bytes | None) -> None:
    make_keys(folder.keys, CLUSTER)
    folder.ensure_secret_key()
    public = [key_path(folder.keys, purpose).with_suffix(".pub") for purpose in PURPOSES]
    for path in public:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    assert cluster_of_keys(folder.keys) == ""
    check_same_cluster(folder)


@pytest.mark.usefixtures("cluster")
def test_a_database_that_the_role_may_not_read_is_one_sentence(
    folder: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(folder.keys, CLUSTER)
    with connection.cursor() as cursor:
        cursor.execute("SELECT quote_ident(current_user)")
        role = cursor.fetchone()[0]
    with as_owner(), connection.cursor() as cursor:
        cursor.execute(f"REVOKE SELECT ON portal_clustersettings FROM {role}")
    try:
        # as if the owner's connection were given a role that owns nothing
        monkeypatch.setattr(cluster_match, "as_owner", contextlib.nullcontext)
        with pytest.raises(StartError, match="cannot be read: permission denied for table"):
            check_same_cluster(folder)
    finally:
        with as_owner(), connection.cursor() as cursor:
            cursor.execute(f"GRANT SELECT ON portal_clustersettings TO {role}")


@pytest.mark.usefixtures("cluster")
def test_a_secret_key_of_the_environment_suffices(folder: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(folder.keys, CLUSTER)
    monkeypatch.setenv("FAIRWAY_SECRET_KEY", secrets.token_urlsafe(64))
    check_same_cluster(folder)


@pytest.mark.usefixtures("cluster")
def test_keys_of_another_cluster_are_refused(folder: DataDir) -> None:
    make_keys(folder.keys, "other2345a")
    folder.ensure_secret_key()
    with pytest.raises(StartError, match=rf"to the cluster {CLUSTER}, and the data folder .* to other2345a"):
        check_same_cluster(folder)


@pytest.mark.usefixtures("new_database")
def test_an_empty_database_beside_the_keys_of_a_cluster_is_refused(folder: DataDir) -> None:
    enrolment.ensure_cluster()
    enrolment.prepare_agent(b"program")
    folder.ensure_secret_key()
    factories.user()
    check_same_cluster(folder)
    own = ClusterSettings.objects.get(id=1).cluster_id
    ClusterSettings.objects.all().delete()
    with pytest.raises(StartError, match=f"belongs to the cluster {own}, but the database .* is empty"):
        check_same_cluster(folder)


@pytest.mark.usefixtures("new_database")
def test_a_process_that_ran_before_prepare_is_no_other_cluster(folder: DataDir) -> None:
    own = ClusterSettings.objects.create(id=1).cluster_id  # as worker-cycle writes it
    check_same_cluster(folder)
    enrolment.ensure_cluster()
    assert cluster_of_keys(folder.keys) == own


@pytest.mark.usefixtures("new_database")
def test_an_interrupted_first_start_goes_on_with_its_keys(
    folder: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(folder: Path, cluster: str) -> None:
        make_keys(folder, cluster)
        key_path(folder, "signing").unlink()
        raise OSError(errno.ENOSPC, "No space left on device")

    check_same_cluster(folder)
    with monkeypatch.context() as patched:
        patched.setattr(enrolment, "make_keys", full_disk)
        with pytest.raises(OSError):
            enrolment.ensure_cluster()
    assert not ClusterSettings.objects.exists()
    began_with = cluster_of_keys(folder.keys)
    check_same_cluster(folder)
    enrolment.ensure_cluster()
    assert ClusterSettings.objects.get(id=1).cluster_id == began_with != ""
    folder.ensure_secret_key()
    check_same_cluster(folder)
