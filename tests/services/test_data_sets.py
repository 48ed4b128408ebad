"""Data sets: entries, versions, who sees them, and the request of a measurement."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import pytest
from django.utils import timezone

from agents.verbs import FOLDER_SIZE
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import AuditEntry, DataSet, DataSetVersion, Node, OutboxMessage, Project, User, Volume
from portal.selectors.storage.data_sets import get_data_set, get_version, list_data_sets
from portal.services.storage import data_set_sizes, data_sets
from portal.services.storage.data_sets import VersionInput
from portal.services.storage.volumes import do_delete_volume
from tests import factories

pytestmark = pytest.mark.django_db


@dataclass
class Catalogue:
    """Two projects, a volume for all, one for vision and one with a folder for each project."""

    vision: Project
    nlp: Project
    member: User
    manager: User
    viewer: User
    outsider: User
    data_set: DataSet

    def add(
        self, label: str, volume: str = "shared", path: str = "a", user: User | None = None
    ) -> DataSetVersion:
        given = VersionInput(label, volume, path)
        return data_sets.do_add_version(user or self.member, self.data_set, given)

    def names(self, user: User, search: str = "") -> list[str]:
        return [row.name for row in list_data_sets(user, search)]


@pytest.fixture
def catalogue() -> Catalogue:
    member, manager, viewer = (factories.user(name) for name in ("ada", "max", "vera"))
    vision = factories.project("vision", member=member, manager=manager, viewer=viewer)
    outsider = factories.user("otto")
    nlp = factories.project("nlp", member=outsider)
    Volume.objects.create(name="shared", kind="host_path", path="/data/shared", scope="shared")
    Volume.objects.create(name="own", kind="host_path", path="/data/own").projects.add(vision)
    Volume.objects.create(name="folders", kind="project", path="/data/projects")
    Volume.objects.create(name="tmp", kind="scratch")
    data_set = data_sets.do_create_data_set(
        member, vision, name="image-net", description="Photos of objects."
    )
    return Catalogue(vision, nlp, member, manager, viewer, outsider, data_set)


def wrong_fields(refusal: pytest.ExceptionInfo[InvalidRequest]) -> set[str]:
    return set(refusal.value.fields)


def test_members_make_entries_and_managers_delete_them(catalogue: Catalogue) -> None:
    first, second = catalogue.add("2012"), catalogue.add("2013", path="")
    assert [
        row.label for row in get_data_set(catalogue.viewer, catalogue.data_set.public_id).versions.all()
    ] == [
        "2013",
        "2012",
    ]
    data_sets.do_change_data_set(catalogue.member, catalogue.data_set, description="New.")
    with pytest.raises(Forbidden):
        catalogue.add("2014", user=catalogue.viewer)
    with pytest.raises(Forbidden):
        data_sets.do_create_data_set(catalogue.viewer, catalogue.vision, name="other")
    with pytest.raises(NotFound):
        catalogue.add("2014", user=catalogue.outsider)
    for delete in (
        lambda user: data_sets.do_delete_version(user, first),
        lambda user: data_sets.do_delete_data_set(user, catalogue.data_set),
    ):
        with pytest.raises(Forbidden):
            delete(catalogue.member)
    data_sets.do_delete_version(catalogue.manager, second)
    assert [row.label for row in DataSetVersion.objects.all()] == ["2012"]
    data_sets.do_delete_data_set(catalogue.manager, catalogue.data_set)
    assert not DataSetVersion.objects.exists()
    actions = AuditEntry.objects.filter(object_kind="dataset").order_by("pk")
    assert list(actions.values_list("action", "actor_name")) == [
        ("data_set.create", "ada"),
        ("data_set.add_version", "ada"),
        ("data_set.add_version", "ada"),
        ("data_set.change", "ada"),
        ("data_set.delete_version", "max"),
        ("data_set.delete", "max"),
    ]
    last = actions.last()
    assert last is not None and last.before is not None and last.before["versions"] == ["2012"]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("label", VersionInput("", "shared")),
        ("label", VersionInput("v 1", "shared")),
        ("label", VersionInput("v" * 41, "shared")),
        ("label", VersionInput("2012", "shared")),
        ("volume", VersionInput("v1", "gone")),
        ("volume", VersionInput("v1", "tmp")),
        ("path", VersionInput("v1", "shared", "/etc")),
        ("path", VersionInput("v1", "shared", "a/../b")),
        ("path", VersionInput("v1", "shared", "..")),
        ("path", VersionInput("v1", "shared", "a//b")),
        ("path", VersionInput("v1", "shared", "a/")),
        ("path", VersionInput("v1", "shared", "a\nb")),
        ("path", VersionInput("v1", "shared", "ä" * 201)),
        ("note", VersionInput("v1", "shared", "", "x" * 501)),
    ],
)
def test_a_wrong_version_is_refused_at_its_field(
    catalogue: Catalogue, field: str, given: VersionInput
) -> None:
    catalogue.add("2012")
    with pytest.raises(InvalidRequest) as refusal:
        data_sets.do_add_version(catalogue.member, catalogue.data_set, given)
    assert wrong_fields(refusal) == {field}


def test_a_wrong_data_set_is_refused_at_its_field(catalogue: Catalogue) -> None:
    for field, given in (
        ("name", {"name": "Image Net"}),
        ("name", {"name": "image-net"}),
        ("description", {"name": "x", "description": "x" * 5001}),
        ("visibility", {"name": "x", "visibility": "all"}),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            data_sets.do_create_data_set(catalogue.member, catalogue.vision, **given)
        assert wrong_fields(refusal) == {field}
    # another project may have the same name
    data_sets.do_create_data_set(catalogue.outsider, catalogue.nlp, name="image-net")


def test_everyone_sees_shared_versions_on_volumes_that_they_may_use(catalogue: Catalogue) -> None:
    shared, own = catalogue.add("v1"), catalogue.add("v2", "own")
    assert catalogue.names(catalogue.outsider) == []
    data_sets.do_change_data_set(catalogue.member, catalogue.data_set, visibility="everyone")
    assert catalogue.names(catalogue.outsider) == ["image-net"]
    seen = get_data_set(catalogue.outsider, catalogue.data_set.public_id)
    assert list(seen.versions.all()) == [shared]
    with pytest.raises(NotFound):
        get_version(catalogue.outsider, own.public_id)
    for change in (
        lambda: catalogue.add("v3", user=catalogue.outsider),
        lambda: data_sets.do_measure_version(catalogue.outsider, shared),
    ):
        with pytest.raises(Forbidden):
            change()
    # a folder of one project is at another place for others
    with pytest.raises(InvalidRequest) as refusal:
        catalogue.add("v3", "folders")
    assert wrong_fields(refusal) == {"volume"}
    data_sets.do_change_data_set(catalogue.member, catalogue.data_set, visibility="project")
    catalogue.add("v3", "folders")
    with pytest.raises(InvalidRequest) as refusal:
        data_sets.do_change_data_set(catalogue.member, catalogue.data_set, visibility="everyone")
    assert wrong_fields(refusal) == {"visibility"}


def test_search_finds_words_in_names_descriptions_projects_volumes_and_versions(catalogue: Catalogue) -> None:
    catalogue.add("2012", "own")
    data_sets.do_create_data_set(catalogue.member, catalogue.vision, name="coco")
    for text, found in (
        ("", ["coco", "image-net"]),
        ("NET", ["image-net"]),
        ("photos", ["image-net"]),
        ("vision", ["coco", "image-net"]),
        ("own 2012", ["image-net"]),
        ("own coco", []),
        ("%", []),
        ("/data", []),
    ):
        assert catalogue.names(catalogue.viewer, text) == found, text
        assert catalogue.names(catalogue.outsider, text) == []


def test_a_volume_with_data_sets_is_not_deleted(catalogue: Catalogue) -> None:
    version, admin = catalogue.add("v1"), factories.user(admin=True)
    volume = version.volume
    with pytest.raises(Conflict) as refusal:
        do_delete_volume(admin, volume)
    assert (refusal.value.code, refusal.value.details) == ("volume_in_use", {"data_set_versions": 1})
    data_sets.do_delete_version(catalogue.manager, version)
    do_delete_volume(admin, volume)


def reachable(node: Node, *, is_reachable: bool = True) -> None:
    Node.objects.filter(pk=node.pk).update(reachable=is_reachable, last_seen_at=timezone.now())


def test_a_reachable_node_with_the_volume_measures(catalogue: Catalogue) -> None:
    version = catalogue.add("v1")
    assert version.measure_problem == "No node with the volume is reachable."
    assert version.measure_requested_at is None
    pool = factories.pool()
    other, node = factories.node(pool, name="without"), factories.node(pool, name="with")
    reachable(other)
    reachable(node, is_reachable=False)
    version.volume.nodes.set([node])
    version = data_sets.do_measure_version(catalogue.member, version)
    assert version.measure_problem == "No node with the volume is reachable."
    reachable(node)
    version = data_sets.do_measure_version(catalogue.member, version)
    assert version.node == node and version.measure_requested_at is not None
    assert version.measure_problem == ""
    assert OutboxMessage.objects.filter(arguments__0=node.public_id).exists()
    assert data_set_sizes.version_to_measure(node) == version
    assert data_set_sizes.version_to_measure(other) is None
    # while it is being measured, another request changes nothing
    again = data_sets.do_measure_version(catalogue.member, version)
    assert again.measure_requested_at == version.measure_requested_at
    data_set_sizes.record_size(version, 5000, 3)
    version.refresh_from_db()
    assert (version.size_bytes, version.file_count, version.measure_requested_at) == (5000, 3, None)
    # an answer to an earlier request is not stored
    data_sets.do_measure_version(catalogue.member, version)
    data_set_sizes.record_size(again, 1, 1)
    version.refresh_from_db()
    assert version.size_bytes == 5000 and version.measure_requested_at is not None


def test_a_node_whose_agent_can_measure_is_preferred(catalogue: Catalogue) -> None:
    pool = factories.pool()
    able = factories.node(pool, agent_info={"capabilities": [FOLDER_SIZE.capability]})
    reachable(able)
    reachable(factories.node(pool, agent_info={"capabilities": []}))
    assert catalogue.add("v1").node == able
    reachable(able, is_reachable=False)
    assert catalogue.add("v2").node != able


def test_measurements_of_unreachable_nodes_and_without_end_are_repaired(catalogue: Catalogue) -> None:
    pool = factories.pool()
    node, other = factories.node(pool, name="one"), factories.node(pool, name="two")
    reachable(node)
    reachable(other, is_reachable=False)
    version = catalogue.add("v1")
    assert version.node == node
    reachable(node, is_reachable=False)
    reachable(other)
    data_set_sizes.repair_measurements()
    version.refresh_from_db()
    assert version.node == other
    reachable(other, is_reachable=False)
    data_set_sizes.repair_measurements()
    version.refresh_from_db()
    assert version.measure_requested_at is None
    assert version.measure_problem == "No node with the volume is reachable."

    reachable(node)
    data_sets.do_measure_version(catalogue.member, version)
    long_ago = timezone.now() - data_set_sizes.TIMEOUT - dt.timedelta(seconds=1)
    DataSetVersion.objects.update(measure_requested_at=long_ago)
    data_set_sizes.repair_measurements()
    version.refresh_from_db()
    assert version.measure_problem == "The node did not finish in time."
    assert version.measure_requested_at is None
