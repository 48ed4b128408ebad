"""Brings environments' images to a node that lacks them, beside the actor, with progress on the page.

A job's image is brought at once; what admins want brought ahead of jobs begins while few images are on their way.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from django.db import connection

from agents.engines.contract import Engine, PullProgress, Refused, Unknown
from agents.node.image_names import plain_name
from portal.models import Environment, EnvironmentOnNode, Node, Task
from portal.services import lifecycle
from portal.services.bringing import wanted_on
from portal.services.catalogue import record_image_cuda
from portal.services.image_pins import has_pin, pin_of, record_claim, tagged_images
from portal.services.node_acts import tidy_if_full
from portal.services.registries import login_for
from portal.services.sealing import CannotOpen as SealedElsewhere
from portal.words.states import CONTAINERS
from scheduler.opening import CannotOpen, open_engine
from scheduler.start_spec import image_of

log = logging.getLogger(__name__)

PIECE_BYTES = 512 * 1024
TELL_EVERY_PERCENT = 2
AT_ONCE = 2
"""While so many images are on their way to a node, none begins that no job waits for."""


class ImageBringer:
    """The image work of one node: each image at most once at a time, each in a thread with its own stream."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._bringing: set[int] = set()
        self._awaited: set[int] = set()
        self._failures: dict[int, str] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def is_bringing(self, task: Task) -> bool:
        """True while the image of this task is on its way."""
        return task.attempt.job.environment_id in self._bringing

    def failure(self, task: Task) -> str | None:
        """Why the image could not be brought, told once."""
        with self._lock:
            return self._failures.pop(task.attempt.job.environment_id, None)

    def bring(self, node: Node, task: Task) -> None:
        """Begins to bring the image that a task needs."""
        environment = task.attempt.job.environment
        if self._begin(node, environment, task.attempt.job.image_digest, awaited=True):
            lifecycle.task_problem(task.pk, f"Bringing the image of {environment.title} to {node.name}.")

    def bring_wanted(self, node: Node) -> None:
        """Begins what admins want on this node ahead of jobs, in their order, as far as there is room for it."""
        for environment in wanted_on(node.pk):
            if len(self._bringing) >= AT_ONCE:
                return
            self._begin(node, environment)

    def on_their_way(self) -> set[int]:
        """Row numbers of the environments that are being brought now."""
        with self._lock:
            return set(self._bringing)

    def end(self) -> None:
        """Asks uploads to end; what has arrived stays, and the next one goes on from there."""
        self._stopping.set()

    def _begin(self, node: Node, environment: Environment, pin: str = "", *, awaited: bool = False) -> bool:
        """Begins to bring one; False when it is on its way. ``awaited``: a job is told when it fails.

        ``pin`` is that of the job; blank: that of the environment.
        """
        with self._lock:
            if environment.pk in self._bringing:
                return False
            self._bringing.add(environment.pk)
            if awaited:
                self._awaited.add(environment.pk)
        threading.Thread(
            target=self._run, args=(node, environment, pin), name=f"image-{node.name}", daemon=True
        ).start()
        return True

    def _run(self, node: Node, environment: Environment, pin: str) -> None:
        try:
            problem = self._bring(node, environment, pin)
            if problem is not None and not self._stopping.is_set():  # else the next worker goes on
                note_environment(environment, node, "failed", problem)
                with self._lock:
                    if environment.pk in self._awaited:
                        self._failures[environment.pk] = problem
        finally:
            with self._lock:
                self._bringing.discard(environment.pk)
                self._awaited.discard(environment.pk)
            connection.close()
            self._done()

    def _bring(self, node: Node, environment: Environment, pin: str) -> str | None:
        """Brings it; None on success, else the reason as a sentence."""
        note_environment(environment, node, "loading", "Waiting for the node.")
        environment.refresh_from_db()
        check_wanted = EnvironmentOnNode.objects.filter(environment=environment, node=node, check_tag=True)
        checks = not pin and check_wanted.exists()
        pin = pin or environment.image_digest
        try:
            engine = open_engine(node, role="bulk")
        except CannotOpen as problem:
            return str(problem)
        try:
            if environment.archive:
                self._load(engine, node, environment)
            elif not environment.image:
                return "The environment names no image."
            elif pin or checks or not tagged_images(environment, engine.images()):
                # what was resolved is pulled by its digest; only its tag can be pulled where that is no registry's
                wanted = environment.image if checks or "@" not in pin else pin
                engine.watch(lambda event: _note_pull(environment, node, event))
                engine.pull(wanted, login_for(wanted))
            if checks:
                check_wanted.update(check_tag=False)
            if missing := _afterwards(engine, node, environment, pin):
                return missing
        except Refused as refusal:
            with contextlib.suppress(Refused, Unknown):  # what its tag named there may have gone
                record_claim(environment, node, engine.images())
            return refusal.message
        except Unknown as silence:
            return f"The node stopped answering: {silence}"
        except SealedElsewhere as problem:
            return f"The login of its registry cannot be opened: {problem}. An administrator writes it again."
        except OSError as problem:
            return f"The archive cannot be read: {problem}"
        finally:
            engine.close()
        note_environment(environment, node, "present", "")
        return None

    def _load(self, engine: Engine, node: Node, environment: Environment) -> None:
        """Sends the archive in pieces, from where an earlier upload ended."""
        path = Path(environment.archive)
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            for piece in iter(lambda: stream.read(1 << 20), b""):
                digest.update(piece)
            upload = digest.hexdigest()[:32]
            offset = min(engine.load(upload, 0, b""), size)
            stream.seek(offset)
            told = -TELL_EVERY_PERCENT
            while piece := stream.read(PIECE_BYTES):
                if self._stopping.is_set():
                    raise Unknown("This worker is ending.")
                offset = engine.load(upload, offset, piece)
                percent = offset * 100 // max(size, 1)
                if percent >= told + TELL_EVERY_PERCENT:
                    told = percent
                    note_environment(environment, node, "loading", "Sending the image.", percent)
        note_environment(environment, node, "loading", "The node unpacks the image.", 100)
        engine.load(upload, offset, b"", sha256=digest.hexdigest())


