"""Environments: which projects may run them, and what admins have brought to nodes ahead of jobs."""

from __future__ import annotations

import pytest

from portal.access import visible_environments
from portal.domain.states import JobState, RuntimeKind
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import Attempt, AuditEntry, ImagePresence, OutboxMessage, Task
from portal.services.environments.environments import EnvironmentInput, do_save_environment
from portal.services.environments.prefetch import (
    do_cancel_prefetch,
    do_prefetch_image,
    images_to_pull,
    nodes_with_images_to_pull,
    protected_images,
)
from portal.services.jobs.submission import do_resubmit_job, do_resume_job, do_suspend_job
from tests import factories
from tests.agents.node.test_image_names import UNSAFE_IMAGES

pytestmark = pytest.mark.django_db


@pytest.fixture
def dataset():
    """A project below another, one beside them, and an environment that is for everybody."""
    made = factories.basic_cluster() | {"admin": factories.user("root", admin=True)}
    made["above"] = factories.project("faculty", manager=factories.user("dean"))
    made["below"] = factories.project("lab", parent=made["above"], member=made["owner"])
    made["saved"] = save(made)
    return made


def save(dataset, projects=(), environment=None, **words):
    reported = {
        "name": "licensed",
        "title": "Licensed",
        "runtime": RuntimeKind.PODMAN,
        "image": "localhost/l:1",
    }
    words = EnvironmentInput(**reported | words, projects=projects)
    return do_save_environment(dataset["admin"], words, environment)


@pytest.mark.parametrize("image", UNSAFE_IMAGES)
def test_an_image_is_a_name_of_a_registry(dataset, image: str) -> None:
    """Podman would read an archive, a folder or another store of the node, or take the text for an option."""
    with pytest.raises(InvalidRequest) as refused:
        save(dataset, name="other", image=image)
    assert set(refused.value.fields) == {"image"}
    with pytest.raises(InvalidRequest):
        save(dataset, environment=dataset["saved"], image=image)


@pytest.mark.parametrize(
    "name", ["localhost/{}:latest", "{}", "docker.io/library/{}", "{}@sha256:" + "a" * 64]
)
def test_an_image_that_a_user_saved_is_not_reachable_by_its_name(dataset, name: str) -> None:
    mine = factories.environment(
        tool=False, owner=dataset["owner"], image="localhost/fairway-saved/abcdef:latest"
    )
    with pytest.raises(InvalidRequest, match="that a user saved"):
        save(dataset, name="other", image=name.format("fairway-saved/abcdef"))
    save(dataset, name="mine", image=mine.image, title="New title", environment=mine)


def test_only_the_projects_that_are_named_and_those_below_them_run_an_environment(dataset) -> None:
    environment, owner = dataset["saved"], dataset["owner"]
    before = factories.job(owner, dataset["project"], environment)
    do_suspend_job(owner, before)
    save(dataset, [dataset["above"]], environment)
    assert factories.job(owner, dataset["below"], environment).state == JobState.PENDING
    with pytest.raises(InvalidRequest) as refused:
        factories.job(owner, dataset["project"], environment)
    message = f"Licensed is not available to the project {dataset['project'].name}."
    assert refused.value.fields == {"environment": message}
    with pytest.raises(InvalidRequest):  # it binds the project, whoever asks
        factories.job(dataset["admin"], dataset["project"], environment)
    with pytest.raises(Conflict, match="not available to the project"):
        do_resume_job(owner, before)
    before.refresh_from_db()
    assert before.state == JobState.SUSPENDED
    before.state = JobState.COMPLETED.value
    with pytest.raises(InvalidRequest):
        do_resubmit_job(owner, before)

    assert environment in visible_environments(owner)
    assert environment not in visible_environments(factories.user())
    audited = AuditEntry.objects.filter(action="environment.save").latest("id")
    assert (audited.before["projects"], audited.after["projects"]) == ([], ["faculty"])
    save(dataset, None, environment)
    assert [row.name for row in environment.projects.all()] == ["faculty"]
    save(dataset, [], environment)
    do_resume_job(owner, before)


def test_an_image_is_copied_to_the_nodes_that_lack_it(dataset) -> None:
    environment = dataset["saved"]
    first, second = dataset["node"], factories.node(dataset["pool"], runtime="docker")
    away = factories.node(dataset["pool"])
    factories.node(dataset["pool"], runtime="process")
    ImagePresence.objects.create(environment=environment, node=first, state="present")
    ImagePresence.objects.create(environment=environment, node=away, state="failed", detail="no room")
    with pytest.raises(Forbidden):
        do_prefetch_image(dataset["owner"], environment)
    assert do_prefetch_image(dataset["admin"], environment) == 2
    assert images_to_pull(first.pk) == [] and images_to_pull(second.pk) == images_to_pull(away.pk) == [
        environment
    ]
    assert set(nodes_with_images_to_pull()) == {second.public_id, away.public_id}
    hinted = OutboxMessage.objects.filter(name="scheduler.notify_node", arguments__contains=["bring"])
    assert {row.arguments[0] for row in hinted} == {second.public_id, away.public_id}
    assert AuditEntry.objects.get(action="environment.prefetch").after == {
        "nodes": sorted([second.name, away.name])
    }

    ImagePresence.objects.filter(node=second).update(state="loading")
    assert do_cancel_prefetch(dataset["admin"], environment) == 1
    assert nodes_with_images_to_pull() == [second.public_id]  # what has begun goes on
    stays = {node: protected_images(node.pk) for node in (first, second, away)}
    assert stays == {first: ["localhost/l:1"], second: ["localhost/l:1"], away: []}
    job = factories.job(dataset["owner"], dataset["project"], environment)
    environment.enabled = False
    environment.save()
    assert protected_images(first.pk) == [], "it is not offered any more"
    attempt = Attempt.objects.create(job=job, number=1, pool=dataset["pool"], leader_epoch=1)
    Task.objects.create(attempt=attempt, rank=0, node=first)
    assert protected_images(first.pk) == ["localhost/l:1"], "a task there needs it"
    assert do_prefetch_image(dataset["admin"], environment, away) == 1
    with pytest.raises(Conflict, match="without a container"):
        do_prefetch_image(dataset["admin"], factories.environment(runtime="process"))
