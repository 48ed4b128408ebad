"""The usage of homes and project folders: asked of a real agent, stored, deleted, and told to the owners."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from agents.engines.replies import AgentError, FolderUsage, OutcomeUnknownError, StorageUsage
from agents.verbs import STORAGE_USAGE, Verb
from portal.domain.states import NodeState
from portal.models import ClusterSettings, Node, Notice, Project, User, Volume, VolumeUsage
from portal.selectors.storage.volumes import DISK_USES, node_disks, quota_enforcement_message
from scheduler.nodes.engine_connect import open_engine
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.storage_usage import measure_storage
from scheduler.periodic import delete_old_rows
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine

pytestmark = pytest.mark.django_db(transaction=True)
MIB = 1024 * 1024


@dataclass
class MeasuringEngine:
    """Answers with the given usage, or fails."""

    folders: Sequence[FolderUsage] = ()
    error: Exception | None = None
    is_open: bool = True
    asked: list[list[str]] = field(default_factory=list)

    def supports(self, feature: Verb | str) -> bool:
        return True

    def request(self, verb: Verb, read: object, *, roots: Sequence[str]) -> StorageUsage:
        assert verb is STORAGE_USAGE
        self.asked.append(list(roots))
        if self.error is not None:
            raise self.error
        return StorageUsage(tuple(self.folders))


@dataclass
class Place:
    node: Node
    owner: User
    project: Project
    engine: MeasuringEngine

    def measure(self, *folders: FolderUsage, node: Node | None = None) -> None:
        """Measure an hour after the last time."""
        Node.objects.update(storage_asked_at=timezone.now() - dt.timedelta(hours=1))
        self.engine.folders = folders
        measure_storage(NodeConnection(self.engine, None, node or self.node))  # type: ignore[arg-type]


@pytest.fixture
def place() -> Place:
    """A node with homes of at most 100 MiB, and a project folder of at most 200 MiB."""
    factories.cluster_settings()
    node, owner = factories.node(factories.pool()), factories.user("ada")
    Node.objects.update(reachable=True, agent_info={"capabilities": [STORAGE_USAGE.capability]})
    project = factories.project("vision", manager=owner, member=factories.user("eva"))
    Volume.objects.create(name="homes", kind="home", quota_mib=100)
    Volume.objects.create(name="team", kind="project", path="/teams", quota_mib=200)
    return Place(node, owner, project, MeasuringEngine())


def home(used_mib: int, **more: Any) -> FolderUsage:
    return FolderUsage(0, "ada", used_bytes=used_mib * MIB, files=7, **more)


def test_a_node_measures_its_folders_at_most_once_per_interval(place: Place) -> None:
    place.measure(
        home(40, limit_bytes=90 * MIB),
        FolderUsage(0, "nobody", used_bytes=1, files=1),
        FolderUsage(1, place.project.public_id, used_bytes=20 * MIB, files=3),
    )
    team, own = VolumeUsage.objects.order_by("used_mib")
    assert (own.owner, own.volume, own.node, own.used_mib, own.files) == (
        place.owner,
        None,
        place.node,
        40,
        7,
    )
    assert (own.limit_mib, own.enforced) == (90, True)
    assert (team.project, team.volume.name, team.limit_mib, team.enforced) == (
        place.project,
        "team",
        200,
        False,
    )
    assert place.engine.asked == [["", "/teams"]]
    measure_storage(NodeConnection(place.engine, None, place.node))
    assert len(place.engine.asked) == 1
    ClusterSettings.objects.update(policy={"storage_usage_interval_s": 0})
    place.measure()
    assert len(place.engine.asked) == 1


def test_folders_that_are_gone_and_retired_nodes_lose_their_rows(place: Place) -> None:
    place.measure(home(40), FolderUsage(1, place.project.public_id, used_bytes=0, files=1))
    place.measure(home(50), FolderUsage(1, "", problem="/teams cannot be read: Input/output error."))
    assert VolumeUsage.objects.count() == 2
    assert "Input/output error" in Node.objects.get(pk=place.node.pk).storage_problem
    place.measure(home(50))
    assert VolumeUsage.objects.get().used_mib == 50
    Node.objects.update(state=NodeState.RETIRED.value)
    delete_old_rows()
    assert not VolumeUsage.objects.exists()


@pytest.mark.parametrize(
    "error", [AgentError("engine_error", "The disk is gone."), OutcomeUnknownError("The disk is gone.")]
)
def test_a_failed_measurement_keeps_the_numbers_and_its_reason(place: Place, error: Exception) -> None:
    place.measure(home(40))
    place.engine.error = error
    place.measure()
    assert VolumeUsage.objects.get().used_mib == 40
    assert Node.objects.get(pk=place.node.pk).storage_problem == "The disk is gone."
    place.engine.error = None
    place.measure(FolderUsage(0, "ada", problem="It was not counted within 300 s."))
    row = VolumeUsage.objects.get()
    assert row.used_mib == 40 and row.problem == "It was not counted within 300 s."
    assert Node.objects.get(pk=place.node.pk).storage_problem == ""
    place.engine.is_open, place.engine.error = False, OutcomeUnknownError("The link is lost.")
    with pytest.raises(OutcomeUnknownError):
        place.measure()


def test_one_node_measures_what_all_nodes_share(place: Place) -> None:
    Volume.objects.filter(name="team").update(scope="shared")
    other = factories.node(place.node.pool)
    Node.objects.update(reachable=True, agent_info={"capabilities": [STORAGE_USAGE.capability]})
    place.measure(node=other)
    place.measure()
    assert place.engine.asked == [[""], ["", "/teams"]]
    Node.objects.filter(pk=place.node.pk).update(reachable=False)
    place.measure(FolderUsage(1, place.project.public_id, used_bytes=MIB, files=1), node=other)
    assert VolumeUsage.objects.get().node == other


def test_the_owner_of_a_nearly_full_home_is_notified_once(place: Place) -> None:
    for used_mib, notices in ((89, 0), (91, 1), (99, 1), (85, 1), (95, 1), (79, 1), (92, 2)):
        place.measure(home(used_mib))
        found = Notice.objects.filter(recipient=place.owner, kind="folder_nearly_full")
        assert found.count() == notices, used_mib
    assert "0.1 of 0.1 GiB" in found[0].message
    place.measure(home(92), FolderUsage(1, place.project.public_id, used_bytes=190 * MIB, files=3))
    titles = Notice.objects.filter(project=place.project).values_list("recipient__username", "title")
    assert list(titles) == [("ada", "The folder of vision is nearly full")]


def test_a_real_agent_is_asked(harness: EngineHarness) -> None:
    owner = factories.user("ada")
    node = harness.mark_enrolled(harness.create_node(name="storage"))
    folder = harness.folder / "storage/homes/ada"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(os.urandom(2 * MIB))
    engine = open_engine(node)
    try:
        measure_storage(NodeConnection(engine, None, node))  # type: ignore[arg-type]
    finally:
        engine.close()
    row = VolumeUsage.objects.get(owner=owner)
    assert (row.node, row.used_mib, row.files, row.problem) == (node, 2, 1, "")


def test_pages_show_the_disks_that_a_real_agent_reports(harness: EngineHarness, client: Client) -> None:
    admin = factories.user("root", admin=True)
    Volume.objects.create(name="homes", kind="home", quota_mib=100)
    node = harness.create_node(name="disks")
    assert InProcessEngine().run_until(lambda: Node.objects.get().state == NodeState.READY.value)
    client.force_login(admin)
    page = client.get("/volumes/").content.decode()
    assert f"{harness.folder}/disks/homes" in page and "Underlying disks" in page
    row, disks = Volume.objects.get(), node_disks()
    assert {each.use for each in disks} <= set(DISK_USES)
    holds = next(each.quotas for each in disks if each.use == "homes")
    message = quota_enforcement_message(row, disks) or ""
    assert message.startswith("Enforced on disks." if holds else "No node reports")
    without = [replace(each, quotas=False, node="other") for each in disks]
    holding = [replace(each, quotas=True) for each in disks]
    assert quota_enforcement_message(row, [*holding, *without]) == "Enforced on disks, not on other."
    for path in ("/cluster/", f"/nodes/{node.public_id}/", "/environments/", "/scheduler/", "/alerts/"):
        assert client.get(path).status_code == 200, path
