"""A file that a launcher's command writes, offered as an artifact in MLflow when the command ends.

The script uses the MLflow API that every job of Fairway finds in its environment, and nothing but Python's library.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import LaunchFile
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

_SCRIPT_FILE = "with_artifact.py"

SCRIPT = r'''"""Runs a command, then logs a file that it wrote: with_artifact.py FILE COMMAND..."""
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request

LIMIT_S, UPLOAD_LIMIT_S = 10, 90
path, command = sys.argv[1], sys.argv[2:]
address, token = os.environ.get("MLFLOW_TRACKING_URI"), os.environ.get("MLFLOW_TRACKING_TOKEN")


def call(method, name, data=None):
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/octet-stream"}
    if isinstance(data, dict):
        data, headers["Content-Type"] = json.dumps(data).encode(), "application/json"
    elif data is not None:
        headers["Content-Length"] = str(os.fstat(data.fileno()).st_size)
    limit_s = UPLOAD_LIMIT_S if method == "PUT" else LIMIT_S
    request = urllib.request.Request(address + "/api/2.0/" + name, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        return json.loads(answer.read() or b"{}")


def job_run():
    """Return the newest run of this job, or a new one."""
    listed = call("GET", "mlflow/experiments/search?max_results=1000").get("experiments", [])
    known = {each["name"]: each["experiment_id"] for each in listed}
    order = {"experiment_ids": list(known.values()), "max_results": 1}
    order["filter"] = "tags.`fairway.job` = '%s'" % os.environ["FAIRWAY_JOB"]
    found = call("POST", "mlflow/runs/search", order).get("runs") if known else None
    if found:
        return found[0]["info"]
    name = os.environ["MLFLOW_EXPERIMENT_NAME"]
    experiment = known.get(name) or call("POST", "mlflow/experiments/create", {"name": name})["experiment_id"]
    now = {"run_name": os.path.basename(path), "start_time": int(time.time() * 1000)}
    run = call("POST", "mlflow/runs/create", {"experiment_id": experiment, **now})["run"]["info"]
    ended = {"run_id": run["run_id"], "status": "FINISHED", "end_time": now["start_time"]}
    return call("POST", "mlflow/runs/update", ended)["run_info"]


def log_artifact(file):
    """Log to a run of the job, and return the name of the run."""
    run = job_run()
    folder = urllib.parse.urlsplit(run["artifact_uri"]).path.strip("/")
    name = "attempt-%s/%s" % (os.environ["FAIRWAY_ATTEMPT"], os.path.basename(path))
    call("PUT", "mlflow-artifacts/artifacts/" + urllib.parse.quote(folder + "/" + name), file)
    return run["run_name"]


def written_ns():
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


before_ns = written_ns()  # a file of an earlier attempt is not logged again
child = subprocess.Popen(command)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: child.send_signal(number))
status = child.wait()
if token:
    try:
        if written_ns() == before_ns:
            raise OSError("the command has not written it")
        with open(path, "rb") as file:
            print("fairway: %s is a file of the run %s." % (path, log_artifact(file)), flush=True)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        print("fairway: %s is not in MLflow: %s" % (path, error), file=sys.stderr, flush=True)
sys.exit(status if status >= 0 else 128 - status)
'''


def with_artifact(path: str, command: Sequence[str]) -> tuple[list[str], dict[str, LaunchFile]]:
    """Return the command that also logs the file at ``path``, and the file that it needs."""
    script = f"{SECRETS_PLACEHOLDER}/{_SCRIPT_FILE}"
    return ["python3", script, path, *command], {_SCRIPT_FILE: LaunchFile(SCRIPT)}
