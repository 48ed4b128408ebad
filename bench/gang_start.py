"""Time from submission to the first training step of torchrun on two SSH nodes, beside the same started by hand.

    python -m bench gang_start [--rounds N]

A complete Fairway (``manage.py up``) with two rig nodes of podman that have the image with torch. Each round submits a
job with the launcher ``torchrun`` and two tasks over REST, and then starts the same program by ``podman run`` and
``torchrun`` in root shells that stay open over SSH, on both nodes at once. Both times end when rank 0 has made its first
optimizer step with DistributedDataParallel on Gloo. Needs what the rig needs (root, podman, sshd) and the wheel of torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.report import print_figure
from bench.start import RootShell, client_of, prepare_nodes, root_shell

TORCH = "torch==2.13.0 numpy"
TARGET_RATIO = 1.5
LIMIT_S = 600.0
PROGRAM = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step at %.3f" % time.time(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
COMMAND = ["python3", "-c", PROGRAM]


def main(arguments: list[str]) -> int:
    """Print the line of the median."""
    parser = argparse.ArgumentParser(prog="bench gang_start")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    from tests.rig.images import rig_image
    from tests.rig.needs import missing_for_rig
    from tests.rig.rig import Rig
    from tests.stories.portal import StoryPortal

    reason = missing_for_rig()
    if reason is not None:
        print_figure("gang_first_step", skipped=reason)
        return 0
    image = rig_image("tiny", also=TORCH)
    with Rig(2, image_stores=[[image.store]] * 2) as rig, StoryPortal("--no-local-node") as portal:
        first, second = rig.nodes
        token = prepare_nodes(portal, rig.nodes, image.name)
        from portal.models import NodePool

        NodePool.objects.update(allow_host_network=True)
        with (
            root_shell(first) as one,
            root_shell(second) as other,
            client_of(portal.url, token) as client,
        ):
            shells, ours, hand = [one, other], [], []
            for number in range(rounds + 1):
                mine, theirs = _job_s(client, number), _hand_s(shells, first.address, image.name)
                if number:  # the first round warms both up
                    ours.append(mine)
                    hand.append(theirs)
    median = statistics.median(ours)
    reference = statistics.median(hand)
    print_figure(
        "gang_first_step",
        ours=round(median, 2),
        reference=round(reference, 2),
        ratio=round(median / reference, 2),
        unit="s, median",
        target=f"at most {TARGET_RATIO} x started by hand",
        met=median <= TARGET_RATIO * reference,
        all_ours=[round(each, 2) for each in ours],
        all_by_hand=[round(each, 2) for each in hand],
        load_average=round(os.getloadavg()[0], 1),
    )
    return 0


def _job_s(client: Any, number: int) -> float:
    """Return the seconds from the request to the first step of a job, and wait for its end."""
    request = {
        "name": f"gang-{number}",
        "project": "default",
        "environment": "bench",
        "command": COMMAND,
        "tasks": 2,
        "gpus_per_task": 4,
        "memory_mib": 1500,
        "launcher": "torchrun",
        "launcher_options": {"processes_per_task": 1},
        "env": {"OMP_NUM_THREADS": "1"},
    }
    began_at = time.time()
    answer = client.post("/jobs/", json=request)
    assert answer.status_code == 201, answer.text
    job = answer.json()["id"]
    while True:
        text = client.get(f"/jobs/{job}/logs/").json().get("text", "")
        state = client.get(f"/jobs/{job}/").json()
        if (step := _step_at(text)) and state["state"] == "COMPLETED":
            return step - began_at
        if state["state"] in ("FAILED", "CANCELLED") or time.time() - began_at > LIMIT_S:
            raise SystemExit(f"job {job}: {state['state']} {state.get('reason')}\n{text}")
        time.sleep(0.1)


def _hand_s(shells: list[RootShell], address: str, image: str) -> float:
    """Return the seconds from the command in both shells to the first step."""
    words = ["torchrun", "--no-python", "--nnodes=2", "--nproc-per-node=1", f"--master-addr={address}"]
    words += ["--master-port=29400"]
    container = ["podman", "run", "--rm", "--network", "host", "--env", "OMP_NUM_THREADS=1"]
    container += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]

    def run(rank: int) -> str:
        return shells[rank].run(shlex.join([*container, image, *words, f"--node-rank={rank}", *COMMAND]))

    began_at = time.time()
    with ThreadPoolExecutor(2) as threads:
        text = "".join(threads.map(run, range(2)))
    step = _step_at(text)
    assert step is not None, text
    return step - began_at


def _step_at(text: str) -> float | None:
    found = re.search(r"first step at ([\d.]+)", text)
    return float(found[1]) if found else None
