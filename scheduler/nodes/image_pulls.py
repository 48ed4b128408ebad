"""Transfers environment images to a node in threads beside its actor, and records progress.

An image that a job needs is transferred at once; prefetches wait for a free slot.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from django.db import Error as DatabaseError
from django.db import connection

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import (
    AgentError,
    OutcomeUnknownError,
    PullProgress,
    read_reported_images,
    read_store_used_percent,
)
from agents.node.spec.image_names import normalize_image_name
from portal.domain.states import CONTAINER_RUNTIMES
from portal.domain.stored_texts import stored_text
from portal.models import Attempt, Environment, ImagePresence, Node, Task
from portal.services.encryption import DecryptionError as DecryptionError
from portal.services.environments.environments import record_image_cuda
from portal.services.environments.pins import has_pin, pin_of, record_claim, tagged_images
from portal.services.environments.prefetch import images_to_pull
from portal.services.environments.registries import login_for_image
from portal.services.jobs.task_reports import record_image_pull
from portal.services.lifecycle import job_control
from portal.services.nodes.operations import request_gc_if_full
from scheduler.nodes.engine_connect import EngineConnectError, open_engine
from scheduler.nodes.task_spec import image_reference

log = logging.getLogger(__name__)

CHUNK_BYTES = 512 * 1024
PROGRESS_STEP_PERCENT = 2
MAX_CONCURRENT_PULLS = 2
"""No prefetch starts while this many transfers run on a node."""


class ImagePuller:
    """Image transfers to one node: one per image at a time, each in a thread with its own connection."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._pulling: set[int] = set()
        self._needed_by_job: set[int] = set()
        self._failures: dict[int, str] = {}
        self._waiting: dict[int, set[int]] = {}
        """Attempts whose start waits for a transfer, by environment."""
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def is_pulling(self, node: Node, task: Task) -> bool:
        """Return True while the image that a task needs is transferred; its attempt then waits for it."""
        environment = task.attempt.job.environment_id
        with self._lock:
            found = environment in self._pulling
            waiting = self._waiting.setdefault(environment, set()) if found else {task.attempt_id}
            is_new = task.attempt_id not in waiting
            waiting.add(task.attempt_id)
        if is_new:
            record_image_pull(task.attempt_id, node.name, ended=False)
        return found

    def take_failure(self, task: Task) -> str | None:
        """Return why the transfer failed, once."""
        with self._lock:
            return self._failures.pop(task.attempt.job.environment_id, None)

    def pull(self, node: Node, task: Task) -> None:
        """Start the transfer of the image that a task needs."""
        environment = task.attempt.job.environment
        if self._start(node, environment, task.attempt.job.image_digest, needed_by_job=True):
            job_control.record_task_problem(
                task.pk, stored_text(f"Pulling the image of {environment.title} on {node.name}.")
            )
        self.is_pulling(node, task)

    def prefetch(self, node: Node) -> None:
        """Start transfers that administrators requested, in their order, while slots are free."""
        for environment in images_to_pull(node.pk):
            if len(self._pulling) >= MAX_CONCURRENT_PULLS:
                return
            self._start(node, environment)

    def in_progress(self) -> set[int]:
        """Return the primary keys of the environments in transfer."""
        with self._lock:
            return set(self._pulling)

    def stop(self) -> None:
        """Stop uploads; the next one resumes where they ended."""
        self._stopping.set()

    def _start(
        self, node: Node, environment: Environment, pin: str = "", *, needed_by_job: bool = False
    ) -> bool:
        """Start a transfer; return False when it is already running. ``needed_by_job``: report a failure to
        the job.

        ``pin``: the digest of the job; blank uses that of the environment.
        """
        with self._lock:
            if environment.pk in self._pulling:
                return False
            self._pulling.add(environment.pk)
            if needed_by_job:
                self._needed_by_job.add(environment.pk)
        threading.Thread(
            target=self._run, args=(node, environment, pin), name=f"image-{node.name}", daemon=True
        ).start()
        return True

    def _run(self, node: Node, environment: Environment, pin: str) -> None:
        try:
            problem = self._pull(node, environment, pin)
            if problem is not None and not self._stopping.is_set():  # else the next worker resumes
                record_image_state(environment, node, "failed", problem)
                with self._lock:
                    if environment.pk in self._needed_by_job:
                        self._failures[environment.pk] = problem
        finally:
            with self._lock:
                self._pulling.discard(environment.pk)
                self._needed_by_job.discard(environment.pk)
                waiting = self._waiting.pop(environment.pk, set())
            for attempt in waiting:
                with contextlib.suppress(DatabaseError, Attempt.DoesNotExist):  # only the phases lack it then
                    record_image_pull(attempt, node.name, ended=True)
            connection.close()
            self._on_done()

    def _pull(self, node: Node, environment: Environment, pin: str) -> str | None:
        """Transfer the image; return None on success, otherwise the reason as a message."""
        record_image_state(environment, node, "loading", "Waiting for the node.")
        environment.refresh_from_db()
        check_wanted = ImagePresence.objects.filter(environment=environment, node=node, check_tag=True)
        checks = not pin and check_wanted.exists()
        pin = pin or environment.image_digest
        try:
            engine = open_engine(node, role="bulk")
        except EngineConnectError as error:
            return str(error)
        try:
            if environment.archive:
                self._load(engine, node, environment)
            elif not environment.image:
                return "The environment names no image."
            elif pin or checks or not tagged_images(environment, _images(engine)):
                # pull by digest where there is one; an image that comes from no registry can only be pulled
                # by tag
                wanted = environment.image if checks or "@" not in pin else pin
                engine.watch(lambda event: _record_pull_progress(environment, node, event))
                engine.pull(wanted, login_for_image(wanted))
            if checks:
                check_wanted.update(check_tag=False)
            if missing := _verify(engine, node, environment, pin):
                return missing
        except AgentError as error:
            # the image that the tag named may be gone
            with contextlib.suppress(AgentError, OutcomeUnknownError):
                record_claim(environment, node, _images(engine))
            return error.message
        except OutcomeUnknownError as error:
            return stored_text(f"The node no longer responds: {error}")
        except DecryptionError as error:
            return stored_text(
                f"The registry credentials cannot be decrypted: {error}. An administrator must enter them again."
            )
        except OSError as error:
            return stored_text(f"The archive cannot be read: {error}")
        finally:
            engine.close()
        record_image_state(environment, node, "present", "")
        return None

    def _load(self, engine: NodeEngine, node: Node, environment: Environment) -> None:
        """Upload the archive in chunks, from where an earlier upload ended."""
        path = Path(environment.archive)
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            for piece in iter(lambda: stream.read(1 << 20), b""):
                digest.update(piece)
            upload = digest.hexdigest()[:32]
            offset = min(engine.load(upload, 0, b""), size)
            stream.seek(offset)
            reported = -PROGRESS_STEP_PERCENT
            while piece := stream.read(CHUNK_BYTES):
                if self._stopping.is_set():
                    raise OutcomeUnknownError("This worker is stopping.")
                offset = engine.load(upload, offset, piece)
                percent = offset * 100 // max(size, 1)
                if percent >= reported + PROGRESS_STEP_PERCENT:
                    reported = percent
                    record_image_state(environment, node, "loading", "Sending the image.", percent)
        record_image_state(environment, node, "loading", "The node is unpacking the image.", 100)
        engine.load(upload, offset, b"", sha256=digest.hexdigest())


