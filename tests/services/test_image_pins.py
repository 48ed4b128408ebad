"""Which image an environment's tag means: agreed on once, kept by jobs, and changed by administrators only."""

from __future__ import annotations

import pytest

from portal.domain.states import RuntimeKind
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import Attempt, AuditEntry, Environment, ImagePresence, Job, Node, Task
from portal.selectors.environments.environments import nodes_by_pin, tag_claims
from portal.services.environments.archives import archive_config_digest
from portal.services.environments.environments import EnvironmentInput, do_save_environment
from portal.services.environments.pins import do_check_tag, do_update_image, pin_job, pin_of, record_claim
from portal.services.environments.prefetch import protected_images
from tests import factories
from tests.agents.node.loadable import archive
from tests.services.test_lifecycle import place

pytestmark = pytest.mark.django_db

ONE, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
ID, OTHER_ID = "sha256:" + "a" * 64, "sha256:" + "b" * 64
NAME = "registry.example:5000/lab/torch"


def on_node(image_id: str, *digests: str, ref: str = f"{NAME}:2") -> dict[str, object]:
    return {"image_id": image_id, "refs": [ref], "digests": list(digests), "runtime": "podman"}


@pytest.fixture
def dataset():
    made = factories.basic_cluster() | {"admin": factories.user("root", admin=True)}
    made["environment"] = factories.environment("torch", tool=False, image=f"{NAME}:2")
    return made | {"second": factories.node(made["pool"], name="second")}


def agree(dataset, image_id: str, digest: str) -> None:
    """Both nodes report the same image."""
    for node in (dataset["node"], dataset["second"]):
        record_claim(dataset["environment"], node, [on_node(image_id, f"{NAME}@{digest}")])


def claims(environment: Environment) -> dict[str, list[str]]:
    return nodes_by_pin(tag_claims().filter(environment=environment))


def task_of(attempt: Attempt) -> Task:
    return Task.objects.get(attempt=attempt)


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
        (f"{NAME}:2", "", on_node("evil.example/x:1", f"{NAME}@sha256:1", f"{NAME}@latest"), ""),
    ],
)
def test_a_registry_image_is_pinned_by_its_digest_and_a_loaded_one_by_its_configuration(
    image, archive, row, pin
) -> None:
    assert pin_of(Environment(image=image, archive=archive), row) == pin


