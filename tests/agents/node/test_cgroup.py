"""Control groups of tasks where the machine does not let us make any, as inside most containers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rig

READ_ONLY = """
for each in $(awk '$3 ~ /^cgroup/ { print $2 }' /proc/mounts); do mount -o remount,bind,ro "$each"; done
exec "$@"
"""
ASK = """
from agents.node.host import cgroup
print(cgroup.create("fw-none-1-0", memory_mib=64, pids=8, cpu_milli=1000), cgroup.find("fw-none-1-0"))
"""


def test_read_only_cgroups_count_as_none() -> None:
    words = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", sys.executable, "-c", ASK]
    root = Path(__file__).parents[3]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["None", "None"], done.stderr
