"""Places the pods of Alibaba's GPU trace (openb, cluster-trace-gpu-v2023) one by one until the cluster is
full.

Method of Weng et al., USENIX ATC 2023: all pods of the list, and pods redrawn from it, until they request 1.3
times the GPUs of the cluster, shuffled by a seed. Each pod is placed once or fails; none ends. The metric is
the part of all GPUs that is allocated when the arrived pods request 80 to 130 % of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.replay.openb_baselines import BASELINES, BaselinePolicy
from bench.replay.tables import read_rows
from scheduler.core.capacity.fragmentation import GROUP_WEIGHT
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuConstraints,
    GpuRow,
    GpuUuid,
    HeldSlots,
    NodeId,
    NodeRow,
    PoolId,
    TaskRequest,
    TaskShape,
)
from scheduler.replay.input_files import MalformedFileError

NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
MEASURED_AT_PERCENT = (80, 90, 95, 100, 110, 120, 130)
"""Requested GPUs of the arrived pods, percent of all GPUs."""
MAX_GPUS = 64
MAX_PODS = 2_000_000


@dataclass(frozen=True, slots=True)
class OpenbResult:
    """Result of one order of arrivals; percentages are of all GPU milli."""

    allocated_percent: dict[int, float]
    placed: int
    failed: int
    fragmented_percent: float
    duration_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", required=True, metavar="FILE", help=f"CSV: {', '.join(NODE_COLUMNS)}")
    parser.add_argument(
        "--pods", required=True, metavar="FILE", help=f"CSV: {', '.join(POD_COLUMNS)} and, if any, gpu_spec"
    )
    parser.add_argument("--policy", choices=("fairway", "fgd", *BASELINES), default="fairway")
    parser.add_argument("--seed", type=int, default=0, help="of the order of arrivals")


def run(arguments: argparse.Namespace) -> int:
    """Replay and print the result as one JSON line."""
    nodes = read_nodes(arguments.nodes)
    pods = read_pods(arguments.pods)
    order = arrivals(nodes, pods, arguments.seed, arguments.pods)
    sys.stderr.write(f"{len(nodes)} nodes, {len(pods)} pods, {len(order)} arrivals\n")
    result = replay(nodes, pods, order, arguments.policy, arguments.seed)
    line = {
        "policy": arguments.policy,
        "seed": arguments.seed,
        "allocated_percent": {str(at): round(part, 3) for at, part in result.allocated_percent.items()},
        "placed": result.placed,
        "failed": result.failed,
        "fragmented_percent": round(result.fragmented_percent, 3),
        "seconds": round(result.duration_s, 3),
        "decisions_per_s": round(len(order) / result.duration_s),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


def read_nodes(path: str) -> list[NodeRow]:
    """Return the nodes in file order, which breaks ties between equal scores."""
    nodes: list[NodeRow] = []
    for row in read_rows(path, NODE_COLUMNS):
        name, model = f"{len(nodes):06}", row.text("model")
        gpus = tuple(
            GpuRow(GpuUuid(f"{name}-{index}"), index, model, 0)
            for index in range(row.integer("gpu", high=MAX_GPUS))
        )
        cpu_milli, memory_mib = row.integer("cpu_milli"), row.integer("memory_mib")
        nodes.append(
            NodeRow(NodeId(name), name, PoolId("openb"), True, True, cpu_milli, 0, memory_mib, 0, gpus)
        )
    if not any(node.gpus for node in nodes):
        raise MalformedFileError(path, "", "there is no node with a GPU")
    return nodes


def read_pods(path: str) -> list[TaskShape]:
    """Return the request of each pod. ``gpu_spec`` "A|B" allows either model; it is ignored without GPUs."""
    pods = []
    for row in read_rows(path, POD_COLUMNS):
        gpus = row.integer("num_gpu", high=MAX_GPUS)
        milli = row.integer("gpu_milli", low=1 if gpus else 0, high=WHOLE_MILLI)
        model = (row.text("gpu_spec") or None) if gpus else None
        pods.append(
            TaskShape(TaskRequest(gpus, milli if gpus else WHOLE_MILLI, row.integer("cpu_milli"),
                                  row.integer("memory_mib"), GpuConstraints(model)))
        )  # fmt: skip
    return pods


def arrivals(nodes: Sequence[NodeRow], pods: Sequence[TaskShape], seed: int, path: str) -> list[TaskShape]:
    """Return all pods and redrawn ones up to the last of ``MEASURED_AT_PERCENT``, shuffled by the seed."""
    draw = random.Random(seed)
    wanted = _capacity_milli(nodes) * MEASURED_AT_PERCENT[-1] // 100
    asked = sum(pod.request.total_milli for pod in pods)
    if not asked or len(pods) * wanted > MAX_PODS * asked:
        raise MalformedFileError(path, "", f"the pods ask for {asked} milli-GPU, too few to fill the nodes")
    order = list(pods)
    while asked < wanted:
        pod = draw.choice(pods)
        order.append(pod)
        asked += pod.request.total_milli
    draw.shuffle(order)
    return order


def replay(
    nodes: Sequence[NodeRow], pods: Sequence[TaskShape], order: Sequence[TaskShape], policy: str, seed: int
) -> OpenbResult:
    """Place each pod of ``order`` or count it as failed; only the request frequencies are known ahead."""
    floor = NodePlacer(
        nodes, "fragmentation", demand=_demand_histogram(pods, policy), group_weight=_together(policy)
    )
    choice = BASELINES[policy](floor, seed) if policy in BASELINES else None
    capacity, arrived, allocated, placed = _capacity_milli(nodes), 0, 0, 0
    measured: dict[int, float] = {}
    began = time.perf_counter()
    for pod in order:
        milli = pod.request.total_milli
        arrived += milli
        if _place(floor, pod, choice):
            placed += 1
            allocated += milli
        while (
            len(measured) < len(MEASURED_AT_PERCENT)
            and arrived * 100 >= capacity * MEASURED_AT_PERCENT[len(measured)]
        ):
            measured[MEASURED_AT_PERCENT[len(measured)]] = 100 * allocated / capacity
    seconds = time.perf_counter() - began
    left = NodePlacer(nodes, "fragmentation", demand=_demand_histogram(pods, "fgd"), group_weight=0)
    left.set_to_min_of(floor, floor, range(len(nodes)))
    return OpenbResult(
        measured, placed, len(order) - placed, 100 * left.fragmented_milli() / capacity, max(seconds, 1e-9)
    )


def _place(floor: NodePlacer, pod: TaskShape, choice: BaselinePolicy | None) -> bool:
    if choice is None:
        return floor.place_gang(pod, 1) is not None
    chosen = choice(pod)
    if chosen is None:
        return False
    node, slots = chosen
    floor.adjust(HeldSlots(node, slots, pod.request.milli, pod.request.cpu_milli, pod.request.memory_mib), -1)
    return True


def _together(policy: str) -> int:
    return GROUP_WEIGHT if policy == "fairway" else 0


def _demand_histogram(pods: Sequence[TaskShape], policy: str) -> Counter[TaskRequest]:
    """Return the frequency of each request. FGD as published ignores memory."""
    memory = policy == "fairway"
    return Counter(pod.request._replace(memory_mib=pod.request.memory_mib * memory) for pod in pods)


def _capacity_milli(nodes: Sequence[NodeRow]) -> int:
    return WHOLE_MILLI * sum(len(node.gpus) for node in nodes)
