"""Images that are brought to a node: how many at a time, what becomes of the wish, and which image a job gets."""

from __future__ import annotations

import threading

import pytest
from django.test import Client
from django.utils import timezone

from agents.engines.replies import AgentError, StartResult
from agents.verbs import HELLO, START, Verb
from portal.domain.jobs.reasons import EndReason
from portal.models import Attempt, Environment, ImagePresence, Job, NodeOperation, Task
from portal.services.environments.pins import do_check_tag, pin_job
from portal.services.environments.prefetch import do_prefetch_image
from portal.services.lifecycle import job_control
from scheduler import leases
from scheduler.nodes import image_pulls
from scheduler.nodes.dispatch import fail_task, start_task
from scheduler.nodes.image_pulls import MAX_CONCURRENT_PULLS, ImagePuller, record_images
from scheduler.nodes.node_connection import NodeConnection
from tests import factories
from tests.engine_harness import wait_for
from tests.services.test_lifecycle import place

pytestmark = pytest.mark.django_db(transaction=True)


NAMES = ("one", "broken", "three")


class SlowEngine:
    """Pulls when it is told to; refuses one image."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.pulled: list[str] = []

    def watch(self, keep) -> None:
        pass

    def pull(self, image: str, login) -> None:
        self.pulled.append(image)
        self.go_on.acquire()
        if image.endswith("broken:1"):
            raise AgentError("engine_error", "There is no such image.")

    def request(self, verb: Verb, read: object) -> object:
        return [] if verb is HELLO else 90.0

    def close(self) -> None:
        pass


def states(node) -> dict[str, str]:
    rows = ImagePresence.objects.filter(node=node, environment__name__in=NAMES).select_related("environment")
    return {row.environment.name: f"{row.state}{' wanted' if row.pull_requested_at else ''}" for row in rows}


def test_two_at_a_time_and_each_wish_ends_with_its_image(monkeypatch) -> None:
    dataset, admin, slow = factories.basic_cluster(), factories.user("root", admin=True), SlowEngine()
    node = dataset["node"]
    monkeypatch.setattr(image_pulls, "open_engine", lambda node, role: slow)
    for name in NAMES:
        do_prefetch_image(admin, factories.environment(name, image=f"localhost/{name}:1"))
    again = threading.Event()
    bringer = ImagePuller(again.set)
    bringer.prefetch(node)
    bringer.prefetch(node)
    expected = {"one": "loading wanted", "broken": "loading wanted", "three": "missing wanted"}
    wait_for("two are on their way", lambda: states(node) == expected)
    assert len(bringer.in_progress()) == MAX_CONCURRENT_PULLS == 2
    record_images(node, [], bringer.in_progress())
    assert states(node) == expected

    slow.go_on.release(2)
    wait_for("both are over", lambda: again.is_set() and not bringer.in_progress())
    assert states(node) == {"one": "present", "broken": "failed", "three": "missing wanted"}
    bringer.prefetch(node)
    slow.go_on.release()
    wait_for("the third follows", lambda: states(node)["three"] == "present")
    wait_for("its thread ended", lambda: not bringer.in_progress())
    assert NodeOperation.objects.get().kind == "gc", "its store is fuller than it may be"
    broken = ImagePresence.objects.get(state="failed").environment
    job = factories.job(dataset["owner"], dataset["project"], broken)
    assert bringer.take_failure(Task(attempt=Attempt(job=job))) is None  # no job was refused for it


def test_a_pull_interrupted_with_its_worker_is_restarted(monkeypatch) -> None:
    dataset, admin, slow = factories.basic_cluster(), factories.user("root", admin=True), SlowEngine()
    monkeypatch.setattr(image_pulls, "open_engine", lambda node, role: slow)
    do_prefetch_image(admin, factories.environment("broken", image="localhost/broken:1"))
    bringer = ImagePuller(lambda: None)
    bringer.prefetch(dataset["node"])
    bringer.stop()
    slow.go_on.release()
    wait_for("it has ended", lambda: not bringer.in_progress())
    assert states(dataset["node"])["broken"] == "loading wanted"
    record_images(dataset["node"], [])
    assert states(dataset["node"])["broken"] == "missing wanted"


def test_an_attempt_records_how_long_it_waited_for_its_image(monkeypatch) -> None:
    dataset, slow = factories.basic_cluster(), SlowEngine()
    monkeypatch.setattr(image_pulls, "open_engine", lambda node, role: slow)
    environment = factories.environment(tool=False, image="localhost/one:1")
    jobs = [
        factories.job(dataset["owner"], dataset["project"], environment, milli_per_gpu=500) for _ in range(2)
    ]
    attempts = [place(dataset, job, milli=500) for job in jobs]
    tasks = [each.task_rows.select_related("attempt__job__environment").get() for each in attempts]
    bringer = ImagePuller(lambda: None)
    assert not bringer.is_pulling(dataset["node"], tasks[0])
    bringer.pull(dataset["node"], tasks[0])
    for task in (*tasks, *tasks):  # the second waits for the transfer that runs
        assert bringer.is_pulling(dataset["node"], task)
    assert [each.image_pulled_at for each in Attempt.objects.all()] == [None, None]
    slow.go_on.release()
    wait_for("it is over", lambda: not Attempt.objects.filter(image_pulled_at__isnull=True).exists())
    for attempt in Attempt.objects.all():
        assert attempt.created_at <= attempt.image_pull_started_at <= attempt.image_pulled_at
        assert list(attempt.events.filter(reason="image").values_list("kind", flat=True)) == [
            "image_pull", "image_pulled",
        ]  # fmt: skip


# -- which image ---------------------------------------------------------------------------------------

NAME = "registry.example/lab/torch"
ONE, OTHER = (f"{NAME}@sha256:{digit * 64}" for digit in "12")


def reported(pin: str) -> dict[str, object]:
    return {"image_id": "sha256:" + "a" * 64, "refs": [f"{NAME}:2"], "digests": [pin], "runtime": "podman"}


def test_checking_the_tag_on_one_node_leaves_the_others_with_the_digest(monkeypatch) -> None:
    dataset, admin, slow = factories.basic_cluster(), factories.user("root", admin=True), SlowEngine()
    monkeypatch.setattr(image_pulls, "open_engine", lambda node, role: slow)
    second = factories.node(dataset["pool"], name="second")
    environment = factories.environment(tool=False, image=f"{NAME}:2", image_digest=ONE)
    checked = do_check_tag(admin, environment)
    (other,) = {dataset["node"], second} - {checked}
    for node in (other, checked, checked):
        do_prefetch_image(admin, environment, node)
        bringer = ImagePuller(lambda: None)
        slow.go_on.release()
        bringer.prefetch(node)
        wait_for("it was brought", lambda one=bringer: not one.in_progress())
    assert slow.pulled == [ONE, f"{NAME}:2", ONE]


@pytest.fixture
def job_of_two_nodes():
    """A waiting job without a pin, a node that reports an image under its tag, and a second node that has none."""
    dataset = factories.basic_cluster()
    second = factories.node(dataset["pool"], name="second")
    environment = factories.environment("torch", tool=False, image=f"{NAME}:2")
    record_images(dataset["node"], [reported(ONE)])
    job = factories.job(dataset["owner"], dataset["project"], environment, max_attempts=9)
    return dataset | {"second": second, "environment": environment, "job": job}


class StartingEngine:
    """Starts each task; keeps the images."""

    hello = {"capabilities": []}

    def __init__(self) -> None:
        self.images: list[object] = []

    def supports(self, feature: object) -> bool:
        return True

    def request(self, verb: Verb, read: object, *, epoch: int, spec: dict[str, object]) -> StartResult:
        assert verb is START
        self.images.append(spec["image"])
        return StartResult("container", {})


def test_image_that_a_tag_named_when_the_job_started_is_on_its_page_and_in_rest(job_of_two_nodes) -> None:
    dataset, client, engine = job_of_two_nodes, Client(), StartingEngine()
    node, job = dataset["node"], dataset["job"]
    client.force_login(dataset["owner"])
    rest, page = f"/api/v1/jobs/{job.public_id}/", f"/jobs/{job.public_id}/"
    assert client.get(rest).json()["image_digest"] == ""
    task = Task.objects.get(attempt=place(dataset, job))
    factories.cluster_settings()
    lease = leases.acquire(leases.node_lease(node.public_id), "worker", 60.0)
    start_task(NodeConnection(engine, lease, node), task, attempts_left=0)
    assert engine.images == [ONE]
    record_images(node, [reported(OTHER)])  # the tag names another image from now on
    assert client.get(rest).json()["image_digest"] == ONE
    assert ONE in client.get(page).content.decode()


def attempted(dataset, node, reason: EndReason | None = None) -> str:
    """Begins the job's next attempt on a node, and ends it for ``reason``; gives the image that it would start."""
    job = Job.objects.get(pk=dataset["job"].pk)
    task = Task.objects.get(attempt=place(dataset | {"node": node}, job))
    pin = pin_job(task)
    assert pin_job(Task.objects.get(pk=task.pk)) == pin
    if reason is EndReason.IMAGE_MISSING:
        fail_task(node, task, reason, "manifest unknown")
    if reason is not None:
        job_control.record_task_ended(task.pk, exit_code=None, reason=reason)
    return pin