def _afterwards(engine: Engine, node: Node, environment: Environment, pin: str) -> str | None:
    """What the image is, what images ask of drivers, and whether they take too much room on the disk.

    Gives why the node has not the image of ``pin``; None when it has, and for none.
    """
    with contextlib.suppress(Refused, Unknown):
        images = engine.images()
        environment.refresh_from_db()  # its image may have been changed meanwhile
        record_claim(environment, node, images)
        note_cuda(node, images)
        tidy_if_full(node, engine.store_used_percent())
        if pin and not has_pin(pin, images):
            tagged = tagged_images(environment, images)
            found = f"names {pin_of(environment, tagged[0])}" if tagged else "names no image there"
            return f"{environment.image} {found}, and not {pin}."
    return None


def note_environment(
    environment: Environment, node: Node, state: str, detail: str, percent: int | None = None
) -> None:
    """Writes down how far an environment has come on a node, for the pages; the end of it ends an admin's wish."""
    defaults: dict[str, object] = {"state": state, "detail": detail[:500], "progress_percent": percent}
    if state in ("present", "failed"):
        defaults["wanted_at"] = None
    EnvironmentOnNode.objects.update_or_create(environment=environment, node=node, defaults=defaults)


def note_images(node: Node, images: list[dict[str, Any]], on_their_way: Container[int] = ()) -> None:
    """Writes down which environments a node has, from what it told of its images.

    What a worker that is gone was bringing is not on its way any more.
    """
    told = _by_name(images)
    for environment in Environment.objects.filter(runtime__in=CONTAINERS):
        row = record_claim(environment, node, images)
        present = _image_of(environment, told) is not None
        broken_off = row.state == "loading" and environment.pk not in on_their_way
        if broken_off or (row.state == "present") != present:
            note_environment(environment, node, "present" if present else "missing", "")
    note_cuda(node, images)


def note_cuda(node: Node, images: list[dict[str, Any]]) -> None:
    """Writes down which CUDA each environment's image asks of the driver, as a node that has it tells."""
    told = _by_name(images)
    for environment in Environment.objects.filter(runtime__in=CONTAINERS):
        image = _image_of(environment, told)
        if image is not None and "cuda" in image:  # earlier agents do not look
            record_image_cuda(environment, node, image["cuda"] or "")


def _by_name(images: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        plain_name(name): row for row in images for name in (row["image_id"], *row["refs"], *row["digests"])
    }


def _image_of(environment: Environment, told: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The row of an environment's image among those that a node told, by name."""
    wanted = image_of(environment)
    return None if wanted is None else told.get(plain_name(wanted))


def _note_pull(environment: Environment, node: Node, event: object) -> None:
    if isinstance(event, PullProgress):
        note_environment(environment, node, "loading", event.sentence)
