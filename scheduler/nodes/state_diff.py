"""Pure comparison of stored tasks with the containers that a node reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agents.engines.replies import Container, TaskKey
from portal.domain.states import AttemptState


@dataclass(frozen=True)
class StoredTask:
    """A stored task that is or was on this node."""

    id: int
    key: TaskKey
    state: AttemptState
    gone: bool
    sent: bool
    stop_requested: bool
    eviction_requested: bool = False
    """Only this task is to stop; its attempt continues."""
    attempt_continues: bool = False
    """It ended, and its attempt continues."""


@dataclass
class StateDiff:
    """The actions that make database and node agree."""

    adopt: list[tuple[StoredTask, Container]] = field(default_factory=list)
    """Running on the node, not RUNNING in the database: record it."""
    finish: list[tuple[StoredTask, Container]] = field(default_factory=list)
    """Ended on the node, still holding GPUs in the database."""
    lost: list[StoredTask] = field(default_factory=list)
    """RUNNING in the database; the node has neither the container nor a record of its end."""
    stop: set[tuple[str, int]] = field(default_factory=set)
    """Attempts that run on the node but ended or are to stop."""
    evict: list[StoredTask] = field(default_factory=list)
    """Single tasks to stop while others of their attempt continue."""
    orphans: list[Container] = field(default_factory=list)
    """Running containers of this cluster that the database does not know."""
    collect: list[tuple[StoredTask | None, Container]] = field(default_factory=list)
    """Ended in both: fetch the rest of the log, then remove."""


def diff_state(stored: Mapping[TaskKey, StoredTask], containers: Iterable[Container]) -> StateDiff:
    """Return the differences. ``stored`` must be read before the node is polled.

    It contains every stored task of this node with ``gone`` false, and those of ``containers`` that are
    known.
    """
    diff = StateDiff()
    seen: set[TaskKey] = set()
    for container in containers:
        seen.add(container.key)
        task = stored.get(container.key)
        ended = container.state == "exited"
        if task is None:
            if ended:
                diff.collect.append((None, container))
            else:
                diff.orphans.append(container)
        elif task.gone:
            if ended:
                diff.collect.append((task, container))
            elif task.attempt_continues:
                diff.evict.append(task)
            else:
                diff.stop.add((task.key.job, task.key.attempt))
        elif ended:
            diff.finish.append((task, container))
        else:
            if container.state == "running" and task.state is AttemptState.CONFIGURING:
                diff.adopt.append((task, container))
            _add_end(diff, task)
    for key, task in stored.items():
        if key in seen or task.gone:
            continue
        if task.stop_requested or task.eviction_requested:
            _add_end(diff, task)
        elif task.state is AttemptState.RUNNING:
            diff.lost.append(task)
    return diff


def _add_end(diff: StateDiff, task: StoredTask) -> None:
    """Add the stop or eviction that the task waits for, if any."""
    if task.stop_requested:
        diff.stop.add((task.key.job, task.key.attempt))
    elif task.eviction_requested:
        diff.evict.append(task)
