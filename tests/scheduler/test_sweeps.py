"""A sweep on real workers and a real agent: trials report by their file, and are pruned, paused and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portal.domain.sweeps.sweeps import SweepSpec
from portal.models import Job, Sweep
from portal.services.jobs.submission import JobRequest
from portal.services.sweeps.sweeps import do_create_sweep, do_pause_sweep, do_resume_sweep
from tests import factories
from tests.engine_harness import engine_harness, held_milli, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

TRAIN = (
    'n=0; [ -e "$HOME/{name}" ] && n=$(cat "$HOME/{name}"); echo "from $n";'
    " while [ $n -lt $FAIRWAY_TRIAL_MAX_STEPS ]; do n=$((n + 1));"
    ' echo $n > "$HOME/{name}"; echo "$n {lr}" >> "$FAIRWAY_METRIC_FILE"; sleep 0.4; done'
)
"""Continues from its own file, as from a checkpoint; its loss is its learning rate."""


INHERIT = (
    'own={lr}; [ -n "$FAIRWAY_RESUME_FROM" ] && own=$(cat "$FAIRWAY_RESUME_FROM/own");'
    ' saved="$FAIRWAY_CHECKPOINT_DIR/step-1"; mkdir -p "$saved"; echo $own > "$saved/own"; touch "$saved/.complete";'
    ' echo "1 $own" >> "$FAIRWAY_METRIC_FILE"; sleep 2'
)
"""Its checkpoint is the learning rate of its first ancestor, and so is its loss."""


@pytest.fixture
def dataset(settings: Any) -> Iterator[dict[str, Any]]:
    """Workers, a real agent with four pretend GPUs, and a user."""
    with engine_harness() as harness:
        settings.LOG_DIR = Path(harness.folder) / "logs"
        harness.mark_enrolled(harness.create_node(gpus=4), gpus=4)
        harness.start_worker()
        owner = factories.user("ada")
        yield {
            "owner": owner,
            "project": factories.project("vision", member=owner),
            "environment": factories.environment(runtime="process", tool=False),
        }


def test_a_sweep_prunes_bad_trials_is_paused_and_resumed_and_ends(dataset: dict[str, Any]) -> None:
    spec = SweepSpec(
        searcher="asha", metric="loss", max_trials=6, max_parallel=4, max_steps=30, reduction_factor=3, seed=5
    )
    command = ["sh", "-c", TRAIN.replace("{name}", "trial-$FAIRWAY_TRIAL")]
    request = JobRequest(
        name="real",
        project=dataset["project"],
        environment=dataset["environment"],
        command=command,
        memory_mib=64,
        termination_grace_s=1,
    )
    sweep = do_create_sweep(dataset["owner"], spec, request, {"lr": {"low": 0.1, "high": 0.9}})
    wait_for("a report", lambda: sweep.trials.filter(step__gt=0, state="RUNNING").exists(), 60.0)
    do_pause_sweep(dataset["owner"], sweep)
    wait_for("its GPUs are free", lambda: held_milli() == 0, 40.0)
    assert not sweep.trials.filter(state="RUNNING").exists()
    do_resume_sweep(dataset["owner"], sweep)

    wait_for("its end", lambda: Sweep.objects.filter(pk=sweep.pk, state="COMPLETED").exists(), 150.0)
    trials = list(sweep.trials.select_related("job").order_by("number"))
    assert [each.number for each in trials] == list(range(6)) and Job.objects.count() == 6
    assert {each.state for each in trials} == {"COMPLETED", "PRUNED"}
    best = min(trials, key=lambda each: each.parameters["lr"])
    assert (
        best.state == "COMPLETED" and best.step == 30 and best.value == pytest.approx(best.parameters["lr"])
    )
    for trial in trials:
        job = Job.objects.filter(pk=trial.job_id)
        wait_for("the end of its job", job.filter(state__in=("COMPLETED", "CANCELLED")).exists)
        ended_as = job.values_list("state", "reason").get()
        # one that is stopped during its last step completes
        pruned = trial.state == "PRUNED" and ended_as == ("CANCELLED", "pruned")
        assert pruned or ended_as == ("COMPLETED", "completed"), (trial.number, trial.state, ended_as)
    assert Job.objects.filter(state="CANCELLED", reason="pruned").exists()
    assert wait_for("its GPUs are free", lambda: held_milli() == 0)
    twice = [each for each in trials if each.job.attempt_count == 2]
    assert twice  # paused with the sweep, and resumed from their own file
    for trial in twice:
        steps = list(trial.reports.values_list("step", flat=True))
        assert steps == sorted(set(steps))


def test_a_trial_of_a_population_starts_from_the_checkpoint_of_its_parent(dataset: dict[str, Any]) -> None:
    spec = SweepSpec(
        searcher="population", metric="loss", population=2, max_trials=4, max_parallel=2, max_steps=1, seed=2
    )
    request = JobRequest(
        name="heirs",
        project=dataset["project"],
        environment=dataset["environment"],
        command=["sh", "-c", INHERIT],
        memory_mib=64,
    )
    sweep = do_create_sweep(dataset["owner"], spec, request, {"lr": {"low": 0.1, "high": 0.9}})
    wait_for("its end", lambda: Sweep.objects.filter(pk=sweep.pk, state="COMPLETED").exists(), 90.0)
    trials = list(sweep.trials.select_related("job", "parent").order_by("number"))
    assert {each.state for each in trials} == {"COMPLETED"} and len(trials) == 4
    for heir in trials[2:]:
        assert heir.job.resume_from and heir.value == heir.parent.value
