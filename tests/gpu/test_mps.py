"""Shares of a real GPU: the limits of memory and multiprocessors that NVIDIA's MPS sets for a task."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.bundle import build_archive
from agents.link import Link
from agents.local import open_local
from tests.agents.node.conftest import log_of
from tests.engine_harness import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-cuda-mps-control") is None, reason="nvidia-cuda-mps-control is missing"
    ),
]

CLIENT = """
import ctypes, json, os, time
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
device, context, memory, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
assert cuda.cuDeviceGetAttribute(ctypes.byref(count), 16, device) == 0
limit = int(os.environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].split("=")[1][:-1])
def take(mib):
    return cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mib << 20))
told = {"limit_mib": limit, "too_much": take(limit + 1024), "multiprocessors": count.value}
told["enough"] = take(max(1, limit - 1024))
print(json.dumps(told), flush=True)
time.sleep(600)
"""
OUT_OF_MEMORY = 2


@pytest.fixture
def link() -> Iterator[Link]:
    folder = Path(tempfile.mkdtemp(prefix="fwg", dir="/var/tmp"))
    folder.chmod(0o755)
    build_archive(folder / "agent.pyz")
    own = {"cluster": "g", "state_dir": str(folder / "state"), "home_root": str(folder / "homes")}
    (folder / "node.json").write_text(json.dumps({**own, "gpu_provider": "nvml"}))
    with open_local(
        folder / "agent.pyz", "control", folder / "node.json", cluster="g", python=sys._base_executable
    ) as opened:
        yield opened
        for job in ("jsmall", "jlarge"):
            opened.request("stop", timeout_s=30, epoch=1, job=job, attempt=1, grace_s=0)
        wait_for("the daemon's end", lambda: not list((folder / "state/mps").glob("*/launch.json")))
    shutil.rmtree(folder)


def begin(link: Link, job: str, uuid: str, milli: int) -> dict[str, Any]:
    spec = {
        "cluster": "g",
        "job": job,
        "attempt": 1,
        "task": 0,
        "digest": "d1",
        "runtime": "process",
        "command": [sys._base_executable, "-c", CLIENT],
        "uid": 2001,
        "gid": 2001,
        "user": "ada",
        "gpus": [{"uuid": uuid, "milli": milli}],
    }
    assert link.request("start", timeout_s=90, epoch=1, spec=spec)["state"] == "running"
    return json.loads(wait_for(f"{job}'s output", lambda: log_of(link, job).strip()))


def test_memory_and_multiprocessors_are_those_of_the_share(link: Link) -> None:
    assert link.hello.gpu_sharing is not None
    if not link.hello.gpu_sharing.enforced:
        pytest.skip(link.hello.gpu_sharing.message)
    gpu = link.hello.gpus[0]
    small = begin(link, "jsmall", gpu.uuid, 250)
    large = begin(link, "jlarge", gpu.uuid, 500)
    print(f"\n{gpu.model}: {gpu.memory_mib} MiB, {gpu.driver_reserved_mib} reserved; {small=} {large=}")
    for reported, milli in ((small, 250), (large, 500)):
        assert reported["limit_mib"] == (gpu.memory_mib - (gpu.driver_reserved_mib or 0)) * milli // 1000
        assert reported["too_much"] == OUT_OF_MEMORY and reported["enough"] == 0
    assert small["multiprocessors"] < large["multiprocessors"]
    rows = link.request("stats", timeout_s=20, once=True)["sample"]["gpus"][gpu.index]["processes"]
    assert not [row for row in rows if row["foreign"] and "mps" in (row["command"] or "")], rows
