"""The catalogue of data sets in the browser, and the launch page that it opens."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from portal.models import DataSet, DataSetVersion, Job, Node, Volume
from portal.services.storage.data_sets import (
    VersionInput,
    do_add_version,
    do_change_data_set,
    do_create_data_set,
)
from tests import factories

LIST = reverse("data-sets")


@pytest.fixture
def data_set(dataset: Any) -> DataSet:
    """A data set of two versions on a volume for all; no node is reachable."""
    Node.objects.update(reachable=False)
    Volume.objects.create(name="open-data", kind="host_path", path="/data/open", read_only=True)
    owner = dataset.people["m-okafor"]
    row = do_create_data_set(owner, dataset.projects["vision"], name="image-net", description="Photos.")
    do_add_version(owner, row, VersionInput("2012", "open-data", "imagenet/2012"))
    do_add_version(owner, row, VersionInput("2013", "open-data"))
    return row


def page_of(client: Any, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200
    return str(answer.content.decode())


def test_an_entry_is_made_with_versions_and_found(dataset: Any, client_of: Any) -> None:
    Volume.objects.create(name="open-data", kind="host_path", path="/data/open", read_only=True)
    Node.objects.update(reachable=False)
    client = client_of("member")
    assert "No data sets yet" in page_of(client, LIST)
    assert "No data sets yet" in page_of(client_of("stranger"), LIST)
    project = dataset.projects["vision"].public_id
    given = {"name": "Image Net", "project": project, "visibility": "project", "description": "Photos."}
    answer = client.post(reverse("new-data-set"), given)
    assert answer.status_code == 400 and "Use lower-case letters" in answer.content.decode()
    answer = client.post(reverse("new-data-set"), given | {"name": "image-net"}, follow=True)
    row = DataSet.objects.get()
    assert "image-net is created" in answer.content.decode()

    add = reverse("add-data-set-version", args=[row.public_id])
    for wrong, reason in (
        ({"path": "../secret"}, "without .. and without /"),
        ({"label": "a b"}, "letters, digits and . _ + -"),
        ({"volume": "gone"}, "Choose a volume that jobs of vision may use: "),
    ):
        answer = client.post(add, {"label": "2012", "volume": "open-data", "path": "a", **wrong})
        assert answer.status_code == 400
        (name,) = wrong
        assert f'id="id_{name}_error">' in answer.content.decode()
        assert reason in answer.content.decode()
    answer = client.post(add, {"label": "2012", "volume": "open-data", "path": "imagenet"}, follow=True)
    assert "Version 2012 is added." in answer.content.decode()
    assert "No node with the volume is reachable." in answer.content.decode()
    for text, found in (("photos", True), ("OPEN-data 2012", True), ("other", False)):
        page = page_of(client, f"{LIST}?q={text}")
        assert ("open-data/imagenet" in page) == found
        assert ("No data set matches" in page) != found
    assert "image-net" not in page_of(client_of("stranger"), LIST)


def test_the_list_has_pages_and_a_constant_number_of_queries(
    dataset: Any, client_of: Any, data_set: DataSet
) -> None:
    client, owner = client_of("member"), dataset.people["m-okafor"]

    def count() -> int:
        client.get(LIST)
        with CaptureQueriesContext(connection) as queries:
            assert client.get(LIST).status_code == 200
        return len(queries)

    before = count()
    for number in range(24):
        row = do_create_data_set(owner, dataset.projects["vision"], name=f"more-{number:02}")
        do_add_version(owner, row, VersionInput("v1", "open-data", f"{number}"))
    assert count() == before
    assert "more-23" not in page_of(client, LIST)
    assert "more-23" in page_of(client, f"{LIST}?page=2")


def test_the_page_shows_that_it_is_measured_then_the_size(
    dataset: Any, client_of: Any, data_set: DataSet
) -> None:
    client, address = client_of("member"), reverse("data-set", args=[data_set.public_id])
    assert 'hx-trigger="every 2s"' not in page_of(client, address)
    version = DataSetVersion.objects.get(label="2012")
    Node.objects.update(reachable=True, last_seen_at=timezone.now())
    answer = client.post(reverse("measure-data-set-version", args=[version.public_id]), follow=True)
    assert ">measuring</span>" in answer.content.decode()
    fragment = client.get(address, headers={"HX-Request": "true"}).content.decode()
    assert 'hx-trigger="every 2s"' in fragment and "<html" not in fragment
    DataSetVersion.objects.filter(pk=version.pk).update(
        measure_requested_at=None, size_bytes=3 * 2**30, file_count=1200, measured_at=timezone.now()
    )
    page = page_of(client, address)
    assert "3\N{NO-BREAK SPACE}GiB" in page and "1,200\N{NO-BREAK SPACE}files" in page
    assert ">measuring</span>" not in page


def test_deleting_names_the_consequence_first(dataset: Any, client_of: Any, data_set: DataSet) -> None:
    version = DataSetVersion.objects.get(label="2013")
    address = reverse("delete-data-set-version", args=[version.public_id])
    assert client_of("member").get(address).status_code == 403
    admin = client_of("admin")
    page = page_of(admin, address)
    assert "Its files stay" in page and "The version before it becomes the default." in page
    assert "2013 is deleted" in admin.post(address, follow=True).content.decode()
    address = reverse("delete-data-set", args=[data_set.public_id])
    assert "all its versions are removed" in page_of(admin, address)
    assert "image-net is deleted" in admin.post(address, follow=True).content.decode()
    assert not DataSet.objects.exists()


def test_launch_mounts_the_volume_read_only_and_sets_the_variable(
    dataset: Any, client_of: Any, data_set: DataSet, typed: dict[str, str]
) -> None:
    version = DataSetVersion.objects.get(label="2012")
    address = f"{reverse('launch')}?data_set={version.public_id}"
    assert address in page_of(client_of("member"), LIST)
    answer = client_of("member").get(address)
    form = answer.context["form"]
    assert form["project"].value() == dataset.projects["vision"].public_id
    filled = {name: form[name].value() for name in ("volumes", "env")}
    assert filled == {
        "volumes": "open-data ro",
        "env": "DATASET_IMAGE_NET=/volumes/open-data/imagenet/2012",
    }
    assert client_of("member").post(reverse("launch"), typed | filled).status_code == 302
    job = Job.objects.get(name="my run")
    assert job.volumes == [{"volume": "open-data", "target": "/volumes/open-data", "read_only": True}]
    assert job.env == {"DATASET_IMAGE_NET": "/volumes/open-data/imagenet/2012"}
    assert client_of("stranger").get(address).status_code == 404

    # who may not submit to its project gets one of their own that may use the volume
    stranger = dataset.people["stranger"]
    own = factories.project("a-first", member=stranger)
    project = factories.project("b-second", member=stranger)
    Volume.objects.get(name="open-data").projects.set([project, dataset.projects["vision"]])
    do_change_data_set(dataset.people["m-okafor"], data_set, visibility="everyone")
    form = client_of("stranger").get(address).context["form"]
    assert form["project"].value() == project.public_id != own.public_id
