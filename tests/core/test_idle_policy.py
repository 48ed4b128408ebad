"""Whether a workspace is idle: only what was measured and found quiet counts, and nobody is suspended untold."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.idle_policy import (
    STALE_AFTER_S,
    GpuActivity,
    GpuUsageMinute,
    IdlePolicy,
    IdleState,
    IdleStep,
    InactivePeriod,
    ToolActivity,
    inactive_since_s,
    next_step,
)

NOW_S = 1_000_020.0
QUIET = GpuActivity(InactivePeriod(NOW_S - 7200.0, NOW_S - 20.0))
TOOL = ToolActivity(NOW_S - 7200.0, NOW_S - 30.0)
IDLE = IdleState(NOW_S - 9000.0, QUIET, TOOL)
SUSPEND, NOTIFY = IdlePolicy("suspend", 3600.0), IdlePolicy("notify", 3600.0)


def minutes(*use: float | None, samples: int = 60, begin_s: float = 0.0) -> list[GpuUsageMinute]:
    return [GpuUsageMinute(begin_s + 60.0 * n, samples, each) for n, each in enumerate(use)]


def test_idle_minutes_are_consecutive() -> None:
    assert GpuActivity().extended_by(minutes(0.0, 1.0, 2.9), 3.0) == GpuActivity(InactivePeriod(0.0, 180.0))
    assert GpuActivity().extended_by(minutes(0.0, 3.0, 0.0), 3.0) == GpuActivity(
        InactivePeriod(120.0, 180.0), 120.0
    )
    assert GpuActivity().extended_by(minutes(0.0, None, 0.0), 3.0) == GpuActivity(
        InactivePeriod(120.0, 180.0)
    )  # not measured
    assert GpuActivity().extended_by(
        [GpuUsageMinute(0.0, 60, 0.0), GpuUsageMinute(120.0, 60, 0.0)], 3.0
    ) == GpuActivity(InactivePeriod(120.0, 180.0))
    assert GpuActivity().extended_by(minutes(0.0, 0.0, samples=20), 3.0) == GpuActivity()  # hardly measured
    assert GpuActivity().extended_by(minutes(0.0, 50.0), 3.0) == GpuActivity(None, 120.0)
    assert GpuActivity().extended_by(minutes(0.0), 0.0) == GpuActivity(None, 60.0)


@given(
    st.lists(st.sampled_from([0.0, 1.0, 40.0, None, "gap"]), max_size=15),
    st.lists(st.integers(0, 15), max_size=4),
)
def test_the_number_of_reads_does_not_matter(use, cuts) -> None:
    rows = [GpuUsageMinute(60.0 * n, 60, each) for n, each in enumerate(use) if each != "gap"]
    whole, parted = GpuActivity().extended_by(rows, 3.0), GpuActivity()
    for cut in [*sorted(cuts), len(rows)]:
        parted = parted.extended_by(rows[:cut], 3.0)  # each look reads again what an earlier one has read
    assert parted == whole
    if whole.inactive is not None:
        inside = [row for row in rows if whole.inactive.since_s <= row.start_s < whole.inactive.until_s]
        assert len(inside) * 60.0 == whole.inactive.until_s - whole.inactive.since_s
        assert all(row.use_percent is not None and row.use_percent < 3.0 for row in inside)


def test_cpu_and_gpu_must_both_be_known_to_be_idle() -> None:
    assert inactive_since_s(IDLE, NOW_S) == NOW_S - 7200.0
    assert inactive_since_s(replace(IDLE, ready_s=NOW_S - 60.0), NOW_S) == NOW_S - 60.0
    used = replace(TOOL, last_active_s=NOW_S - 100.0)
    assert inactive_since_s(replace(IDLE, tool=used), NOW_S) == NOW_S - 100.0  # a busy kernel without GPU use
    lost = (
        replace(IDLE, gpu=GpuActivity()),
        replace(IDLE, tool=None),
        replace(
            IDLE, gpu=GpuActivity(InactivePeriod(0.0, NOW_S - STALE_AFTER_S - 1.0))
        ),  # the stream is lost: no more minutes come
        replace(
            IDLE, tool=replace(TOOL, last_polled_s=NOW_S - STALE_AFTER_S - 1.0)
        ),  # nobody reaches the server
    )
    for each in lost:
        assert inactive_since_s(each, NOW_S) is None
        assert next_step(each, SUSPEND, NOW_S) is IdleStep.NOTHING
        assert (
            next_step(replace(each, countdown_started=True, suspend_at_s=NOW_S - 1.0), SUSPEND, NOW_S)
            is IdleStep.CANCEL_COUNTDOWN
        )


def test_from_idle_to_a_warning_to_suspended() -> None:
    assert next_step(IDLE, replace(SUSPEND, after_s=7201.0), NOW_S) is IdleStep.NOTHING
    assert next_step(IDLE, SUSPEND, NOW_S) is IdleStep.START_COUNTDOWN
    counting = replace(IDLE, countdown_started=True, suspend_at_s=NOW_S + 60.0)
    assert next_step(counting, SUSPEND, NOW_S) is IdleStep.NOTHING
    assert next_step(replace(counting, suspend_at_s=NOW_S), SUSPEND, NOW_S) is IdleStep.SUSPEND
    assert (
        next_step(replace(counting, exempt_until_s=NOW_S + 1.0), SUSPEND, NOW_S) is IdleStep.CANCEL_COUNTDOWN
    )
    assert next_step(replace(counting, exempt_until_s=NOW_S - 1.0), SUSPEND, NOW_S) is IdleStep.NOTHING
    assert next_step(counting, replace(SUSPEND, action="off"), NOW_S) is IdleStep.CANCEL_COUNTDOWN
    # turned from one to the other meanwhile: an end is told a whole countdown before, or not at all
    assert next_step(replace(counting, suspend_at_s=None), SUSPEND, NOW_S) is IdleStep.START_COUNTDOWN
    assert next_step(counting, NOTIFY, NOW_S) is IdleStep.START_COUNTDOWN
    assert next_step(replace(counting, suspend_at_s=None), NOTIFY, NOW_S) is IdleStep.NOTHING


times = st.floats(0.0, 3e4)


@given(
    gpu=st.none() | st.tuples(times, times),
    tool=st.none() | st.tuples(times, times, st.none() | times),
    kept=st.none() | times,
    stops=st.none() | times,
    counts=st.booleans(),
    action=st.sampled_from(["off", "notify", "suspend"]),
    after=st.floats(300.0, 1e4),
)
def test_only_warned_jobs_known_to_be_idle_are_suspended(
    gpu, tool, kept, stops, counts, action, after
) -> None:
    now_s = 3e4
    watched = IdleState(
        0.0,
        GpuActivity(InactivePeriod(min(gpu), max(gpu)) if gpu else None),
        ToolActivity(min(tool[:2]), max(tool[:2]), tool[2]) if tool else None,
        kept,
        counts,
        stops if counts else None,
    )
    if next_step(watched, IdlePolicy(action, after), now_s) is not IdleStep.SUSPEND:
        return
    assert (
        action == "suspend" and counts and watched.suspend_at_s is not None and watched.suspend_at_s <= now_s
    )
    assert kept is None or kept <= now_s
    assert watched.gpu.inactive is not None and now_s - watched.gpu.inactive.until_s <= STALE_AFTER_S
    assert watched.tool is not None and now_s - watched.tool.last_polled_s <= STALE_AFTER_S
    assert now_s - watched.gpu.inactive.since_s >= after and now_s - watched.tool.since_s >= after
    assert now_s - (watched.tool.last_active_s or 0.0) >= after


def test_a_job_without_a_tool_is_idle_when_its_gpus_are() -> None:
    state = IdleState(NOW_S - 9000.0, QUIET, None, has_tool=False)
    assert inactive_since_s(state, NOW_S) == max(NOW_S - 9000.0, QUIET.inactive.since_s)
    assert inactive_since_s(replace(state, has_tool=True), NOW_S) is None
    assert inactive_since_s(replace(state, gpu=GpuActivity()), NOW_S) is None