def _images(engine: NodeEngine) -> list[dict[str, Any]]:
    return engine.request(verbs.HELLO, read_reported_images)


def _verify(engine: NodeEngine, node: Node, environment: Environment, pin: str) -> str | None:
    """Record the identity, the CUDA requirement and the disk use of images after a transfer.

    Return why the node lacks the image of ``pin``; None when it has it, or when ``pin`` is blank.
    """
    with contextlib.suppress(AgentError, OutcomeUnknownError):
        images = _images(engine)
        environment.refresh_from_db()  # it may have changed meanwhile
        record_claim(environment, node, images)
        record_images_cuda(node, images)
        request_gc_if_full(node, engine.request(verbs.IMAGES, read_store_used_percent))
        if pin and not has_pin(pin, images):
            tagged = tagged_images(environment, images)
            found = f"names {pin_of(environment, tagged[0])}" if tagged else "names no image there"
            return f"{environment.image} {found}, and not {pin}."
    return None


def record_image_state(
    environment: Environment, node: Node, state: str, detail: str, percent: int | None = None
) -> None:
    """Record the state of an environment on a node; a final state ends an administrator's request."""
    defaults: dict[str, object] = {"state": state, "detail": detail[:500], "progress_percent": percent}
    if state in ("present", "failed"):
        defaults["pull_requested_at"] = None
    ImagePresence.objects.update_or_create(environment=environment, node=node, defaults=defaults)


def record_images(node: Node, images: list[dict[str, Any]], in_progress: Container[int] = ()) -> None:
    """Record which environments a node has, from the images it reported.

    A transfer that a former worker process ran is no longer in progress.
    """
    reported = _by_name(images)
    for environment in Environment.objects.filter(runtime__in=CONTAINER_RUNTIMES):
        row = record_claim(environment, node, images)
        present = _find_image(environment, reported) is not None
        broken_off = row.state == "loading" and environment.pk not in in_progress
        if broken_off or (row.state == "present") != present:
            record_image_state(environment, node, "present" if present else "missing", "")
    record_images_cuda(node, images)


def record_images_cuda(node: Node, images: list[dict[str, Any]]) -> None:
    """Record the CUDA requirement of each environment's image, as reported by a node that has it."""
    reported = _by_name(images)
    for environment in Environment.objects.filter(runtime__in=CONTAINER_RUNTIMES):
        image = _find_image(environment, reported)
        if image is not None and "cuda" in image:  # earlier agents do not report it
            record_image_cuda(environment, node, image["cuda"] or "")


def _by_name(images: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        normalize_image_name(name): row
        for row in images
        for name in (row["image_id"], *row["refs"], *row["digests"])
    }


def _find_image(environment: Environment, reported: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the reported image of an environment by name; None when absent."""
    wanted = image_reference(environment)
    return None if wanted is None else reported.get(normalize_image_name(wanted))


def _record_pull_progress(environment: Environment, node: Node, event: object) -> None:
    if isinstance(event, PullProgress):
        record_image_state(environment, node, "loading", event.message)
