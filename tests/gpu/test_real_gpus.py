"""GPU facts, readings, links, events and processes of the agent, read from NVIDIA's own driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from agents.bundle import build_archive
from agents.local import open_local
from agents.node.gpus import GpuProvider, NoGpus
from agents.node.gpus.health import APPLICATION_XIDS
from agents.node.gpus.nvml import open_nvml

pytestmark = pytest.mark.gpu

HOLDS_MEMORY = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(256 << 20)) == 0
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def gpus() -> GpuProvider:
    found = open_nvml()
    assert not isinstance(found, NoGpus), "there is a driver, but NVML does not answer"
    return found


def test_every_gpu_has_its_facts(gpus: GpuProvider) -> None:
    reported = gpus.gpus()
    assert reported, "there is a driver, but no GPU"
    for gpu in reported:
        assert gpu.uuid.startswith(("GPU-", "MIG-"))
        assert gpu.model.startswith("NVIDIA") or "Tesla" in gpu.model
        assert gpu.health == "ok", gpu.health_message
        assert gpu.memory_mib is not None and gpu.memory_mib > 1000
        assert gpu.driver_reserved_mib is None or 0 < gpu.driver_reserved_mib < gpu.memory_mib / 4
        assert gpu.compute_capability is not None and gpu.compute_capability >= 3.0
        assert gpu.bus_id is not None and Path("/sys/bus/pci/devices", gpu.bus_id[4:].lower()).exists()
        assert not gpu.fatal
    assert (
        gpus.driver_version()
        == subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )


def test_readings_agree_with_nvidia_smi(gpus: GpuProvider) -> None:
    asked = "uuid,memory.total,temperature.gpu,power.draw"
    text = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = {words[0]: words[1:] for words in (line.split(", ") for line in text.splitlines())}
    facts = {gpu.uuid: gpu for gpu in gpus.gpus()}
    for reading in gpus.sample({}):
        if reading.uuid not in rows:  # a slice
            continue
        total, celsius, watts = map(float, rows[reading.uuid])
        assert facts[reading.uuid].memory_mib == pytest.approx(total, abs=1)
        assert reading.temperature_c == pytest.approx(celsius, abs=5)
        assert reading.power_watts == pytest.approx(watts, rel=0.5, abs=30)
        assert reading.utilisation_percent is not None and 0 <= reading.utilisation_percent <= 100


def test_pairs_are_those_of_the_machine(gpus: GpuProvider) -> None:
    whole = [gpu.uuid for gpu in gpus.gpus() if gpu.mig_profile is None]
    links = gpus.links()
    assert len(links) == len(whole) * (len(whole) - 1) // 2
    for link in links:
        assert link.level is not None
        assert link.nvlinks is None or 0 <= link.nvlinks <= pynvml.NVML_NVLINK_MAX_LINKS


def test_events_can_be_waited_for(gpus: GpuProvider) -> None:
    events = pynvml.nvmlEventSetCreate()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
        if not supported & pynvml.nvmlEventTypeXidCriticalError:
            pytest.skip("this GPU tells no XIDs")
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        with pytest.raises(pynvml.NVMLError) as nothing:
            while pynvml.nvmlEventSetWait(events, 200).eventData in APPLICATION_XIDS:
                pass
        assert nothing.value.value == pynvml.NVML_ERROR_TIMEOUT
    finally:
        pynvml.nvmlEventSetFree(events)


def test_the_shipped_agent_sees_real_gpus_and_a_foreign_process(gpus: GpuProvider, tmp_path: Path) -> None:
    build_archive(tmp_path / "agent.pyz")
    own = {"cluster": "t", "state_dir": str(tmp_path / "state"), "home_root": str(tmp_path / "homes")}
    (tmp_path / "node.json").write_text(json.dumps({**own, "gpu_provider": "nvml"}))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with open_local(
            tmp_path / "agent.pyz",
            "watch",
            tmp_path / "node.json",
            cluster="t",
            python=sys._base_executable,  # as a node's Python, which has no packages
        ) as link:
            assert [gpu.uuid for gpu in link.hello.gpus] == [gpu.uuid for gpu in gpus.gpus()]
            assert link.hello.driver == gpus.driver_version()
            sample = link.request("stats", timeout_s=10, once=True)["sample"]
        rows = {row["pid"]: row for gpu in sample["gpus"] for row in gpu["processes"]}
        if holder.pid not in rows:
            pytest.skip("this container has process numbers of its own: NVML names those of its host")
        row = rows[holder.pid]
        assert row["foreign"] and row["memory_mib"] >= 256
        assert row["command"] == os.path.basename(sys.executable)
    finally:
        holder.kill()
        holder.wait()