def test_an_image_available_on_one_node_only_is_replaced_with_an_event(
    job_of_two_nodes,
) -> None:
    dataset = job_of_two_nodes
    node, second, job = dataset["node"], dataset["second"], dataset["job"]
    record_images(second, [reported(OTHER)])
    assert attempted(dataset, node, EndReason.NODE_REBOOTED) == ONE
    assert attempted(dataset, second, EndReason.IMAGE_MISSING) == ONE
    assert second not in job.avoid_nodes.all()
    assert not job.events.filter(reason="image_replaced").exists()
    assert attempted(dataset, second) == OTHER
    told = job.events.get(reason="image_replaced").message
    assert ONE in told and OTHER in told


def test_an_image_that_could_not_be_had_is_replaced_by_the_one_that_nodes_agree_on(job_of_two_nodes) -> None:
    dataset = job_of_two_nodes
    assert attempted(dataset, dataset["second"], EndReason.NODE_REBOOTED) == ""
    assert attempted(dataset, dataset["node"], EndReason.IMAGE_MISSING) == ONE
    for name in ("third", "fourth"):
        record_images(factories.node(dataset["pool"], name=name), [reported(OTHER)])
    assert attempted(dataset, dataset["node"], EndReason.IMAGE_MISSING) == OTHER
    Environment.objects.update(image_digest=ONE)  # an administrator chose it since
    dataset["job"].refresh_from_db()
    assert (dataset["job"].image_digest, dataset["job"].image_attempt) == (OTHER, None)
    assert attempted(dataset, dataset["second"]) == OTHER, "what nodes had agreed on stays"


