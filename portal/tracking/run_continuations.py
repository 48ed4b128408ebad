"""Continues the run of a job when a later attempt begins one, so that a training has one run with the whole curve.

Only the portal sends these requests, for the token of a job; ``portal.tracking.endpoints`` does not offer the path to
scripts. They are answered here, because MLflow's own requests cannot claim a run for one of several ranks.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from portal.domain.experiments.tracking import (
    ATTEMPT_TAG,
    CONTINUE_ENDPOINT,
    FIRST_NAME_TAG,
    JOB_TAG,
    MAX_PARAM_LENGTH,
    REPLACE_PARAMS_HEADER,
)

_PATH = f"/api/2.0/mlflow/{CONTINUE_ENDPOINT}"
_PARAM_PATHS = {"/api/2.0/mlflow/runs/log-batch", "/api/2.0/mlflow/runs/log-parameter"}
_REPLACE_VARIABLE = "HTTP_" + REPLACE_PARAMS_HEADER.upper().replace("-", "_")
MAX_RUNS = 1000
"""Of a job that are considered, the newest."""
_TIME = re.compile(r"\d{4}-?\d\d-?\d\d([T_ -]?\d\d[:_-]?\d\d([:_-]?\d\d)?)?|\d{10,}")
"""A time in the name of a run, which is another one in the next attempt."""
_LOCK = "SELECT pg_advisory_xact_lock(hashtext(%s))"
_RUNS = """
SELECT run.run_uuid, coalesce(first_name.value, run.name), run.status, run.start_time, attempt.value
FROM runs AS run
JOIN experiments AS experiment USING (experiment_id)
JOIN tags AS job ON job.run_uuid = run.run_uuid AND job.key = %(job_tag)s AND job.value = %(job)s
LEFT JOIN tags AS attempt ON attempt.run_uuid = run.run_uuid AND attempt.key = %(attempt_tag)s
LEFT JOIN tags AS first_name ON first_name.run_uuid = run.run_uuid AND first_name.key = %(first_name_tag)s
LEFT JOIN tags AS parent ON parent.run_uuid = run.run_uuid AND parent.key = 'mlflow.parentRunId'
WHERE experiment.workspace = %(workspace)s AND run.experiment_id = %(experiment)s
    AND experiment.lifecycle_stage = 'active' AND run.lifecycle_stage = 'active'
    AND coalesce(parent.value, '') = %(parent)s
ORDER BY run.start_time DESC, run.run_uuid DESC
LIMIT %(limit)s
"""
_REOPEN = "UPDATE runs SET status = 'RUNNING', end_time = NULL WHERE run_uuid = %s"
_CLAIM = """
INSERT INTO tags (run_uuid, key, value) VALUES (%s, %s, %s)
ON CONFLICT (key, run_uuid) DO UPDATE SET value = excluded.value
"""
_REPLACE = """
UPDATE params SET value = given.value
FROM unnest(%s::text[], %s::text[]) AS given (key, value), runs JOIN experiments USING (experiment_id), tags AS job
WHERE runs.run_uuid = %s AND experiments.workspace = %s AND runs.lifecycle_stage = 'active'
    AND job.run_uuid = runs.run_uuid AND job.key = %s AND job.value = %s
    AND params.run_uuid = runs.run_uuid AND params.key = given.key AND params.value <> given.value
"""


class EarlierRun(NamedTuple):
    """A run of the job. ``name`` is that with which it was created, ``attempt`` None if no record says which."""

    id: str
    name: str
    status: str
    started_ms: int
    attempt: int | None


class RunContinuations:
    """WSGI middleware in front of MLflow's application; ``engine`` is its SQLAlchemy engine."""

    def __init__(self, application: WSGIApplication, engine: Any) -> None:
        self._application, self._engine = application, engine

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        workspace = environ.get("HTTP_X_MLFLOW_WORKSPACE", "")
        if environ["PATH_INFO"] == _PATH and environ["REQUEST_METHOD"] == "POST":
            run = self._continue(workspace, json.loads(environ["wsgi.input"].read()))
            answer = json.dumps({"run_id": run} if run else {}).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(answer)))]
            start_response("200 OK", headers)
            return [answer]
        if environ["PATH_INFO"] in _PARAM_PATHS and (job := environ.get(_REPLACE_VARIABLE)):
            body = environ["wsgi.input"].read()
            self._replace(workspace, job, json.loads(body))
            environ["wsgi.input"] = io.BytesIO(body)
        return self._application(environ, start_response)

    def _continue(self, workspace: str, given: dict[str, Any]) -> str:
        """Claim the run that this attempt continues, and return its id; "" if it has to begin a new one."""
        names = {
            "workspace": workspace,
            "job_tag": JOB_TAG,
            "attempt_tag": ATTEMPT_TAG,
            "first_name_tag": FIRST_NAME_TAG,
            "limit": MAX_RUNS,
        }
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute(_LOCK, [f"{JOB_TAG} {given['job']}"])  # ranks begin their runs at the same time
            cursor.execute(_RUNS, {**given, **names})
            runs = [
                EarlierRun(run, name or "", status, started_ms or 0, int(attempt) if attempt else None)
                for run, name, status, started_ms, attempt in cursor.fetchall()
            ]
            chosen = choose_run(runs, given["name"], given["attempt"], given["started_ms"])
            if chosen is not None:
                cursor.execute(_REOPEN, [chosen.id])
                cursor.execute(_CLAIM, [chosen.id, ATTEMPT_TAG, str(given["attempt"])])
            connection.commit()
            return chosen.id if chosen else ""
        finally:
            connection.close()  # back to the pool, rolled back unless committed

    def _replace(self, workspace: str, job: str, given: dict[str, Any]) -> None:
        """Let a later attempt replace parameters of the run that it continues, which MLflow refuses."""
        rows = given.get("params") or ([given] if "key" in given else [])
        plain = {
            row["key"]: row["value"]
            for row in rows
            if isinstance(row.get("key"), str)
            and isinstance(row.get("value"), str)
            and len(row["value"]) <= MAX_PARAM_LENGTH
        }
        if not plain:
            return
        run = given.get("run_id") or given.get("run_uuid")
        connection = self._engine.raw_connection()
        try:
            columns = [list(plain), list(plain.values())]
            connection.cursor().execute(_REPLACE, [*columns, str(run), workspace, JOB_TAG, job])
            connection.commit()
        finally:
            connection.close()


def choose_run(runs: Sequence[EarlierRun], name: str, attempt: int, started_ms: int) -> EarlierRun | None:
    """Return the run of earlier attempts that the attempt continues with a run of this name, or None.

    ``runs`` are those of the job with the same experiment and parent, newest first; ``started_ms`` is when the
    attempt began. Runs that have not finished are continued in their order. A finished one only if it is the newest:
    an exception ends the run of a program, too, while a program that trains several models has finished the others.
    """
    open_ones = [
        run
        for index, run in enumerate(runs)
        if (run.attempt < attempt if run.attempt is not None else run.started_ms < started_ms)
        and (run.status != "FINISHED" or index == 0)
    ]
    in_order = open_ones[::-1]
    same = [run for run in in_order if run.name == name]
    similar = [run for run in in_order if _TIME.sub("", run.name) == _TIME.sub("", name)]
    return next(iter(same or similar), None)
