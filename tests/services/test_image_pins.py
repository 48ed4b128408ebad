"""Which image an environment's tag means: resolved once, kept by jobs, and changed by administrators only."""

from __future__ import annotations

import pytest

from portal.errors import Conflict, NotAllowed
from portal.models import AuditEntry, Environment, EnvironmentOnNode, Job
from portal.services import image_pins
from portal.services.bringing import images_kept_on
from portal.services.catalogue import EnvironmentWords, do_save_environment
from portal.services.image_pins import do_check_tag, do_update_image, pin_job, pin_of, record_tag
from portal.words.states import RuntimeKind
from tests import record
from tests.services.test_lifecycle import place

pytestmark = pytest.mark.django_db

ONE, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
ID, OTHER_ID = "sha256:" + "a" * 64, "sha256:" + "b" * 64
NAME = "registry.example:5000/lab/torch"


def on_node(image_id: str, *digests: str, ref: str = f"{NAME}:2") -> dict[str, object]:
    return {"image_id": image_id, "refs": [ref], "digests": list(digests), "runtime": "podman"}


@pytest.fixture
def scene():
    made = record.scene() | {"admin": record.person("root", admin=True)}
    made["environment"] = record.environment("torch", tool=False, image=f"{NAME}:2")
    return made


@pytest.mark.parametrize(
    ("image", "archive", "row", "pin"),
    [
        (f"{NAME}:2", "", on_node(ID, f"{NAME}@{ONE}"), f"{NAME}@{ONE}"),
        (f"{NAME}:2", "", on_node(ID, f"{NAME}@{OTHER}", f"{NAME}@{ONE}"), f"{NAME}@{ONE}"),
        (f"{NAME}:2", "", on_node(ID, f"other.example/lab/torch@{ONE}"), ID),
        (f"{NAME}:2", "/images/torch.tar", on_node(ID, f"{NAME}@{ONE}"), ID),
        (NAME, "", on_node(ID, f"{NAME}@{ONE}", ref=f"{NAME}:latest"), f"{NAME}@{ONE}"),
        ("python:3.12", "", on_node(ID, f"docker.io/library/python@{ONE}"), f"python@{ONE}"),
        ("localhost/x:1", "", on_node(ID, f"localhost/x@{ONE}"), ID),
        ("x:1", "", on_node(ID, f"localhost/x@{ONE}"), ID),
    ],
)
def test_a_registry_image_is_pinned_by_its_digest_and_a_loaded_one_by_its_configuration(
    image, archive, row, pin
) -> None:
    assert pin_of(Environment(image=image, archive=archive), row) == pin


