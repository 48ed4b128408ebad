"""A stand-in for the agent that says hello and repeats requests, for tests of the links themselves."""

from __future__ import annotations

import io
import zipfile

_MAIN = """
import json, os, platform, sys, time

role = sys.argv[1]
first = json.loads(sys.stdin.readline())
allowed = {"control": ("control", "bulk"), "watch": ("watch",)}[role]
if first["role"] not in allowed:
    print(json.dumps({"ok": False, "code": "forbidden", "message": "This key may not do that."}), flush=True)
    sys.exit(0)
settings = json.load(open(sys.argv[3]))
try:
    boot_id = open(settings.get("boot_id_path", "/proc/sys/kernel/random/boot_id")).read().strip()
except OSError:
    boot_id = ""
print(json.dumps({"hello": {
    "protocol": 1, "agent_version": "echo", "boot_id": boot_id, "hostname": platform.node(),
    "python": platform.python_version(), "clock_s": time.time(), "cpu_count": os.cpu_count(), "memory_mib": 1024,
    "disk_free_mib": 1024, "runtimes": [], "gpus": [], "driver": None, "version_warnings": [], "images": [],
    "highest_epoch": 0, "uid": os.getuid(), "role": role}}), flush=True)
sys.stderr.write("echo agent is ready\\n")
sys.stderr.flush()
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"id": request["id"], "ok": True, "echo": request}), flush=True)
"""


def echo_agent() -> bytes:
    """Gives the program as a .pyz."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("__main__.py", _MAIN)
    return packed.getvalue()
