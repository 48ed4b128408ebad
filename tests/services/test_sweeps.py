"""Sweeps on the real database: each trial has one job, whatever dies; users stop, pause and change them."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.domain.sweeps.sweeps import MAX_REPORTS, SweepSpec
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import AuditEntry, Checkpoint, Job, Membership, OutboxMessage, Sweep, Trial, TrialReport
from portal.selectors.sweeps.sweeps import (
    best_so_far,
    best_value,
    get_sweep,
    learning_curves,
    list_trials,
    trial_uses,
)
from portal.services.jobs.submission import (
    JobRequest,
    do_cancel_job,
    do_resubmit_job,
    do_resume_job,
    do_suspend_job,
)
from portal.services.lifecycle import job_control
from portal.services.sweeps.advance import advance_active_sweeps, advance_sweep
from portal.services.sweeps.reports import do_report_metrics, record_reports
from portal.services.sweeps.sweeps import (
    do_change_sweep,
    do_create_sweep,
    do_pause_sweep,
    do_resume_sweep,
    do_stop_sweep,
)
from portal.services.sweeps.trials import do_repeat_trial, do_resume_trial, do_stop_trial
from tests import factories
from tests.failpoint_crash import crashes_at
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)

GRID = SweepSpec(searcher="grid", max_parallel=3)
ASHA = SweepSpec(
    searcher="asha", metric="loss", max_trials=4, max_parallel=2, max_steps=9, reduction_factor=3, seed=1
)
SPACE = {"lr": [0.1, 0.2], "layers": {"low": 1, "high": 2}}
COMMAND = ["train", "--lr={lr}", "--layers={layers}"]


@pytest.fixture
def dataset() -> dict[str, Any]:
    return factories.basic_cluster()


def create(dataset: dict[str, Any], spec: SweepSpec = GRID, space: Any = None, **fields: Any) -> Sweep:
    points = fields.pop("points", ())
    request = JobRequest(
        project=dataset["project"],
        environment=dataset["environment"],
        **{"name": "sweep", "command": COMMAND, **fields},
    )
    found = ({} if points else SPACE) if space is None else space
    return do_create_sweep(dataset["owner"], spec, request, found, points)


def advanced(sweep: Sweep) -> Sweep:
    advance_sweep(sweep.public_id)
    return Sweep.objects.get(pk=sweep.pk)


def states(sweep: Sweep) -> dict[str, int]:
    return dict(Counter(sweep.trials.values_list("state", flat=True)))


def end(dataset: dict[str, Any], job: Job, exit_code: int = 0) -> None:
    (task,) = run(place(dataset, job))
    reason = EndReason.EXIT_CODE if exit_code else EndReason.COMPLETED
    job_control.record_task_ended(task, exit_code=exit_code, reason=reason)


def test_an_array_runs_each_combination_once_within_its_limit(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset, env={"A": "b"}))
    assert sweep.max_trials == 4 and states(sweep) == {"RUNNING": 3}
    first = sweep.trials.get(number=0).job
    assert (first.name, first.command, first.owner) == (
        "sweep-0",
        ["train", "--lr=0.1", "--layers=1"],
        dataset["owner"],
    )
    assert (
        first.env["A"] == "b" and first.env["FAIRWAY_TRIAL"] == "0" and first.env["FAIRWAY_PARAM_LR"] == "0.1"
    )
    assert states(advanced(sweep)) == {"RUNNING": 3}  # repeatable
    for trial in sweep.trials.select_related("job").order_by("number")[:2]:
        end(dataset, trial.job, exit_code=trial.number)
    assert states(advanced(sweep)) == {"COMPLETED": 1, "FAILED": 1, "RUNNING": 2}
    assert sweep.trials.get(number=1).message == "The command ended with exit code 1."
    for trial in sweep.trials.filter(state="RUNNING").select_related("job"):
        end(dataset, trial.job)
    sweep = advanced(sweep)
    assert (sweep.state, sweep.message) == ("COMPLETED", "All trials have ended.") and sweep.ended_at
    assert Job.objects.count() == 4 and states(sweep) == {"COMPLETED": 3, "FAILED": 1}


def test_a_list_runs_its_points(dataset: dict[str, Any]) -> None:
    points = [{"lr": 1, "layers": 2}, {"lr": 3, "layers": 4}]
    sweep = advanced(create(dataset, SweepSpec(searcher="list"), points=points))
    commands = sweep.trials.order_by("number").values_list("job__command", flat=True)
    assert list(commands) == [["train", "--lr=1", "--layers=2"], ["train", "--lr=3", "--layers=4"]]


def test_a_sweep_fills_the_commands_of_roles(dataset: dict[str, Any]) -> None:
    roles = [{"name": "ps"}, {"name": "worker", "tasks": 2, "command": ["work", "{layers}", "{{layers}}"]}]
    first = advanced(create(dataset, command=["serve", "--lr={lr}"], roles=roles)).trials.get(number=0).job
    commands = [role.command for role in first.job_roles]
    assert commands == [("serve", "--lr=0.1"), ("work", "1", "{layers}")] and first.tasks == 3
    with pytest.raises(InvalidRequest, match="does not use the parameter lr"):
        create(dataset, command=["serve"], roles=roles)


@pytest.mark.parametrize("point", ["sweep.decided", "sweep.before_commit", "sweep.job_created"])
def test_no_trial_is_lost_or_doubled_when_the_controller_is_killed(
    dataset: dict[str, Any], point: str
) -> None:
    sweep = create(dataset)
    assert crashes_at(point, lambda: advance_sweep(sweep.public_id))
    crashes_at(point, lambda: advance_sweep(sweep.public_id))  # the jobs may all have been created before
    advance_active_sweeps()
    trials = list(sweep.trials.select_related("job"))
    assert [each.number for each in trials] == [0, 1, 2] and Job.objects.count() == 3
    assert {each.job.name for each in trials} == {"sweep-0", "sweep-1", "sweep-2"}


def test_the_end_of_a_trial_requests_the_next_steps(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    plain = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    OutboxMessage.objects.all().delete()
    end(dataset, plain)
    assert not OutboxMessage.objects.filter(name="scheduler.advance_sweep").exists()
    end(dataset, sweep.trials.get(number=0).job)
    (message,) = OutboxMessage.objects.filter(name="scheduler.advance_sweep")
    assert (message.arguments, message.queue) == ([sweep.public_id], "nodes")


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"command": ["train", "{lr}"]}, "parameters", "does not use the parameter layers"),
        ({"command": [*COMMAND, "{depth}"]}, "parameters", "uses {depth}, which is no parameter"),
        ({"name": "x" * 95}, "name", "at most 94"),
        ({"kind": "workspace", "command": []}, "kind", "not workspaces"),
        ({"held": True}, "held", "pause the sweep"),
        ({"env": {"LD_PRELOAD": "x"}}, "env", "set by Fairway"),
    ],
)
def test_a_sweep_is_refused_before_any_trial_exists(
    dataset: dict[str, Any], fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        create(dataset, **fields)
    assert message in refused.value.fields[field] and not Sweep.objects.exists()


def test_asha_prunes_by_reported_values_and_starts_the_next_trial(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset, ASHA, {"lr": {"low": 0.1, "high": 0.9}, "layers": [1]}))
    good, bad = (trial.job for trial in sweep.trials.select_related("job").order_by("number"))
    (task,) = run(place(dataset, bad))
    assert record_reports(good.pk, [(1.0, 0.1)]) == 1
    assert record_reports(bad.pk, [(1.0, 0.5), (2.0, 0.4)]) == 2
    advanced(sweep)
    pruned = sweep.trials.get(job=bad)
    assert (pruned.state, pruned.value) == ("PRUNED", 0.4)
    assert pruned.message == "Its loss of 0.5 at step 1 is not among the best 1 of 2."
    assert states(sweep) == {"PRUNED": 1, "RUNNING": 2}
    job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)
    bad.refresh_from_db()
    assert (bad.state, bad.reason) == (JobState.CANCELLED, "pruned")
    assert bad.message == f"Pruned: {pruned.message}"
    advanced(sweep)
    assert sweep.trials.get(job=bad).state == "PRUNED"
    assert best_value(get_sweep(dataset["owner"], sweep.public_id)) == 0.1


def test_asha_pauses_a_trial_and_resumes_it_when_it_passes(dataset: dict[str, Any]) -> None:
    spec = replace(ASHA, pause_pruned=True, max_trials=6, max_parallel=6)
    sweep = advanced(create(dataset, spec, {"lr": {"low": 0.1, "high": 0.9}, "layers": [1]}))
    jobs = [trial.job for trial in sweep.trials.select_related("job").order_by("number")]
    record_reports(jobs[0].pk, [(1.0, 0.1)])
    record_reports(jobs[1].pk, [(1.0, 0.2)])
    advanced(sweep)
    assert sweep.trials.get(number=1).state == "PAUSED"
    assert Job.objects.get(pk=jobs[1].pk).state == JobState.SUSPENDED
    for job in jobs[2:]:
        record_reports(job.pk, [(1.0, 0.9)])
    advanced(sweep)  # the second of six is among the best third by now
    assert states(sweep) == {"RUNNING": 2, "PAUSED": 4}
    assert sweep.trials.get(number=1).state == "RUNNING"
    assert Job.objects.get(pk=jobs[1].pk).desired_state == "run"


def test_a_member_of_a_population_starts_from_the_checkpoints_of_its_parent(dataset: dict[str, Any]) -> None:
    spec = SweepSpec(
        searcher="population", metric="loss", population=2, max_trials=3, max_parallel=2, max_steps=5, seed=3
    )
    sweep = advanced(create(dataset, spec, {"lr": {"low": 0.1, "high": 0.9}, "layers": [1]}))
    first, second = (trial.job for trial in sweep.trials.select_related("job").order_by("number"))
    assert first.resume_from == "" and first.env["FAIRWAY_TRIAL_MAX_STEPS"] == "5"
    for name, minutes, validity in (("step-4.pt", 2, "valid"), ("step-5.pt", 1, "broken")):
        saved_at = timezone.now() - dt.timedelta(minutes=minutes)
        Checkpoint.objects.create(
            job=first, name=name, saved_at=saved_at, validity=validity, size_bytes=1
        )  # fmt: skip
    record_reports(first.pk, [(5.0, 0.1)])
    record_reports(second.pk, [(5.0, 0.5)])
    end(dataset, second)
    third = advanced(sweep).trials.get(number=2)
    assert third.parent.number == 0
    assert third.job.resume_from == Checkpoint.objects.get(name="step-4.pt").public_id


def test_reports_only_advance_and_are_bounded(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    trial = sweep.trials.select_related("job").get(number=0)
    assert record_reports(trial.job_id, [(1.0, 0.5), (0.0, 0.9)]) == 2
    assert record_reports(trial.job_id, [(1.0, 0.1), (0.5, 0.1)]) == 0
    assert record_reports(trial.job_id, [(2.0, None)]) == 1
    assert list(trial.reports.values_list("step", "value")) == [(0.0, 0.9), (1.0, 0.5), (2.0, None)]
    record_reports(trial.job_id, [(float(step), 1.0) for step in range(3, 10_000)])
    steps = list(trial.reports.values_list("step", flat=True))
    assert len(steps) <= MAX_REPORTS and steps[-1] == 9999.0
    assert learning_curves([trial])[0][-1] == (9999.0, 1.0)
    plain = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    assert record_reports(plain.pk, [(1.0, 1.0)]) == 0
    with pytest.raises(Conflict, match="not a trial"):
        do_report_metrics(dataset["owner"], plain, [(1.0, 1.0)])


def test_a_stopped_sweep_stops_its_trials_and_starts_no_more(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    do_stop_sweep(dataset["owner"], sweep)
    do_stop_sweep(dataset["owner"], sweep)
    sweep = advanced(sweep)
    assert (sweep.state, states(sweep)) == ("STOPPED", {"STOPPED": 3})
    assert set(Job.objects.values_list("state", flat=True)) == {JobState.CANCELLED}
    assert AuditEntry.objects.filter(action="sweep.stop", object_id=sweep.public_id).count() == 1
    for change in (do_pause_sweep, do_resume_sweep):
        with pytest.raises(Conflict):
            change(dataset["owner"], sweep)
    with pytest.raises(Conflict, match="already ended: stopped"):
        do_change_sweep(dataset["owner"], sweep, max_parallel=9)


def test_a_paused_sweep_suspends_and_resumes_only_its_own_trials(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    own = sweep.trials.get(number=0).job
    do_suspend_job(dataset["owner"], own)
    assert states(advanced(sweep)) == {"PAUSED": 1, "RUNNING": 3}  # the next trial took its place
    do_pause_sweep(dataset["owner"], sweep)
    assert states(advanced(sweep)) == {"PAUSED": 4}
    assert set(Job.objects.values_list("state", flat=True)) == {JobState.SUSPENDED}
    do_resume_sweep(dataset["owner"], sweep)
    assert states(advanced(sweep)) == {"PAUSED": 1, "RUNNING": 3}
    do_resume_job(dataset["owner"], Job.objects.get(pk=own.pk))
    assert states(advanced(sweep)) == {"RUNNING": 4}


def test_more_trials_run_when_the_limit_is_raised(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset, SweepSpec(searcher="random", max_trials=2, max_parallel=1)))
    do_change_sweep(dataset["owner"], sweep, max_parallel=3, max_trials=3)
    assert states(advanced(sweep)) == {"RUNNING": 3}
    entry = AuditEntry.objects.get(action="sweep.change")
    assert (entry.before, entry.after) == (
        {"max_parallel": 1, "max_trials": 2},
        {"max_parallel": 3, "max_trials": 3},
    )
    array = create(dataset, name="array")
    with pytest.raises(InvalidRequest, match="size of an array"):
        do_change_sweep(dataset["owner"], array, max_trials=9)
    with pytest.raises(InvalidRequest, match="between 1 and 1000"):
        do_change_sweep(dataset["owner"], array, max_parallel=0)


def test_a_trial_that_its_owner_cancels_is_stopped_and_the_next_one_starts(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    do_cancel_job(dataset["owner"], sweep.trials.get(number=0).job)
    assert states(advanced(sweep)) == {"STOPPED": 1, "RUNNING": 3}


def test_one_trial_is_stopped_and_the_next_one_starts(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    for _ in range(2):
        assert do_stop_trial(dataset["owner"], sweep, 1).state == "STOPPED"
    assert states(advanced(sweep)) == {"STOPPED": 1, "RUNNING": 3}
    assert sweep.trials.get(number=1).job.state == JobState.CANCELLED
    assert AuditEntry.objects.filter(action="sweep.stop_trial").count() == 1
    with pytest.raises(NotFound, match="no such trial"):
        do_stop_trial(dataset["owner"], sweep, 9)
    with pytest.raises(NotFound):
        do_stop_trial(factories.user(), sweep, 0)


def test_a_failed_trial_is_repeated_with_its_values(dataset: dict[str, Any]) -> None:
    spec = SweepSpec(searcher="random", max_trials=2, max_parallel=2, seed=1)
    sweep = advanced(create(dataset, spec))
    end(dataset, sweep.trials.get(number=0).job, exit_code=1)
    sweep = advanced(sweep)
    repeated = do_repeat_trial(dataset["owner"], sweep, 0)
    assert (repeated.number, repeated.parent) == (2, None)
    assert repeated.parameters == sweep.trials.get(number=0).parameters
    with pytest.raises(Conflict, match="Trial 2 has the same parameters"):
        do_repeat_trial(dataset["owner"], sweep, 0)
    sweep = advanced(sweep)
    assert sweep.max_trials == 3 and states(sweep) == {"FAILED": 1, "RUNNING": 2}
    assert sweep.trials.get(number=2).job.command == sweep.trials.get(number=0).job.command
    with pytest.raises(Conflict, match="only failed, stopped and pruned"):
        do_repeat_trial(dataset["owner"], sweep, 2)


def test_a_trial_of_an_array_is_repeated_once_all_trials_exist(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    do_stop_trial(dataset["owner"], sweep, 0)
    with pytest.raises(Conflict, match="once all have been created"):
        do_repeat_trial(dataset["owner"], sweep, 0)
    sweep = advanced(sweep)
    do_repeat_trial(dataset["owner"], sweep, 0)
    sweep = advanced(sweep)
    assert states(sweep) == {"STOPPED": 1, "RUNNING": 4}
    do_stop_sweep(dataset["owner"], sweep)
    with pytest.raises(Conflict, match="stopped, not running"):
        do_repeat_trial(dataset["owner"], sweep, 0)


def test_a_pruned_trial_goes_on_from_its_checkpoint_after_its_rung(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset, ASHA, {"lr": {"low": 0.1, "high": 0.9}, "layers": [1]}))
    good, bad = (trial.job for trial in sweep.trials.select_related("job").order_by("number"))
    record_reports(good.pk, [(1.0, 0.1)])
    record_reports(bad.pk, [(1.0, 0.5)])
    Checkpoint.objects.create(
        job=bad, name="step-1.pt", saved_at=timezone.now(), validity="valid", size_bytes=1
    )
    sweep = advanced(sweep)
    assert sweep.trials.get(job=bad).state == "PRUNED"
    repeated = do_repeat_trial(dataset["owner"], sweep, 1)
    assert repeated.parent.number == 1 and repeated.search_state == {"rungs": [0.5], "judged": 1.0}
    sweep = advanced(sweep)
    job = sweep.trials.get(pk=repeated.pk).job
    assert job.resume_from == Checkpoint.objects.get().public_id
    record_reports(job.pk, [(2.0, 0.6)])
    assert sweep.trials.get(pk=repeated.pk).state == "RUNNING"  # it is judged at step 3 again
    advanced(sweep)
    assert sweep.trials.get(pk=repeated.pk).state == "RUNNING"


def test_a_paused_trial_is_resumed_before_it_passes_its_rung(dataset: dict[str, Any]) -> None:
    spec = replace(ASHA, pause_pruned=True)
    sweep = advanced(create(dataset, spec, {"lr": {"low": 0.1, "high": 0.9}, "layers": [1]}))
    for number, value in ((0, 0.1), (1, 0.5)):
        record_reports(sweep.trials.get(number=number).job_id, [(1.0, value)])
    sweep = advanced(sweep)
    assert sweep.trials.get(number=1).state == "PAUSED"
    do_resume_trial(dataset["owner"], sweep, 1)
    assert sweep.trials.get(number=1).state == "RUNNING"
    assert advanced(sweep).trials.get(number=1).state == "RUNNING"
    with pytest.raises(Conflict, match="running, not paused"):
        do_resume_trial(dataset["owner"], sweep, 1)


def test_the_use_of_trials_counts_from_their_first_start(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset, ASHA, {"lr": {"low": 0.1, "high": 0.9}, "layers": [1]}))
    first, second = trial_uses(sweep)
    assert first.runtime_s is None and first.rungs == () and second.gpu_hours == 0.0
    job = sweep.trials.get(number=0).job
    record_reports(job.pk, [(1.0, 0.1)])
    advanced(sweep)
    end(dataset, job)
    Job.objects.filter(pk=job.pk).update(started_at=timezone.now() - dt.timedelta(hours=1))
    first, *_ = trial_uses(advanced(sweep))
    assert (first.state, first.value, first.step) == ("COMPLETED", 0.1, 1.0)
    assert first.runtime_s == pytest.approx(3600, abs=60) and first.rungs == [0.1]


def test_a_sweep_whose_owner_may_submit_no_more_pauses_with_the_cause(dataset: dict[str, Any]) -> None:
    sweep = create(dataset)
    Membership.objects.filter(user=dataset["owner"]).delete()
    sweep = advanced(sweep)
    assert sweep.state == "PAUSED" and sweep.message.startswith("Trial 0 could not be submitted: ")
    assert not Job.objects.exists() and states(sweep) == {"WAITING": 3}
    Membership.objects.create(user=dataset["owner"], project=dataset["project"], role="member")
    do_resume_sweep(dataset["owner"], sweep)
    assert states(advanced(sweep)) == {"RUNNING": 3} and Job.objects.count() == 3


def test_the_job_of_a_trial_can_be_submitted_again(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    job = sweep.trials.get(number=0).job
    do_cancel_job(dataset["owner"], job)
    again = do_resubmit_job(dataset["owner"], Job.objects.get(pk=job.pk))
    assert again.env == job.env and not Trial.objects.filter(job=again).exists()


def test_owner_and_managers_control_a_sweep_and_others_do_not(dataset: dict[str, Any]) -> None:
    sweep = create(dataset)
    manager, viewer, colleague = factories.user(), factories.user(), factories.user()
    for user, role in ((manager, "manager"), (viewer, "viewer"), (colleague, "member")):
        Membership.objects.create(user=user, project=dataset["project"], role=role)
    for user in (viewer, colleague):
        assert get_sweep(user, sweep.public_id) == sweep
        with pytest.raises(Forbidden):
            do_stop_sweep(user, sweep)
    with pytest.raises(NotFound):
        do_stop_sweep(factories.user(), sweep)
    with pytest.raises(NotFound):
        get_sweep(factories.user(), sweep.public_id)
    assert do_stop_sweep(manager, sweep).state == "STOPPED"


def test_trials_are_listed_in_any_order_with_the_unknown_last(dataset: dict[str, Any]) -> None:
    sweep = advanced(create(dataset))
    for number, value in ((0, 0.5), (1, 0.2)):
        record_reports(sweep.trials.get(number=number).job_id, [(1.0, value)])
    by_value = list(list_trials(sweep, "value"))
    assert [each.number for each in by_value] == [1, 0, 2]
    assert [each.number for each in list_trials(sweep, "value", descending=True)] == [0, 1, 2]
    assert best_so_far(by_value, "minimize") == [(0, 0.5), (1, 0.2)]
    assert best_so_far(by_value, "maximize") == [(0, 0.5)]
    assert TrialReport.objects.count() == 2