def test_other_ends_replace_no_image(job_of_two_nodes) -> None:
    dataset = job_of_two_nodes
    record_images(dataset["second"], [reported(OTHER)])
    assert attempted(dataset, dataset["node"], EndReason.NODE_REBOOTED) == ONE
    assert attempted(dataset, dataset["second"], EndReason.START_REFUSED) == ONE
    assert attempted(dataset, dataset["second"]) == ONE


def test_a_replacement_without_a_digest_is_pulled_by_tag(job_of_two_nodes) -> None:
    dataset = job_of_two_nodes
    assert attempted(dataset, dataset["node"], EndReason.NODE_REBOOTED) == ONE
    assert attempted(dataset, dataset["second"], EndReason.IMAGE_MISSING) == ONE
    task = Task.objects.get(
        attempt=place(dataset | {"node": dataset["second"]}, Job.objects.get(pk=dataset["job"].pk))
    )
    assert (pin_job(task), task.attempt.job.image_digest) == ("", "")
    record_images(dataset["second"], [reported(OTHER)])
    assert pin_job(task) == OTHER


def test_images_a_node_lost_are_no_longer_recorded(monkeypatch) -> None:
    dataset, slow = factories.basic_cluster(), SlowEngine()
    monkeypatch.setattr(image_pulls, "open_engine", lambda node, role: slow)
    environment = factories.environment("broken", image="registry.example/lab/broken:1")
    ImagePresence.objects.create(
        environment=environment,
        node=dataset["node"],
        state="present",
        image_pin=ONE,
        pull_requested_at=timezone.now(),
    )
    bringer = ImagePuller(lambda: None)
    slow.go_on.release()
    bringer.prefetch(dataset["node"])
    wait_for("it failed", lambda: not bringer.in_progress())
    assert ImagePresence.objects.get(environment=environment).image_pin == ""