def test_the_first_node_resolves_the_tag_and_a_later_answer_changes_no_job(scene) -> None:
    environment, node = scene["environment"], scene["node"]
    early = record.job(scene["owner"], scene["project"], environment)
    assert (early.image_digest, pin_job(early)) == ("", "")
    record_tag(environment, node, [on_node(ID, f"{NAME}@{ONE}")])
    environment.refresh_from_db()
    assert environment.image_digest == f"{NAME}@{ONE}"
    assert (environment.image_resolved_by, environment.image_retagged) == (node.name, "")
    assert AuditEntry.objects.filter(act="environment.image_resolved").count() == 1
    later = record.job(scene["owner"], scene["project"], environment)
    assert later.image_digest == f"{NAME}@{ONE}"
    assert pin_job(early) == f"{NAME}@{ONE}"

    other = record.node(scene["pool"], name="second")
    record_tag(environment, other, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    environment.refresh_from_db()
    assert (environment.image_digest, environment.image_retagged) == (f"{NAME}@{ONE}", f"{NAME}@{OTHER}")
    assert environment.image_retagged_on == "second"
    assert pin_job(Job.objects.get(pk=later.pk)) == f"{NAME}@{ONE}"
    record_tag(environment, other, [on_node(ID, f"{NAME}@{ONE}")])  # it has the right one again
    environment.refresh_from_db()
    assert environment.image_retagged == ""


def test_an_administrator_updates_the_image_and_submitted_jobs_keep_theirs(scene) -> None:
    environment, node = scene["environment"], scene["node"]
    record_tag(environment, node, [on_node(ID, f"{NAME}@{ONE}")])
    EnvironmentOnNode.objects.create(environment=environment, node=node, state="present")
    before = record.job(scene["owner"], scene["project"], environment)
    with pytest.raises(Conflict) as unchanged:
        do_update_image(scene["admin"], environment)
    assert unchanged.value.code == "image_unchanged"
    record_tag(environment, node, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    with pytest.raises(NotAllowed):
        do_update_image(scene["owner"], environment)
    updated = do_update_image(scene["admin"], environment)
    assert (updated.image_digest, updated.image_retagged) == (f"{NAME}@{OTHER}", "")
    entry = AuditEntry.objects.get(act="environment.update_image")
    assert (entry.before, entry.actor) == ({"digest": f"{NAME}@{ONE}"}, scene["admin"])
    assert EnvironmentOnNode.objects.get().state == "missing"
    after = record.job(scene["owner"], scene["project"], Environment.objects.get(pk=environment.pk))
    assert [pin_job(before), pin_job(after)] == [f"{NAME}@{ONE}", f"{NAME}@{OTHER}"]


def test_a_check_of_the_tag_is_asked_of_one_node_that_answers(scene) -> None:
    environment = scene["environment"]
    assert do_check_tag(scene["admin"], environment) == scene["node"]
    environment.refresh_from_db()
    assert environment.check_tag and EnvironmentOnNode.objects.get().wanted_at is not None
    with pytest.raises(NotAllowed):
        do_check_tag(scene["owner"], environment)
    scene["node"].reachable = False
    scene["node"].save()
    with pytest.raises(Conflict) as away:
        do_check_tag(scene["admin"], environment)
    assert away.value.code == "no_node"
    for runtime, image in (("process", ""), ("podman", f"{NAME}@{ONE}")):
        fixed = record.environment(runtime=runtime, image=image)
        with pytest.raises(Conflict) as no_tag:
            do_check_tag(scene["admin"], fixed)
        assert no_tag.value.code == "no_tag"


def test_another_image_or_archive_is_resolved_anew_and_one_named_by_digest_at_once(scene) -> None:
    admin, environment = scene["admin"], scene["environment"]

    def save(**words):
        known = {"name": "torch", "title": "Torch", "runtime": RuntimeKind.PODMAN, "image": f"{NAME}:2"}
        return do_save_environment(admin, EnvironmentWords(**known | words), environment)

    record_tag(environment, scene["node"], [on_node(ID, f"{NAME}@{ONE}")])
    assert save(title="Torch 2").image_digest == f"{NAME}@{ONE}"
    assert save(archive="/images/torch.tar").image_digest == ""
    assert save(image=f"{NAME}@{OTHER}").image_digest == f"{NAME}@{OTHER}"
    record_tag(environment, scene["node"], [on_node(ID, f"{NAME}@{ONE}", ref=f"{NAME}:2")])
    environment.refresh_from_db()
    assert (environment.image_digest, environment.image_retagged) == (f"{NAME}@{OTHER}", "")


def test_images_of_live_tasks_stay_on_their_node_after_an_update(scene) -> None:
    environment, node = scene["environment"], scene["node"]
    record_tag(environment, node, [on_node(ID, f"{NAME}@{ONE}")])
    place(scene, record.job(scene["owner"], scene["project"], environment))
    record_tag(environment, node, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    do_update_image(scene["admin"], environment)
    assert {f"{NAME}@{ONE}", f"{NAME}@{OTHER}"} <= set(images_kept_on(node.pk))


def test_two_nodes_that_answer_at_once_leave_one_pin(scene) -> None:
    environment = scene["environment"]
    stale = Environment.objects.get(pk=environment.pk)  # read before the other node answered
    record_tag(environment, scene["node"], [on_node(ID, f"{NAME}@{ONE}")])
    record_tag(stale, record.node(scene["pool"], name="second"), [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    assert stale.image_digest == f"{NAME}@{ONE}"
    assert Environment.objects.get(pk=environment.pk).image_retagged == f"{NAME}@{OTHER}"
    assert image_pins.has_pin(stale.image_digest, [on_node(ID, f"{NAME}@{ONE}")])
