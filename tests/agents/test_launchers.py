"""What each launcher makes of a job's shape, word by word, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.launchers import (
    LAUNCHERS,
    REQUIRES_RENDEZVOUS,
    GangShape,
    LaunchSpec,
    RankNetwork,
    RendezvousPoint,
    equal_members,
    launch_rank,
)

HERE = RendezvousPoint("10.1.2.3", 32001)
TRAIN = ("python", "train.py", "--epochs", "3")
BOTH = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}

GOLDEN: dict[str, tuple[str, GangShape, RankNetwork, LaunchSpec]] = {
    "a single task is told nothing": (
        "none",
        GangShape(equal_members(1, 4)),
        RankNetwork(0),
        LaunchSpec(TRAIN),
    ),
    "the third of four": (
        "none",
        GangShape(equal_members(4, 1), HERE),
        RankNetwork(2, "ib0"),
        LaunchSpec(
            TRAIN,
            {
                "RANK": "2",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "NODE_RANK": "2",
                "MASTER_ADDR": "10.1.2.3",
                "MASTER_PORT": "32001",
            },
            BOTH,
        ),
    ),
    "without a network it knows its number": (
        "none",
        GangShape(equal_members(2, 1)),
        RankNetwork(1),
        LaunchSpec(
            TRAIN,
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"},
        ),
    ),
    "torchrun on one node": (
        "torchrun",
        GangShape(equal_members(1, 8)),
        RankNetwork(0),
        LaunchSpec(("torchrun", "--no-python", "--standalone", "--nproc-per-node=8", *TRAIN)),
    ),
    "torchrun on the second of two": (
        "torchrun",
        GangShape(equal_members(2, 8), HERE),
        RankNetwork(1, "ib0"),
        LaunchSpec(
            ("torchrun", "--no-python", "--nproc-per-node=8", "--nnodes=2", "--node-rank=1", *TRAIN),
            {
                "MASTER_ADDR": "10.1.2.3",
                "MASTER_PORT": "32001",
                "PET_MASTER_ADDR": "10.1.2.3",
                "PET_MASTER_PORT": "32001",
                "NODE_RANK": "1",
            },
            BOTH,
        ),
    ),
    "torchrun where they meet at an address of ipv6, with the adapters that the pool names": (
        "torchrun",
        GangShape(equal_members(2, 8), RendezvousPoint("fd00:9::1", 32001)),
        RankNetwork(1, "ib0", "mlx5_0,mlx5_1"),
        LaunchSpec(
            ("torchrun", "--no-python", "--nproc-per-node=8", "--nnodes=2", "--node-rank=1", *TRAIN),
            {
                "MASTER_ADDR": "fd00:9::1",
                "MASTER_PORT": "32001",
                "PET_MASTER_ADDR": "[fd00:9::1]",
                "PET_MASTER_PORT": "32001",
                "NODE_RANK": "1",
            },
            BOTH | {"NCCL_IB_HCA": "mlx5_0,mlx5_1"},
        ),
    ),
    "torchrun without a GPU": (
        "torchrun",
        GangShape(equal_members(1, 0)),
        RankNetwork(0),
        LaunchSpec(("torchrun", "--no-python", "--standalone", "--nproc-per-node=1", *TRAIN)),
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case: str) -> None:
    name, gang, rank, launch = GOLDEN[case]
    assert launch_rank(name, gang, rank, TRAIN) == launch


@pytest.mark.parametrize("name", sorted(REQUIRES_RENDEZVOUS))
def test_those_that_need_the_others_say_so_where_they_cannot_be_reached(name: str) -> None:
    with pytest.raises(ValueError, match="rendezvous address"):
        launch_rank(name, GangShape(equal_members(2, 1)), RankNetwork(0), TRAIN)


@given(
    name=st.sampled_from(sorted(LAUNCHERS)),
    tasks=st.integers(1, 64),
    gpus=st.integers(0, 8),
    command=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=5),
    data=st.data(),
)
def test_ranks_differ_and_the_command_stays_whole(name, tasks, gpus, command, data) -> None:
    gang = GangShape(equal_members(tasks, gpus), HERE)
    ranks = [RankNetwork(number, data.draw(st.sampled_from([None, "eth0"]))) for number in range(tasks)]
    launches = [launch_rank(name, gang, rank, command) for rank in ranks]
    assert all(each.command[-len(command) :] == tuple(command) for each in launches)
    reported = {(each.command, tuple(sorted(each.environment.items()))) for each in launches}
    assert len(reported) == tasks
    if tasks > 1:
        assert {each.environment["MASTER_PORT"] for each in launches} == {"32001"}
