"""Which checkpoint is the newest, which are removed, where they are kept, and how GPU time is divided."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import pytest

from portal.domain.jobs.checkpoints import (
    CheckpointPlace,
    MountedVolume,
    checkpoint_place,
    newest_valid,
    surplus,
)
from portal.domain.jobs.end_states import FAILURE_CLASSES, FailureClass, backoff_s, is_retried
from portal.domain.jobs.lost_work import HeldGpu, LossCause, loss_cause, split_work
from portal.domain.jobs.reasons import EndReason

START = dt.datetime(2026, 11, 24, tzinfo=dt.UTC)


def at(minutes: float) -> dt.datetime:
    return START + dt.timedelta(minutes=minutes)


@dataclass(frozen=True)
class Saved:
    name: str
    step: int | None
    saved_at: dt.datetime
    validity: str = "valid"


def rows(text: str) -> list[Saved]:
    """``100 200! 300?``: steps in the order in which they were saved; ! is broken, ? unchecked."""
    kinds = {"!": "broken", "?": "unchecked"}
    return [
        Saved(word.rstrip("!?"), int(word.rstrip("!?")), at(number), kinds.get(word[-1], "valid"))
        for number, word in enumerate(text.split())
    ]


@pytest.mark.parametrize(
    ("saved", "newest"),
    [
        ("", None), ("100", "100"), ("100 200", "200"), ("100 200!", "100"), ("100 200?", "100"),
        ("100! 200?", None), ("100 200! 300 400!", "300"), ("300 100", "100"),
    ],
)  # fmt: skip
def test_the_newest_valid_checkpoint_is_the_last_complete_one(saved: str, newest: str | None) -> None:
    found = newest_valid(rows(saved))
    assert (found.name if found else None) == newest


@pytest.mark.parametrize(
    ("saved", "keep_last", "keep_every", "pinned", "removed"),
    [
        ("100 200 300", None, None, "", ""),
        ("100 200 300", 1, None, "", "100 200"),
        ("100 200 300", 2, None, "", "100"),
        ("100 200 300", 5, None, "", ""),
        ("100 200 300 400", 1, 200, "", "100 300"),
        ("100 200 300 400", 1, None, "100", "200 300"),
        ("100 200 300!", 1, None, "", "100"),  # it may still be written
        ("100 200! 300", 2, None, "", "200"),
        ("100 200! 300", 1, 200, "", "100 200"),  # a broken one is no multiple worth keeping
        ("100 200? 300", 1, None, "", "100 200"),
        ("100! 200!", 1, None, "", ""),
        ("100? 200?", 1, None, "", ""),
    ],
)  # fmt: skip
def test_retention_never_removes_the_newest_valid_or_a_pinned_one(
    saved: str, keep_last: int | None, keep_every: int | None, pinned: str, removed: str
) -> None:
    found = surplus(rows(saved), keep_last, keep_every, set(pinned.split()))
    assert [row.name for row in found] == removed.split()


HOME = MountedVolume("", "/home/ada", True)
VOLUMES = [
    HOME,
    MountedVolume("runs", "/volumes/runs", True),
    MountedVolume("old", "/volumes/runs/old", False),
]


@pytest.mark.parametrize(
    ("checkpoint_dir", "place"),
    [
        ("", ("", "/home/ada", "checkpoints/j1")),
        ("deep/er", ("", "/home/ada", "deep/er/j1")),
        ("/home/ada/x", ("", "/home/ada", "x/j1")),
        ("/home/ada", ("", "/home/ada", "j1")),
        ("/volumes/runs/a", ("runs", "/volumes/runs", "a/j1")),
        ("/volumes/runs", ("runs", "/volumes/runs", "j1")),
    ],
)
def test_each_job_has_a_folder_of_its_own(checkpoint_dir: str, place: tuple[str, str, str]) -> None:
    assert checkpoint_place(checkpoint_dir, "j1", VOLUMES) == CheckpointPlace(*place)


@pytest.mark.parametrize(
    ("checkpoint_dir", "why"),
    [("/data", "neither in the home"), ("/volumes/runs/old/x", "read-only"), ("../x", "must not contain"),
     ("/home/adam", "neither in the home"), ("/home/ada/../bob", "must not contain")],
)  # fmt: skip
def test_a_folder_that_is_not_kept_is_refused(checkpoint_dir: str, why: str) -> None:
    found = checkpoint_place(checkpoint_dir, "j1", VOLUMES)
    assert isinstance(found, str) and why in found.lower()


@pytest.mark.parametrize(
    ("running", "saved", "split"),
    [
        (None, None, (20, 0, 0)),  # it never ran
        (2, None, (4, 0, 16)),
        (2, 8, (4, 12, 4)),
        (2, 1, (4, 0, 16)),  # saved before it ran: by an earlier attempt
        (2, 99, (4, 16, 0)),  # completed, or a clock that is ahead
    ],
)
def test_gpu_time_is_divided_at_the_start_and_at_the_last_checkpoint(
    running: float | None, saved: float | None, split: tuple[float, float, float]
) -> None:
    held = [HeldGpu(1000, at(0), at(10))] * 2
    found = split_work(held, *(None if each is None else at(each) for each in (running, saved)))
    assert tuple(each / 60 for each in found) == split
    assert sum(found) == 20 * 60


def test_shares_and_later_tasks_count_by_the_capacity_they_held() -> None:
    held = [HeldGpu(1000, at(0), at(10)), HeldGpu(500, at(6), at(10))]
    assert split_work(held, at(2), at(8)) == (120, 6 * 60 + 60, 2 * 60 + 60)


def test_every_end_has_a_cause() -> None:
    assert {loss_cause(reason) for reason in EndReason} == set(LossCause)
    assert loss_cause(EndReason.STALLED) is LossCause.STALL
    assert loss_cause(EndReason.PREEMPTED) is LossCause.PREEMPTION
    assert loss_cause(EndReason.NODE_REBOOTED) is LossCause.NODE
    assert loss_cause(EndReason.CANCELLED_BY_USER) is LossCause.STOP
    assert loss_cause(EndReason.OUT_OF_MEMORY) is LossCause.FAILURE


@pytest.mark.parametrize(
    ("reason", "code", "classes", "codes", "retried"),
    [
        (EndReason.NODE_REBOOTED, None, ["node_failure"], [], True),
        (EndReason.NODE_REBOOTED, None, [], [], False),
        (EndReason.EXIT_CODE, 1, ["node_failure"], [], False),
        (EndReason.EXIT_CODE, 1, ["command_failure"], [], True),
        (EndReason.EXIT_CODE, 1, ["command_failure"], [137, 143], False),
        (EndReason.EXIT_CODE, 137, ["command_failure"], [137, 143], True),
        (EndReason.OUT_OF_MEMORY, 137, ["command_failure"], [], False),
        (EndReason.OUT_OF_MEMORY, 137, ["out_of_memory"], [1], True),
        (EndReason.TIME_LIMIT, None, ["time_limit"], [], True),
        (EndReason.STALLED, None, ["stall"], [], True),
        (EndReason.CANCELLED_BY_USER, None, [each.value for each in FailureClass], [], False),
        (EndReason.COMPLETED, 0, [each.value for each in FailureClass], [], False),
    ],
)  # fmt: skip
def test_a_job_is_retried_after_the_failures_that_it_names(
    reason: EndReason, code: int | None, classes: list[str], codes: list[int], retried: bool
) -> None:
    assert is_retried(reason, code, classes, codes) is retried


def test_every_failure_class_has_a_reason() -> None:
    assert set(FAILURE_CLASSES.values()) == set(FailureClass)


def test_the_delay_doubles_from_the_base_to_the_maximum() -> None:
    assert [backoff_s(failures, 3, 20) for failures in (1, 2, 3, 4, 99)] == [3, 6, 12, 20, 20]