def test_an_image_is_confirmed_once_two_nodes_report_it(dataset) -> None:
    environment, node, second = dataset["environment"], dataset["node"], dataset["second"]
    early = factories.job(dataset["owner"], dataset["project"], environment)
    record_claim(environment, node, [on_node(ID, f"{NAME}@{ONE}")])
    environment.refresh_from_db()
    assert (early.image_digest, environment.image_digest) == ("", "")
    record_claim(environment, second, [on_node(ID, f"{NAME}@{ONE}")])
    environment.refresh_from_db()
    assert environment.image_digest == f"{NAME}@{ONE}" and environment.image_resolved_at is not None
    assert environment.image_resolved_by == f"{node.name}, second"
    assert AuditEntry.objects.filter(action="environment.image_resolved").count() == 1
    later = factories.job(dataset["owner"], dataset["project"], environment)
    assert later.image_digest == f"{NAME}@{ONE}"
    task = task_of(place(dataset, early))
    assert (pin_job(task), Job.objects.get(pk=early.pk).image_attempt) == (f"{NAME}@{ONE}", None)

    record_claim(environment, second, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    environment.refresh_from_db()
    assert environment.image_digest == f"{NAME}@{ONE}"
    assert claims(environment) == {f"{NAME}@{ONE}": [node.name], f"{NAME}@{OTHER}": ["second"]}
    record_claim(environment, second, [])
    assert claims(environment) == {f"{NAME}@{ONE}": [node.name]}


def test_one_node_alone_changes_neither_an_environment_nor_other_reports(dataset) -> None:
    environment, honest = dataset["environment"], dataset["node"]
    hostile = dataset["second"]
    third = factories.node(dataset["pool"], name="third")
    said = [
        on_node(image_id, *digests, ref=f"{NAME}:2")
        for image_id in (ID, OTHER_ID, "sha256:x", "evil.example/x:1", "", ":latest")
        for digests in ([], [f"{NAME}@{OTHER}"], [f"{NAME}@{ONE}", f"{NAME}@{OTHER}"], [f"{NAME}@sha256:x"])
    ]

    def attack() -> None:
        before = Environment.objects.values().get(pk=environment.pk)
        of_others = list(ImagePresence.objects.exclude(node=hostile).order_by("pk").values())
        for images in ([], said, *([image] for image in said)):
            record_claim(Environment.objects.get(pk=environment.pk), hostile, images)
        assert Environment.objects.values().get(pk=environment.pk) == before
        assert list(ImagePresence.objects.exclude(node=hostile).order_by("pk").values()) == of_others

    attack()
    record_claim(environment, hostile, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    for node in (honest, third):
        record_claim(Environment.objects.get(pk=environment.pk), node, [on_node(ID, f"{NAME}@{ONE}")])
    assert Environment.objects.get(pk=environment.pk).image_digest == f"{NAME}@{ONE}"
    attack()


@pytest.mark.parametrize(
    ("nodes", "pinned"),
    [
        ([(ONE, "healthy")], True),  # no other node can run it
        ([(ONE, "healthy"), ("", "healthy")], False),
        ([(ONE, "healthy"), (ONE, "healthy")], True),
        ([(ONE, "healthy"), (ONE, "probation")], True),
        ([(ONE, "healthy"), (ONE, "quarantined")], False),
        ([(ONE, "healthy"), (OTHER, "healthy")], False),
        ([(OTHER, "healthy"), (ONE, "healthy"), (ONE, "healthy")], True),
        ([(OTHER, "healthy"), (OTHER, "quarantined"), (ONE, "healthy"), (ONE, "healthy")], True),
        (
            [
                (OTHER, "quarantined"),
                (OTHER, "quarantined"),
                (ONE, "healthy"),
                (ONE, "healthy"),
                (OTHER, "healthy"),
            ],
            True,
        ),
    ],
)
def test_an_environment_is_pinned_by_the_trusted_nodes_that_agree(nodes, pinned) -> None:
    environment, pool = factories.environment(tool=False, image=f"{NAME}:2"), factories.pool()
    rows = [(factories.node(pool, breaker_state=state), digest) for digest, state in nodes]
    for node, digest in rows:
        record_claim(environment, node, [on_node(ID, f"{NAME}@{digest}")] if digest else [])
    environment.refresh_from_db()
    assert environment.image_digest == (f"{NAME}@{ONE}" if pinned else "")


def test_two_pairs_of_nodes_that_disagree_need_an_administrator(dataset) -> None:
    environment = dataset["environment"]
    for name, digest, state in (
        ("a", ONE, "quarantined"), ("b", ONE, "healthy"), ("c", OTHER, "quarantined"), ("d", OTHER, "healthy")
    ):  # fmt: skip
        node = factories.node(dataset["pool"], name=name, breaker_state=state)
        record_claim(environment, node, [on_node(digest, f"{NAME}@{digest}")])
    Node.objects.update(breaker_state="healthy")
    record_claim(environment, Node.objects.get(name="a"), [on_node(ONE, f"{NAME}@{ONE}")])
    assert Environment.objects.get(pk=environment.pk).image_digest == ""
    with pytest.raises(Conflict) as unclear:
        do_update_image(dataset["admin"], environment)
    assert unclear.value.code == "ambiguous_image"
    with pytest.raises(InvalidRequest):
        do_update_image(dataset["admin"], environment, f"{NAME}@sha256:{'3' * 64}")
    assert do_update_image(dataset["admin"], environment, f"{NAME}@{ONE}").image_digest == f"{NAME}@{ONE}"


def test_a_node_with_several_digests_of_one_image_reports_the_one_that_others_report(dataset) -> None:
    environment = dataset["environment"]
    record_claim(environment, dataset["node"], [on_node(ID, f"{NAME}@{OTHER}")])
    record_claim(environment, dataset["second"], [on_node(ID, f"{NAME}@{ONE}", f"{NAME}@{OTHER}")])
    assert Environment.objects.get(pk=environment.pk).image_digest == f"{NAME}@{OTHER}"


def test_reports_after_an_image_change_pin_nothing(dataset) -> None:
    stale = Environment.objects.get(pk=dataset["environment"].pk)
    Environment.objects.filter(pk=stale.pk).update(image=f"{NAME}:3")
    for node in (dataset["node"], dataset["second"]):
        record_claim(stale, node, [on_node(ID, f"{NAME}@{ONE}")])
    assert Environment.objects.get(pk=stale.pk).image_digest == ""


def test_the_archive_of_the_environment_counts_like_a_node(dataset, tmp_path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(archive(f"{NAME}:2", size_kib=1))
    held = archive_config_digest(str(path), f"{NAME}:2")
    environment = factories.environment("loaded", tool=False, image=f"{NAME}:2", archive=str(path))
    record_claim(environment, dataset["second"], [on_node(OTHER_ID)])
    assert Environment.objects.get(pk=environment.pk).image_digest == ""
    record_claim(environment, dataset["node"], [on_node(held)])
    assert Environment.objects.get(pk=environment.pk).image_digest == held


def test_ranks_and_attempts_keep_the_image_that_the_first_node_named(dataset) -> None:
    environment, node, second = dataset["environment"], dataset["node"], dataset["second"]
    job = factories.job(dataset["owner"], dataset["project"], environment, tasks=2)
    first, other = place(dataset, job).task_rows.order_by("rank")
    assert pin_job(first) == ""
    record_claim(environment, node, [on_node(ID, f"{NAME}@{ONE}")])
    record_claim(environment, second, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    other.node = second
    assert [pin_job(first), pin_job(other)] == [f"{NAME}@{ONE}"] * 2
    do_update_image(dataset["admin"], environment, f"{NAME}@{OTHER}")
    assert pin_job(Task.objects.get(pk=other.pk)) == f"{NAME}@{ONE}"


def test_an_administrator_updates_the_image_and_submitted_jobs_keep_theirs(dataset) -> None:
    environment, node = dataset["environment"], dataset["node"]
    agree(dataset, ID, ONE)
    ImagePresence.objects.filter(node=node).update(state="present")
    before = factories.job(dataset["owner"], dataset["project"], environment)
    with pytest.raises(Conflict) as unchanged:
        do_update_image(dataset["admin"], environment)
    assert unchanged.value.code == "image_unchanged"
    record_claim(environment, node, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    with pytest.raises(Forbidden):
        do_update_image(dataset["owner"], environment)
    updated = do_update_image(dataset["admin"], environment)
    assert (updated.image_digest, updated.image_resolved_by) == (f"{NAME}@{OTHER}", "root")
    entry = AuditEntry.objects.get(action="environment.update_image")
    assert (entry.before, entry.actor) == ({"digest": f"{NAME}@{ONE}"}, dataset["admin"])
    assert not ImagePresence.objects.filter(state="present").exists()
    after = factories.job(dataset["owner"], dataset["project"], Environment.objects.get(pk=environment.pk))
    assert [before.image_digest, after.image_digest] == [f"{NAME}@{ONE}", f"{NAME}@{OTHER}"]
    assert pin_job(task_of(place(dataset, before))) == f"{NAME}@{ONE}"


def test_a_tag_check_is_sent_to_one_responding_node(dataset) -> None:
    environment = dataset["environment"]
    assert do_check_tag(dataset["admin"], environment) == dataset["node"]
    row = ImagePresence.objects.get()
    assert row.check_tag and row.pull_requested_at is not None
    with pytest.raises(Forbidden):
        do_check_tag(dataset["owner"], environment)
    Node.objects.update(reachable=False)
    with pytest.raises(Conflict) as away:
        do_check_tag(dataset["admin"], environment)
    assert away.value.code == "no_node"
    for runtime, image in (("process", ""), ("podman", f"{NAME}@{ONE}")):
        fixed = factories.environment(runtime=runtime, image=image)
        with pytest.raises(Conflict) as no_tag:
            do_check_tag(dataset["admin"], fixed)
        assert no_tag.value.code == "no_tag"


def test_another_image_or_archive_is_resolved_again_and_a_digest_at_once(dataset) -> None:
    admin, environment = dataset["admin"], dataset["environment"]

    def save(**words):
        known = {"name": "torch", "title": "Torch", "runtime": RuntimeKind.PODMAN, "image": f"{NAME}:2"}
        return do_save_environment(admin, EnvironmentInput(**known | words), environment)

    agree(dataset, ID, ONE)
    assert save(title="Torch 2").image_digest == f"{NAME}@{ONE}"
    assert save(archive="/images/torch.tar").image_digest == ""
    assert save(image=f"{NAME}@{OTHER}").image_digest == f"{NAME}@{OTHER}"
    agree(dataset, ID, ONE)
    environment.refresh_from_db()
    assert (environment.image_digest, claims(environment)) == (f"{NAME}@{OTHER}", {})


def test_images_of_live_tasks_stay_on_their_node_after_an_update(dataset) -> None:
    environment, node = dataset["environment"], dataset["node"]
    agree(dataset, ID, ONE)
    place(dataset, factories.job(dataset["owner"], dataset["project"], environment))
    record_claim(environment, node, [on_node(OTHER_ID, f"{NAME}@{OTHER}")])
    do_update_image(dataset["admin"], environment)
    assert {f"{NAME}@{ONE}", f"{NAME}@{OTHER}"} <= set(protected_images(node.pk))
