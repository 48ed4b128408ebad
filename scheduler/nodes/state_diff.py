"""Compares what the record holds on a node with what the node told: pure, so that every case is a table row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agents.engines.interface import Container, TaskKey
from portal.domain.states import AttemptState


@dataclass(frozen=True)
class StoredTask:
    """A task of the record that is or was on this node."""

    id: int
    key: TaskKey
    state: AttemptState
    gone: bool
    sent: bool
    stop_requested: bool
    eviction_requested: bool = False
    """It is to leave alone, while the others of its attempt go on."""
    attempt_continues: bool = False
    """It ended, and its attempt goes on without it."""


@dataclass
class StateDiff:
    """What has to be done so that record and node agree."""

    adopt: list[tuple[StoredTask, Container]] = field(default_factory=list)
    """Runs there and is not RUNNING here: write it down."""
    finish: list[tuple[StoredTask, Container]] = field(default_factory=list)
    """Ended there and holds GPUs here."""
    lost: list[StoredTask] = field(default_factory=list)
    """RUNNING here, and the node has neither the container nor a memory of its end."""
    stop: set[tuple[str, int]] = field(default_factory=set)
    """Attempts whose containers live there and must not: ended here, or asked to stop."""
    evict: list[StoredTask] = field(default_factory=list)
    """Tasks of which the same is true, while others of their attempts live on."""
    orphans: list[Container] = field(default_factory=list)
    """Live containers of our cluster that the record has never heard of."""
    collect: list[tuple[StoredTask | None, Container]] = field(default_factory=list)
    """Ended in both: fetch what is left of the log, then remove."""


def diff_state(stored: Mapping[TaskKey, StoredTask], containers: Iterable[Container]) -> StateDiff:
    """The differences. ``stored`` must have been read before the node was asked.

    It holds every task of the record with ``gone`` false on this node, and those of ``containers`` it knows.
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
    """What is to end a task that holds GPUs, where anything is."""
    if task.stop_requested:
        diff.stop.add((task.key.job, task.key.attempt))
    elif task.eviction_requested:
        diff.evict.append(task)
