"""The first rows of a new cluster, as options of ``manage.py up`` ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest

from agents.node.gpus.nvml import open_nvml
from portal.errors import ServiceUnavailable
from portal.models import Node
from portal.services.cluster import initial_data
from portal.services.cluster.initial_data import SIMULATED_GPUS, ensure_initial_data


def no_download(data_dir: Path) -> NoReturn:
    raise ServiceUnavailable("no network")


@pytest.mark.skipif(bool(open_nvml().gpus()), reason="this machine has GPUs, so none is simulated")
@pytest.mark.parametrize("simulated_gpus", [True, False])
def test_gpus_of_this_machine_are_simulated_unless_disabled(
    db, settings, tmp_path, monkeypatch, simulated_gpus: bool
) -> None:
    settings.DATA_DIR, settings.KEY_DIR = tmp_path, tmp_path / "keys"
    monkeypatch.setattr(initial_data, "ensure_process_jupyterlab", no_download)
    assert ensure_initial_data(local_node=True, simulated_gpus=simulated_gpus, demo=False)
    provider = Node.objects.get().settings["gpu_provider"]
    if simulated_gpus:
        assert len(json.loads(Path(provider.removeprefix("file:")).read_text())["gpus"]) == SIMULATED_GPUS
    else:
        assert provider == "none"
