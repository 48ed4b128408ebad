"""Job throughput of one node, from the first submission to the last end, beside a tuned Slurm.

    python -m bench jobs [--jobs N] [--rounds N] [--array]
    python -m bench jobs --podman [--jobs N]

A complete Fairway (``manage.py up``) with its node on this machine and the runtime ``process``, over REST;
and Slurm with as many slots as that node has GPUs, by ``sbatch``. Both get the same number of jobs from as
many concurrent users, alternately; with ``--array`` as one array from one user. With ``--podman``, jobs run on a node of the rig with podman; Slurm starts
no containers, so that figure has no reference. Needs root and Slurm's programs; reports a missing Slurm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.cpu_time import cpu_ms
from bench.report import print_figure
from bench.slurm import TUNED, missing_slurm, slurm
from bench.start import client_of, enter_portal, prepare_nodes

COMMAND = ("true",)
CLIENTS = 4
POLL_INTERVAL_S = 0.2
SETTLE_S = 0.5
"""Until the last task is removed from its node and its CPU time is counted."""
LIMIT_S = 300.0


def main(arguments: list[str]) -> int:
    """Print the line of the runtime process beside Slurm, or that of podman."""
    parser = argparse.ArgumentParser(prog="bench jobs")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--array", action="store_true", help="one array of N jobs instead of N submissions")
    parser.add_argument("--podman", action="store_true", help="through a node with podman, without Slurm")
    wanted = parser.parse_args(arguments)
    if wanted.podman:
        _with_podman(wanted.jobs)
        return 0
    reason = missing_slurm()
    if reason is not None:
        print_figure("jobs_through_one_node", skipped=reason)
        return 0
    _beside_slurm(wanted.jobs, wanted.rounds, array=wanted.array)
    return 0


def _beside_slurm(jobs: int, rounds: int, *, array: bool) -> None:
    from tests.stories.portal import StoryPortal

    with (
        StoryPortal() as portal,
        tempfile.TemporaryDirectory(prefix="fairway-bench-", dir="/var/tmp") as folder,
    ):
        admin = enter_portal(portal)
        from portal.models import Environment, Gpu

        Environment.objects.create(name="bench", title="Bench", runtime="process")
        while not (slots := Gpu.objects.filter(node__state="ready", node__reachable=True).count()):
            time.sleep(0.2)
        Path(folder).chmod(0o755)
        with slurm(Path(folder), slots) as reference, client_of(portal.url, _token(admin)) as client:

            def slurm_rate(count: int) -> float:
                if not array:
                    return _throughput(lambda: reference.submit(*COMMAND), reference.unfinished, count)
                submit = partial(reference.submit, *COMMAND, tasks=count)
                return count * _throughput(submit, reference.unfinished, 1)

            _ours(client, slots, array=array)  # warm-up: imports, connections and caches
            slurm_rate(slots)
            ours, theirs = [], []
            used: Counter[str] = Counter()
            for _ in range(rounds):
                theirs.append(slurm_rate(jobs))
                before = cpu_ms(portal.process_id)
                ours.append(_ours(client, jobs, array=array))
                time.sleep(SETTLE_S)
                used += cpu_ms(portal.process_id) - before
    ratio = statistics.median(ours) / statistics.median(theirs)
    print_figure(
        "array_through_one_node" if array else "jobs_through_one_node",
        ours=round(statistics.median(ours), 2),
        reference=round(statistics.median(theirs), 2),
        ratio=round(ratio, 2),
        unit="jobs a second, median of the rounds",
        target="at least 1 x Slurm",
        met=ratio >= 1,
        slurm=TUNED,
        jobs=jobs,
        slots=slots,
        all_ours=[round(each, 2) for each in ours],
        all_theirs=[round(each, 2) for each in theirs],
        cpu_ms_per_job=round(used.total() / jobs / rounds, 1),
        cpu_ms_per_job_by_process={name: round(ms / jobs / rounds, 1) for name, ms in used.most_common()},
        load_average=round(os.getloadavg()[0], 1),
    )


def _with_podman(jobs: int) -> None:
    from tests.rig.images import rig_image
    from tests.rig.needs import missing_for_rig
    from tests.rig.rig import Rig
    from tests.stories.portal import StoryPortal

    reason = missing_for_rig()
    if reason is not None:
        print_figure("jobs_through_one_podman_node", skipped=reason)
        return
    image = rig_image("tiny")
    with (
        Rig(1, image_stores=[image.store]) as rig,
        StoryPortal("--no-local-node") as portal,
        client_of(portal.url, prepare_nodes(portal, [rig.nodes[0]], image.name)) as client,
    ):
        _ours(client, 2)
        ours = _ours(client, jobs)
    print_figure(
        "jobs_through_one_podman_node",
        ours=round(ours, 2),
        unit="jobs a second",
        jobs=jobs,
        load_average=round(os.getloadavg()[0], 1),
    )


def _ours(client: Any, jobs: int, *, array: bool = False) -> float:
    from portal.domain.states import TERMINAL_JOB_STATES
    from portal.domain.sweeps.sweeps import SweepState
    from portal.models import Job, Sweep

    request = {
        "name": "bench",
        "project": "default",
        "environment": "bench",
        "command": list(COMMAND),
        "gpus_per_task": 1,
        "cpu_milli": 250,  # as many at a time as the node has GPUs, as with Slurm
        "memory_mib": 256,
    }

    def submit() -> None:
        answer = client.post("/jobs/", json=request)
        assert answer.status_code == 201, answer.text

    def submit_array() -> None:
        points = [{"number": number} for number in range(jobs)]
        sweep = {"searcher": "list", "points": points, "reads_environment": True, "max_parallel": 1000}
        answer = client.post("/sweeps/", json={"job": request, **sweep})
        assert answer.status_code == 201, answer.text

    if array:
        return jobs * _throughput(submit_array, Sweep.objects.filter(state=SweepState.RUNNING).count, 1)
    return _throughput(submit, Job.objects.exclude(state__in=TERMINAL_JOB_STATES).count, jobs)


def _throughput(submit: Callable[[], None], unfinished: Callable[[], int], jobs: int) -> float:
    """Return jobs per second, from the first submission until none is unfinished."""
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as users:
        for done in [users.submit(submit) for _ in range(jobs)]:
            done.result()
    while unfinished():
        if time.perf_counter() - began > LIMIT_S:
            raise SystemExit(f"{unfinished()} of {jobs} jobs have not ended after {LIMIT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)
    return jobs / (time.perf_counter() - began)


def _token(admin: Any) -> str:
    from portal.services.accounts.tokens import Scope, do_create_token

    return str(do_create_token(admin, name="bench", scopes=list(Scope))[1])
