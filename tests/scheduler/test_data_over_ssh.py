"""What a job reaches, over real SSH with real podman: it runs where its volume is, and its secrets leak nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.db import connection

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.states import JobState
from portal.domain.storage.volumes import VolumeKind
from portal.models import JobVerdict, Secret
from portal.services.jobs.logs import log_path
from portal.services.projects.secrets import do_save_secret
from portal.services.storage.volumes import VolumeInput, do_save_volume
from tests import factories
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.two_rig_nodes import describe, in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.long, pytest.mark.django_db(transaction=True)]

VALUE = "hush-7f3a 'quoted' $HOME"
FILED = "hush-9c1b filed"
MARKS = ("hush-7f3a", "hush-9c1b")
SCRIPT = """
import os, pathlib, stat, time
file = pathlib.Path("/run/fairway/key.pem")
mode = oct(stat.S_IMODE(file.stat().st_mode))
print("variable", os.environ["HUB_TOKEN"][5:], "file", file.read_text()[5:], mode, flush=True)
pathlib.Path("/volumes/sets/made").write_text("here")
while not os.path.exists("/volumes/sets/end"): time.sleep(0.05)
"""
LEAKS = """
import glob, os, sys
marks = [mark.encode() for mark in sys.argv[1:]]
paths = [*glob.glob("/proc/[0-9]*/cmdline")]
for top in ("/var/lib/fairway-node", "/var/log", "/var/lib/containers", "/run/containers", "/run/libpod", "/etc"):
    for folder, _, files in os.walk(top):
        paths += [os.path.join(folder, name) for name in files if "/merged/" not in folder]
for path in paths:
    if not os.path.isfile(path) or os.path.getsize(path) > 10_000_000:
        continue
    try:
        content = open(path, "rb").read()
    except OSError:
        continue
    if any(mark in content for mark in marks) and path != f"/proc/{os.getpid()}/cmdline":
        print(path)
"""


@pytest.fixture
def dataset(make_rig, rig_cluster: RigCluster, tiny_image: RigImage, settings, tmp_path: Path):
    """Two enrolled nodes with the tiny image; both lend /srv, and the folder of the volume is on the second."""
    stores = [[tiny_image.store]] * 2
    made = two_rig_nodes(
        make_rig, rig_cluster, tiny_image, stores, settings, tmp_path, exported_roots=["/srv"]
    )
    for machine in made["machines"]:
        machine.execute("mkdir", "-p", "/srv/sets")
        machine.execute("chmod", "777", "/srv/sets")
    return made


def test_a_job_runs_where_its_volume_is_and_its_secrets_are_only_there(dataset, tmp_path: Path) -> None:
    admin, owner = factories.user(admin=True), dataset["owner"]
    machine, node = dataset["machines"][1], dataset["nodes"][1]
    do_save_volume(admin, VolumeInput("sets", VolumeKind.HOST_PATH, path="/srv/sets", nodes=[node]))
    do_save_secret(owner, owner, "hub", VALUE)
    do_save_secret(owner, owner, "key", FILED)
    secrets = [{"secret": "hub", "variable": "HUB_TOKEN"}, {"secret": "key", "file": "key.pem"}]
    job = submit(dataset, "python3", "-c", SCRIPT, volumes=[{"volume": "sets"}], secrets=secrets)
    wait_until(
        dataset, lambda: machine.execute("test", "-e", "/srv/sets/made", check=False).returncode == 0, job
    )
    task = job.attempts.get().task_rows.get()
    assert task.node == node
    kept = set(machine.execute("python3", "-c", LEAKS, *MARKS).stdout.split())
    folder = next(path for path in kept if path.endswith("/key.pem")).rpartition("/")[0]
    assert kept == {f"{folder}/key.pem", f"{folder}/variables"}, kept
    inspected = machine.podman("container", "inspect", task.container)
    assert not any(mark in inspected for mark in MARKS) and '"HUB_TOKEN=' not in inspected
    machine.execute("touch", "/srv/sets/end")
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)
    said = log_path(job.public_id, 1, 0, "k8s").read_text()
    assert f"variable {VALUE[5:]} file {FILED[5:]} 0o600" in said
    assert machine.execute("python3", "-c", LEAKS, *MARKS).stdout == ""
    assert not any(
        mark in reported for mark in MARKS for reported in (rows_of_all_tables(), files_below(tmp_path))
    )

    Secret.objects.get(name="hub").delete()
    job = submit(dataset, "true", secrets=[secrets[1]], max_attempts=1)
    Secret.objects.get(name="key").delete()
    waits = JobVerdict.objects.filter(job=job, code=VerdictCode.OWNER_NOT_PERMITTED.value)
    wait_until(dataset, waits.exists, job)
    assert "no secret called key" in waits.get().message, describe(job)


def rows_of_all_tables() -> str:
    """The whole record as text."""
    with connection.cursor() as cursor:
        tables = connection.introspection.table_names(cursor)
        texts = []
        for table in tables:
            cursor.execute(f"SELECT coalesce(json_agg(t)::text, '') FROM \"{table}\" t")
            texts.append(json.dumps(cursor.fetchone()))
    assert "portal_jobevent" in tables
    return "".join(texts)


def files_below(folder: Path) -> str:
    """All that stands in files below a folder of the portal: its logs."""
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
