"""Compares what the record holds on a node with what the node told: pure, so that every case is a table row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agents.engines.contract import Container, TaskKey
from portal.words.states import AttemptState


@dataclass(frozen=True)
class RecordedTask:
    """A task of the record that is or was on this node."""

    id: int
    key: TaskKey
    state: AttemptState
    gone: bool
    sent: bool
    stop_wanted: bool
    leave_wanted: bool = False
    """It is to leave alone, while the others of its attempt go on."""
    others_live: bool = False
    """It ended, and its attempt goes on without it."""


@dataclass
class Differences:
    """What has to be done so that record and node agree."""

    adopt: list[tuple[RecordedTask, Container]] = field(default_factory=list)
    """Runs there and is not RUNNING here: write it down."""
    finish: list[tuple[RecordedTask, Container]] = field(default_factory=list)
    """Ended there and holds GPUs here."""
    vanished: list[RecordedTask] = field(default_factory=list)
    """RUNNING here, and the node has neither the container nor a memory of its end."""
    stop: set[tuple[str, int]] = field(default_factory=set)
    """Attempts whose containers live there and must not: ended here, or asked to stop."""
    leave: list[RecordedTask] = field(default_factory=list)
    """Tasks of which the same is true, while others of their attempts live on."""
    unknown: list[Container] = field(default_factory=list)
    """Live containers of our cluster that the record has never heard of."""
    collect: list[tuple[RecordedTask | None, Container]] = field(default_factory=list)
    """Ended in both: fetch what is left of the log, then remove."""


def compare(recorded: Mapping[TaskKey, RecordedTask], containers: Iterable[Container]) -> Differences:
    """The differences. ``recorded`` must have been read before the node was asked.

    It holds every task of the record with ``gone`` false on this node, and those of ``containers`` it knows.
    """
    found = Differences()
    seen: set[TaskKey] = set()
    for container in containers:
        seen.add(container.key)
        task = recorded.get(container.key)
        ended = container.state == "exited"
        if task is None:
            if ended:
                found.collect.append((None, container))
            else:
                found.unknown.append(container)
        elif task.gone:
            if ended:
                found.collect.append((task, container))
            elif task.others_live:
                found.leave.append(task)
            else:
                found.stop.add((task.key.job, task.key.attempt))
        elif ended:
            found.finish.append((task, container))
        else:
            if container.state == "running" and task.state is AttemptState.CONFIGURING:
                found.adopt.append((task, container))
            _end(found, task)
    for key, task in recorded.items():
        if key in seen or task.gone:
            continue
        if task.stop_wanted or task.leave_wanted:
            _end(found, task)
        elif task.state is AttemptState.RUNNING:
            found.vanished.append(task)
    return found


def _end(found: Differences, task: RecordedTask) -> None:
    """What is to end a task that holds GPUs, where anything is."""
    if task.stop_wanted:
        found.stop.add((task.key.job, task.key.attempt))
    elif task.leave_wanted:
        found.leave.append(task)
