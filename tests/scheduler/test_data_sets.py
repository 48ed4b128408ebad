"""Sizes of data sets: from the page over the node's actor and its agent to the database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from portal.models import DataSetVersion, Node, Volume
from portal.services.storage import data_set_sizes
from portal.services.storage.data_sets import (
    VersionInput,
    do_add_version,
    do_create_data_set,
    do_measure_version,
)
from scheduler.nodes.actor_supervisor import ActorSupervisor
from tests import factories
from tests.engine_harness import EngineHarness, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def node(harness: EngineHarness) -> Iterator[Node]:
    """A node with its actor, and a volume with a data set of two files."""
    row = harness.mark_enrolled(harness.create_node(name="sizes", gpus=1), gpus=1)
    folder = harness.folder / "data"
    (folder / "imagenet" / "train").mkdir(parents=True)
    (folder / "imagenet" / "train" / "a.tar").write_bytes(bytes(3000))
    (folder / "imagenet" / "labels.txt").write_bytes(bytes(72))
    Node.objects.filter(pk=row.pk).update(
        settings=row.settings | {"allowed_mount_roots": [str(harness.folder)]}
    )
    Volume.objects.create(name="data", kind="host_path", path=str(folder), read_only=True)
    supervisor = ActorSupervisor()
    supervisor.start()
    ended = threading.Event()

    def wake() -> None:  # Celery does not run here: its message says to look now
        while not ended.wait(0.05):
            supervisor.notify(row.public_id, data_set_sizes.MEASURE_HINT)

    thread = threading.Thread(target=wake)
    thread.start()
    wait_for("the node is connected", lambda: Node.objects.get(pk=row.pk).reachable)
    yield row
    ended.set()
    thread.join()
    supervisor.stop()


def measured(version: DataSetVersion) -> DataSetVersion:
    """The version once its measurement has ended."""

    def read() -> DataSetVersion | None:
        row = DataSetVersion.objects.get(pk=version.pk)
        return row if row.measure_requested_at is None else None

    found: DataSetVersion = wait_for("the measurement has ended", read)
    return found


def test_a_node_measures_a_version(node: Node, harness: EngineHarness) -> None:
    user = factories.user("ada")
    data_set = do_create_data_set(user, factories.project("vision", member=user), name="imagenet")
    version = do_add_version(user, data_set, VersionInput("2012", "data", "imagenet"))
    assert version.measure_requested_at is not None
    row = measured(version)
    assert (row.size_bytes, row.file_count, row.measure_problem) == (3072, 2, "")
    assert row.measured_at is not None and row.node == node

    (Path(harness.folder) / "data" / "imagenet" / "more").write_bytes(bytes(1000))
    do_measure_version(user, row)
    row = measured(row)
    assert (row.size_bytes, row.file_count) == (4072, 3)

    # what cannot be measured says why, and keeps an earlier size
    gone = measured(do_add_version(user, data_set, VersionInput("2013", "data", "imagenet/gone")))
    assert gone.size_bytes is None
    assert gone.measure_problem == "imagenet/gone cannot be read: No such file or directory."
    Volume.objects.get().projects.add(factories.project("other"))
    row = measured(do_measure_version(user, row))
    assert row.measure_problem == "The project of the data set may no longer use the volume."
    assert row.size_bytes == 4072
