"""How far attempts have come: written down forward only and seldom, anew where the number fell, with their layout."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from portal.domain.jobs.reasons import EndReason
from portal.domain.jobs.scaling import cheaper_size, point_of, scale_points
from portal.domain.scheduling.throughput import (
    GpuPosition,
    Layout,
    layout_of,
    levels_crossed,
    rate_per_s,
    workload_fingerprint,
)
from portal.models import Attempt, AttemptProgress, Gpu, Job, JobEvent, Node, Topology
from portal.selectors.jobs.progress import (
    attempt_progress,
    compare_job_layouts,
    job_workload_fingerprint,
    measure_program,
)
from portal.services.jobs.task_reports import record_progress
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from tests import factories

database = pytest.mark.django_db(transaction=True)

SECOND = dt.timedelta(seconds=1)


@pytest.fixture
def dataset():
    return factories.basic_cluster()


def begun(dataset, *, nodes: list[Node] | None = None, gpus: int = 1, **fields) -> Attempt:
    """An attempt that has run for an hour, with a task on each of the nodes."""
    nodes = nodes or [dataset["node"]]
    job = factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        tasks=len(nodes),
        gpus_per_task=gpus,
        cpu_milli=100,
        memory_mib=32,
        **fields,
    )
    free = Gpu.objects.filter(used_milli=0).order_by("index")
    slots = [RankPlacement(node, [(gpu.pk, 1000) for gpu in free.filter(node=node)[:gpus]]) for node in nodes]
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        made = job_control.start_attempt(row, dataset["pool"], slots, epoch=1)
    for task in made.task_rows.all():
        assert job_control.mark_task_sent(task)
        job_control.record_task_running(
            task.pk, container=f"c{task.pk}", ports={}, at=timezone.now() - 3600 * SECOND
        )
    return read(made)


def end(attempt: Attempt) -> None:
    for task in attempt.task_rows.all():
        job_control.record_task_ended(task.pk, exit_code=0, reason=EndReason.COMPLETED)


def read(attempt: Attempt) -> Attempt:
    return Attempt.objects.select_related("progress", "job__project", "job__environment").get(pk=attempt.pk)


def report(attempt: Attempt, done: float, at: dt.datetime, *, rank: int = 0, ago_s: float = 0.0) -> bool:
    return record_progress(read(attempt), rank, done, ago_s, polled_at=at)


def known(attempt: Attempt) -> AttemptProgress:
    row = attempt_progress(read(attempt))
    assert row is not None
    return row


@database
def test_the_rate_is_the_progress_between_the_first_and_latest_reports(dataset) -> None:
    attempt, began = begun(dataset), timezone.now()
    assert attempt_progress(attempt) is None
    assert report(attempt, 100, began)
    assert known(attempt).per_s is None  # one word is no rate
    assert report(attempt, 160, began + 30 * SECOND)
    assert known(attempt).per_s is None  # and half a minute is none
    assert report(attempt, 400, began + 90 * SECOND, ago_s=15.0)
    row = known(attempt)
    assert (row.start_units, row.completed_units, row.per_s) == (100, 400, 4.0)
    assert row.reported_at == began + 75 * SECOND  # when it was written, not when the node was asked


@database
def test_progress_only_advances_and_is_stored_at_most_twice_a_minute(dataset) -> None:
    attempt, began = begun(dataset), timezone.now()
    written = [tick for tick in range(120) if report(attempt, tick, began + tick * SECOND)]
    assert written == [0, 30, 60, 90]
    assert not report(attempt, 500, began + 130 * SECOND, ago_s=600.0)  # its clock was set back
    assert known(attempt).completed_units == 90


@database
def test_a_decrease_restarts_the_measured_period(dataset) -> None:
    attempt, began = begun(dataset), timezone.now()
    report(attempt, 1000, began)
    report(attempt, 1600, began + 60 * SECOND)
    assert known(attempt).per_s == 10.0
    assert report(attempt, 1200, began + 100 * SECOND)  # it went on from what it had saved
    row = known(attempt)
    assert (row.start_units, row.start_at, row.per_s) == (1200, began + 100 * SECOND, None)
    report(attempt, 1320, began + 160 * SECOND)
    assert known(attempt).per_s == 2.0


@database
def test_the_lowest_reporting_rank_of_a_gang_counts(dataset) -> None:
    attempt, began = begun(dataset), timezone.now()
    assert report(attempt, 700, began, rank=3)
    assert report(attempt, 900, began + 60 * SECOND, rank=1)  # units of its own: the span begins anew
    assert known(attempt).per_s is None
    assert not report(attempt, 2000, began + 120 * SECOND, rank=3)
    assert report(attempt, 1020, began + 120 * SECOND, rank=1)
    assert known(attempt).per_s == 2.0


@database
def test_two_nodes_of_a_gang_do_not_undo_each_other(dataset) -> None:
    attempt, began = begun(dataset), timezone.now()
    stale = read(attempt)
    assert report(attempt, 10, began)
    assert not record_progress(stale, 0, 99, 0.0, polled_at=began)  # as the other one read it before
    seen = read(attempt)
    assert report(attempt, 40, began + 40 * SECOND)
    assert not record_progress(seen, 0, 35, 0.0, polled_at=began + 35 * SECOND)
    assert known(attempt).completed_units == 40


@database
def test_known_progress_needs_no_query(dataset) -> None:
    attempt, now = begun(dataset), timezone.now()
    report(attempt, 5, now)
    seen = read(attempt)
    with CaptureQueriesContext(connection) as queries:
        assert not record_progress(seen, 0, 5, 20.0, polled_at=now + 20 * SECOND)
    assert len(queries) == 0


@database
def test_progress_writes_no_event_and_does_not_change_job_or_attempt(dataset) -> None:
    attempt, now = begun(dataset), timezone.now()

    def versions() -> list[tuple[str, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT xmin::text FROM portal_attempt UNION ALL SELECT xmin::text FROM portal_job"
            )
            return [tuple(row) for row in cursor.fetchall()]

    events, before = JobEvent.objects.count(), versions()
    assert report(attempt, 1, now) and report(attempt, 2, now + 60 * SECOND)
    assert JobEvent.objects.count() == events
    assert versions() == before  # so that no row of a snapshot is read again


@database
def test_attempts_that_do_not_run_report_nothing(dataset) -> None:
    attempt, now = begun(dataset), timezone.now()
    seen = read(attempt)
    report(attempt, 5, now)
    with_word = read(attempt)
    end(attempt)
    assert not record_progress(with_word, 0, 50, 0.0, polled_at=now + 60 * SECOND)  # as it was read before
    AttemptProgress.objects.all().delete()
    assert not record_progress(seen, 0, 50, 0.0, polled_at=now + 60 * SECOND)
    seen.running_at = None
    assert not record_progress(seen, 0, 5, 1.0, polled_at=now)
    assert not AttemptProgress.objects.exists()


@database
def test_the_database_refuses_a_decrease(dataset) -> None:
    attempt, now = begun(dataset), timezone.now()
    report(attempt, 5, now)
    for wrong in ({"completed_units": 4.0}, {"reported_at": now - 60 * SECOND}, {"start_units": -1.0}):
        with pytest.raises(IntegrityError), transaction.atomic():
            AttemptProgress.objects.update(**wrong)


@database
def test_throughput_is_stored_with_the_gpu_layout(dataset) -> None:
    Topology.objects.create(name="a-fabric", levels=["hall", "row"])
    Topology.objects.create(name="b-fabric", levels=["block", "rack"])
    nodes = [dataset["node"], factories.node(dataset["pool"], labels={"block": "x", "rack": "2"})]
    Node.objects.filter(pk=nodes[0].pk).update(labels={"block": "x", "rack": "1"})
    for node in nodes:
        Gpu.objects.filter(node=node, index__gte=2).update(nvlink_island=1)
        Gpu.objects.filter(node=node, index__lt=2).update(nvlink_island=0)
    two, now = begun(dataset, nodes=nodes, gpus=3), timezone.now()
    report(two, 1, now)
    assert known(two).layout == Layout("Test 80", 2, 4, 1)
    assert known(two).gpus == 6
    one = begun(dataset, nodes=[nodes[0]])
    report(one, 1, now)
    assert known(one).layout == Layout("Test 80", 1, 1, 0)


LYING = st.lists(
    st.builds(
        GpuPosition, st.sampled_from("abc"), st.sampled_from(["H200", "A100"]), st.sampled_from([None, 0, 1])
    ),
    max_size=12,
)
PATHS = st.lists(st.lists(st.sampled_from("xy"), max_size=3), max_size=4)


@given(LYING, PATHS)
def test_a_layout_does_not_depend_on_the_order_of_its_gpus(gpus, paths) -> None:
    lies = layout_of(gpus, paths, 3)
    assert lies == layout_of(gpus[::-1], paths[::-1], 3)
    assert lies.nodes <= lies.islands <= len(gpus)
    assert 0 <= lies.levels <= 3


def test_levels_are_counted_from_the_innermost() -> None:
    assert levels_crossed([["x", "1"]], 2) == 0
    assert levels_crossed([["x", "1"], ["x", "1"]], 2) == 0
    assert levels_crossed([["x", "1"], ["x", "2"]], 2) == 1
    assert levels_crossed([["x", "1"], ["y", "1"]], 2) == 2
    assert levels_crossed([["x", "1"], ["x"]], 2) == 1  # what is not labelled is not shared
    assert levels_crossed([[], []], 0) == 0


@given(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1e9))
def test_a_rate_is_not_negative_and_needs_a_minute(since: float, done: float, span_s: float) -> None:
    rate = rate_per_s(since, done, span_s)
    assert (rate is None) == (span_s < 60)
    assert rate is None or rate >= 0


ALIKE = {
    "project": "p",
    "environment": "e",
    "gpus": 8,
    "milli_per_gpu": 1000,
    "mig_profile": "",
    "command": ["torchrun", "train.py", "--lr=1e-4", "--seed", "7", "--model", "gpt-2"],
    "env": {"B": "2", "A": "x"},
    "launcher": "torchrun",
}


@pytest.mark.parametrize(
    "same",
    [
        {"command": ["torchrun", "train.py", "--lr=0.01", "--seed", "8", "--model", "gpt-2"]},
        {"env": {"A": "x", "B": "3"}},
    ],
)
def test_numbers_make_no_other_work(same) -> None:
    assert workload_fingerprint(**ALIKE) == workload_fingerprint(**(ALIKE | same))


@pytest.mark.parametrize(
    "other",
    [
        {"project": "q"},
        {"environment": "f"},
        {"gpus": 16},
        {"milli_per_gpu": 500},
        {"mig_profile": "1g.10gb"},
        {"command": ["torchrun", "train.py", "--lr=1e-4", "--seed", "7", "--model", "gpt-3"]},
        {"command": ["torchrun", "train.py", "--wd=1e-4", "--seed", "7", "--model", "gpt-2"]},
        {"env": {"B": "2", "A": "y"}},
        {"env": {"B": "2"}},
        {"launcher": "tensorflow parameter_server"},
    ],
)
def test_everything_else_may_differ(other) -> None:
    assert workload_fingerprint(**ALIKE) != workload_fingerprint(**(ALIKE | other))


def ran(dataset, per_s: float, *, island: int, **fields) -> Attempt:
    """An attempt that ended after running at this rate, on GPUs of another NVLink island for each number."""
    attempt, began = begun(dataset, gpus=2, **fields), timezone.now()
    held = Gpu.objects.filter(allocations__task__attempt=attempt).order_by("index")
    Gpu.objects.filter(pk=held[0].pk).update(nvlink_island=island)
    Gpu.objects.filter(pk=held[1].pk).update(nvlink_island=0)
    report(attempt, 0, began)
    report(attempt, per_s * 100, began + 100 * SECOND)
    end(attempt)
    return attempt


@database
def test_layouts_are_compared_once_three_runs_of_two_are_known(dataset) -> None:
    for per_s in (10, 11, 9):
        ran(dataset, per_s, island=0)
    for per_s in (7, 8):
        ran(dataset, per_s, island=1)
    job = begun(dataset, gpus=2).job
    assert compare_job_layouts(job) == []
    ran(dataset, 90, island=1, command=["false"])  # other work
    assert compare_job_layouts(job) == []
    last = ran(dataset, 7.5, island=1)
    together, apart = compare_job_layouts(job)
    assert (together.layout.islands, together.per_s, together.percent, together.attempts) == (1, 10, 100, 3)
    assert (apart.layout.islands, apart.per_s, apart.percent, apart.attempts) == (2, 7.5, 75, 3)
    assert job_workload_fingerprint(job) == known(last).workload_fingerprint


@database
def test_an_elastic_job_has_no_layout(dataset) -> None:
    nodes = [dataset["node"], factories.node(dataset["node"].pool, gpus=4)]
    for per_s, island in ((10, 0), (20, 1)):
        for _ in range(3):
            attempt = ran(dataset, per_s, island=island, nodes=nodes, min_tasks=1)
    assert known(attempt).per_s == 20
    assert compare_job_layouts(attempt.job) == []


@database
def test_other_projects_do_not_count(dataset) -> None:
    job = begun(dataset, gpus=2).job
    other = dataset | {"project": factories.project(member=dataset["owner"])}
    for per_s, island in ((10, 0), (5, 1)) * 3:
        ran(other, per_s, island=island)
    assert compare_job_layouts(begun(other, gpus=2).job) != []
    assert compare_job_layouts(job) == []


def test_efficiency_and_cost_are_relative_to_the_fewest_measured_gpus() -> None:
    points = scale_points([(8, 390.0), (4, 310.0), (1, 100.0), (1, 90.0), (1, 110.0)])
    assert [(one.gpus, one.attempts, one.speedup, one.efficiency_percent) for one in points] == [
        (1, 3, 1.0, 100),
        (4, 1, 3.1, 78),
        (8, 1, 3.9, 49),
    ]
    cheaper = cheaper_size(points, 8)
    assert cheaper is not None
    assert (cheaper.point.gpus, cheaper.saving_percent) == (1, 51)
    assert cheaper_size(points, 1) is None
    assert cheaper_size(points, 2) is None  # two GPUs were never measured
    assert point_of(points, 2) is None


def test_four_gpus_are_recommended_where_they_are_the_cheapest() -> None:
    found = cheaper_size(scale_points([(8, 488.0), (4, 393.0)]), 8)
    assert found is not None
    assert (found.point.gpus, found.saving_percent) == (4, 38)


@pytest.mark.parametrize("rates", [[], [(8, 390.0)], [(8, 390.0), (8, 400.0)], [(1, 0.0), (8, 390.0)]])
def test_without_a_baseline_there_is_no_scaling(rates) -> None:
    assert scale_points(rates) == []


def measured(dataset, gpus: int, per_s: float, **fields) -> Attempt:
    """A running attempt that reported this rate."""
    attempt, began = begun(dataset, gpus=gpus, **fields), timezone.now()
    report(attempt, 0, began)
    report(attempt, per_s * 100, began + 100 * SECOND)
    return attempt


@database
def test_scaling_compares_runs_of_one_program_on_one_gpu_model(dataset) -> None:
    one = measured(dataset, 1, 100.0)
    assert measure_program(one.job).points == []
    two = measured(dataset, 2, 150.0)
    points = measure_program(two.job).points
    assert [(point.gpus, point.efficiency_percent) for point in points] == [(1, 100), (2, 75)]
    end(one)
    measured(dataset, 1, 10.0, command=["other"])
    assert measure_program(two.job).points == points
    ring = measured(dataset, 2, 200.0, launcher="tensorflow")
    assert measure_program(two.job).points == points
    assert [(each.launcher, each.percent) for each in measure_program(ring.job).launchers] == [
        ("tensorflow multi_worker", 100),
        ("none", 75),
    ]
    AttemptProgress.objects.filter(pk=one.pk).update(gpu_model="A100")
    assert measure_program(two.job).points == []
