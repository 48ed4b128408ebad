"""What counts as use of a workspace's tool."""

from __future__ import annotations

import datetime as dt

import pytest

from portal.gateway.activity import inactive_for_s, is_activity

NOON = dt.datetime(2026, 5, 4, 12, tzinfo=dt.UTC)


def kernel(minute: int, state: str = "idle") -> dict[str, object]:
    return {
        "execution_state": state,
        "last_activity": f"2026-05-04T11:{minute:02}:00.000000Z",
        "connections": 1,
    }


def test_the_latest_of_kernels_and_terminals_counts_and_a_busy_kernel_is_use() -> None:
    terminal = {"name": "1", "last_activity": "2026-05-04T11:50:00Z"}
    assert inactive_for_s(NOON, [kernel(10), kernel(40)], []) == 1200.0
    assert inactive_for_s(NOON, [kernel(10)], [terminal]) == 600.0
    assert inactive_for_s(NOON, [kernel(10, "busy")], [terminal]) == 0.0
    assert inactive_for_s(NOON, [kernel(10, "starting")], []) == 3000.0
    assert inactive_for_s(NOON - dt.timedelta(hours=1), [kernel(10)], []) == 0.0  # never in the future
    assert inactive_for_s(NOON, [], []) is None


@pytest.mark.parametrize(
    "rows", [[{}], [{"execution_state": "idle", "last_activity": "soon"}], [{"execution_state": 1}]]
)
def test_an_invalid_activity_answer_is_ignored(rows) -> None:
    with pytest.raises((ValueError, KeyError)):
        inactive_for_s(NOON, rows, [])


@pytest.mark.parametrize(
    ("tool", "kind", "method", "counts"),
    [
        ("jupyterlab", "http", "GET", False),
        ("jupyterlab", "http", "PUT", True),
        ("jupyterlab", "http", "POST", True),
        (
            "jupyterlab",
            "websocket",
            "GET",
            False,
        ),  # the page keeps it open; what passes, the kernel itself tells
        ("code-server", "http", "GET", True),
        ("code-server", "websocket", "GET", True),
    ],
)
def test_reading_the_lists_of_jupyterlab_is_not_activity(tool, kind, method, counts) -> None:
    assert is_activity(tool, {"type": kind, "method": method}) is counts
