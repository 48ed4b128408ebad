"""Images that are brought to a node ahead of jobs: how many at a time, and what becomes of the wish."""

from __future__ import annotations

import threading

import pytest

from agents.engines.contract import Refused
from portal.models import Attempt, EnvironmentOnNode, NodeCheck, Task
from portal.services.bringing import do_bring
from scheduler import images
from scheduler.images import AT_ONCE, ImageBringer, note_images
from tests import record
from tests.engine_room import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


NAMES = ("one", "broken", "three")


class SlowEngine:
    """Pulls when it is told to; refuses one image."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)

    def watch(self, keep) -> None:
        pass

    def pull(self, image: str, login) -> None:
        self.go_on.acquire()
        if image.endswith("broken:1"):
            raise Refused("engine_error", "There is no such image.")

    def images(self) -> list[dict[str, object]]:
        return []

    def store_used_percent(self) -> float:
        return 90.0

    def close(self) -> None:
        pass


def states(node) -> dict[str, str]:
    rows = EnvironmentOnNode.objects.filter(node=node, environment__name__in=NAMES).select_related(
        "environment"
    )
    return {row.environment.name: f"{row.state}{' wanted' if row.wanted_at else ''}" for row in rows}


def test_two_at_a_time_and_each_wish_ends_with_its_image(monkeypatch) -> None:
    scene, admin, slow = record.scene(), record.person("root", admin=True), SlowEngine()
    node = scene["node"]
    monkeypatch.setattr(images, "open_engine", lambda node, role: slow)
    for name in NAMES:
        do_bring(admin, record.environment(name, image=f"localhost/{name}:1"))
    again = threading.Event()
    bringer = ImageBringer(again.set)
    bringer.bring_wanted(node)
    bringer.bring_wanted(node)
    expected = {"one": "loading wanted", "broken": "loading wanted", "three": "missing wanted"}
    wait_for("two are on their way", lambda: states(node) == expected)
    assert len(bringer.on_their_way()) == AT_ONCE == 2
    note_images(node, [], bringer.on_their_way())
    assert states(node) == expected

    slow.go_on.release(2)
    wait_for("both are over", lambda: again.is_set() and not bringer.on_their_way())
    assert states(node) == {"one": "present", "broken": "failed", "three": "missing wanted"}
    bringer.bring_wanted(node)
    slow.go_on.release()
    wait_for("the third follows", lambda: states(node)["three"] == "present")
    wait_for("its thread ended", lambda: not bringer.on_their_way())
    assert NodeCheck.objects.get().kind == "gc", "its store is fuller than it may be"
    broken = EnvironmentOnNode.objects.get(state="failed").environment
    job = record.job(scene["owner"], scene["project"], broken)
    assert bringer.failure(Task(attempt=Attempt(job=job))) is None  # no job was refused for it


def test_what_a_worker_was_bringing_when_it_ended_is_begun_again(monkeypatch) -> None:
    scene, admin, slow = record.scene(), record.person("root", admin=True), SlowEngine()
    monkeypatch.setattr(images, "open_engine", lambda node, role: slow)
    do_bring(admin, record.environment("broken", image="localhost/broken:1"))
    bringer = ImageBringer(lambda: None)
    bringer.bring_wanted(scene["node"])
    bringer.end()
    slow.go_on.release()
    wait_for("it has ended", lambda: not bringer.on_their_way())
    assert states(scene["node"])["broken"] == "loading wanted"
    note_images(scene["node"], [])
    assert states(scene["node"])["broken"] == "missing wanted"
