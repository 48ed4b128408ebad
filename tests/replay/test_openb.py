"""Pods placed one by one: the figures hold, orders are fair, and a slip in a file is told by its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.replay import openb
from bench.replay.__main__ import main

DATA = Path(__file__).parents[1] / "data" / "openb"
NODES = """sn,cpu_milli,memory_mib,gpu,model
n0,64000,262144,2,P100
n1,96000,393216,8,G2
n2,104000,524288,2,T4
n3,32000,131072,0,
"""
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec
p0,8000,16384,1,1000,
p1,3000,8192,1,470,
p2,3000,8192,1,810,P100|T4
p3,4000,8192,0,0,
p4,16000,65536,2,1000,G2
p5,4000,8192,2,300,
"""
POLICIES = ("fairway", "fgd", "bestfit", "dotprod", "gpupacking", "gpuclustering", "random")


@pytest.fixture
def words(tmp_path: Path):
    def written(nodes: str | bytes = NODES, pods: str | bytes = PODS, *more: str) -> list[str]:
        for name, content in (("nodes", nodes), ("pods", pods)):
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["openb", "--nodes", str(tmp_path / "nodes"), "--pods", str(tmp_path / "pods"), *more]

    return written


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_line_is_the_result(words, capsys: pytest.CaptureFixture[str], policy: str) -> None:
    assert main(words(NODES, gzip.compress(PODS.encode()), "--policy", policy, "--seed", "3")) == 0
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (reported["policy"], reported["seed"]) == (policy, 3)
    percents = list(reported["allocated_percent"].values())
    assert list(reported["allocated_percent"]) == ["80", "90", "95", "100", "110", "120", "130"]
    assert 0 < percents[0] <= percents[-1] <= 100
    assert percents == sorted(percents)
    assert reported["placed"] > 0 and reported["failed"] > 0
    assert reported["decisions_per_s"] > 0


def test_the_seed_gives_the_order_and_every_pod_arrives(tmp_path: Path, words) -> None:
    words()
    nodes, pods = openb.read_nodes(str(tmp_path / "nodes")), openb.read_pods(str(tmp_path / "pods"))
    one, same, other = (openb.arrivals(nodes, pods, seed, "pods") for seed in (1, 1, 2))
    assert one == same != other
    assert set(pods) <= set(one)
    last = max(pod.request.total_milli for pod in pods)
    asked = sum(pod.request.total_milli for pod in one)
    assert 12_000 * 1.3 <= asked < 12_000 * 1.3 + last


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pod_runs_only_on_a_model_that_it_names(tmp_path: Path, words, policy: str) -> None:
    """Pods that name a model the cluster lacks all fail; the others are not touched by it."""
    words(NODES, PODS.replace("P100|T4", "H100").replace(",G2", ",H100"))
    nodes, pods = openb.read_nodes(str(tmp_path / "nodes")), openb.read_pods(str(tmp_path / "pods"))
    refused = [pod for pod in pods if pod.request.constraints.gpu_model == "H100"]
    result = openb.replay(nodes, pods, refused * 3, policy, 0)
    assert (result.placed, result.failed) == (0, 6)


def test_on_the_whole_trace_ours_beats_fgd_and_fgd_beats_best_fit() -> None:
    path = str(DATA / "pods_default.csv.gz")
    nodes, pods = openb.read_nodes(str(DATA / "nodes.csv.gz")), openb.read_pods(path)
    order = openb.arrivals(nodes, pods, 0, path)
    ours, fgd, best_fit = (
        openb.replay(nodes, pods, order, policy, 0).allocated_percent[130]
        for policy in ("fairway", "fgd", "bestfit")
    )
    assert ours >= fgd + 0.15
    assert fgd >= 95.15
    assert 92.8 < best_fit < 93.6


@pytest.mark.parametrize(
    ("nodes", "pods", "reported"),
    [
        (NODES.replace(",model", ",kind"), PODS, ("nodes, line 1", "column model is missing")),
        (NODES.replace("n1,96000", "n1,-96000"), PODS, ("nodes, line 3, column cpu_milli", "-96000")),
        (NODES.replace("262144,2", "262144,2000"), PODS, ("nodes, line 2, column gpu", "2000")),
        (NODES.splitlines()[0], PODS, ("nodes", "no node with a GPU")),
        (NODES, PODS.replace("num_gpu", "gpus"), ("pods, line 1", "column num_gpu is missing")),
        (NODES, PODS.replace("1,470", "one,470"), ("pods, line 3, column num_gpu", "'one'")),
        (NODES, PODS.replace("1,810", "1,1810"), ("pods, line 4, column gpu_milli", "1810")),
        (NODES, PODS.replace("1,1000,\n", "1,0,\n"), ("pods, line 2, column gpu_milli", "0 is not")),
        (NODES, PODS + "p6,1000\n", ("pods, line 8", "2 cells")),
        (NODES, PODS.splitlines()[0] + "\np3,4000,8192,0,0,\n", ("pods", "too few")),
        (NODES, gzip.compress(PODS.encode(), mtime=0)[:-9], ("pods", "damaged or truncated")),
        (NODES, b"\x1f\x8bnot an archive", ("pods", "damaged or truncated")),
    ],
)
def test_a_malformed_file_is_refused_with_its_position(
    words, capsys: pytest.CaptureFixture[str], nodes: str, pods: str | bytes, reported: tuple[str, str]
) -> None:
    assert main(words(nodes, pods)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    message = said.err.splitlines()[-1]
    assert reported[0] in message and reported[1] in message


def test_a_missing_file_is_reported(words, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = words()
    (tmp_path / "pods").unlink()
    assert main(line) == 2
    assert "pods: no such file" in capsys.readouterr().err
