"""Operator for Apache Airflow 3, ``fairway.airflow.FairwayOperator``. The other modules need no Airflow."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from airflow.sdk import BaseHook, BaseOperator
from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from .api import Fairway, Job

LOG_TAIL = 100


def connect(connection: str) -> Fairway:
    """Return the server of a connection: its host is the address of the portal, its password a token.

    A blank connection is FAIRWAY_URL and FAIRWAY_TOKEN.
    """
    found = BaseHook.get_connection(connection) if connection else None
    return Fairway(found.host, found.password) if found else Fairway()


class FairwayOperator(BaseOperator):
    """Submit a job, wait for its end, and fail unless it completes.

    - ``fields``: the body of ``POST /api/v1/jobs/``. Its values are templates of Airflow.
    - ``connection``: id of a connection of Airflow; blank: the variables of the worker.
    - ``deferrable``: wait in the triggerer instead of a worker.
    - ``poll_s``: time between two looks at the job.

    Each run of the task has a job: an attempt that follows a lost worker waits for the job of the one before, and
    only if that job did not succeed is another one submitted. Killing the task stops the job. XCom has its id.
    """

    template_fields: Sequence[str] = ("fields",)
    ui_color = "#dbe4ff"

    def __init__(
        self,
        *,
        fields: Mapping[str, Any],
        connection: str = "fairway_default",
        deferrable: bool = False,
        poll_s: float = 10.0,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.fields = fields
        self.connection, self.deferrable, self.poll_s = connection, deferrable, poll_s
        self._job: Job | None = None

    def execute(self, context: Any) -> str:
        server, task = connect(self.connection), context["ti"]
        run = "/".join(map(str, (task.dag_id, task.run_id, task.task_id, task.map_index)))
        for number in range(1, max(1, task.try_number) + 1):
            # a key that was used returns the job of that attempt
            key = f"airflow-{hashlib.sha256(f'{run}/{number}'.encode()).hexdigest()[:40]}"
            self._job = job = server.submit(idempotency_key=key, **self.fields).refresh()
            if not job.has_ended or job.state == "COMPLETED":
                break
        self.log.info("Job %s: %s", job.id, job.url)
        if self.deferrable and not job.has_ended:
            trigger = FairwayTrigger(job=job.id, connection=self.connection, poll_s=self.poll_s)
            self.defer(trigger=trigger, method_name="complete")
        while not job.has_ended:
            time.sleep(self.poll_s)
            job.refresh()
        return self._end(job)

    def complete(self, context: Any, event: Mapping[str, Any]) -> str:
        """Continue after the trigger."""
        return self._end(connect(self.connection).job(str(event["job"])))

    def on_kill(self) -> None:
        if self._job is not None:
            self._job.stop()

    def _end(self, job: Job) -> str:
        for piece in job.logs(tail=LOG_TAIL) if job.data["attempt_count"] else ():
            self.log.info("%s", piece)
        if job.state != "COMPLETED":
            raise AirflowException(f"Job {job.id} ended as {job.state}: {job.data['message']} See {job.url}")
        return job.id


class FairwayTrigger(BaseTrigger):
    """Wait for the end of a job."""

    def __init__(self, *, job: str, connection: str, poll_s: float) -> None:
        super().__init__()
        self.job, self.connection, self.poll_s = job, connection, poll_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "fairway.airflow.FairwayTrigger",
            {"job": self.job, "connection": self.connection, "poll_s": self.poll_s},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        server = await asyncio.to_thread(connect, self.connection)
        while not (job := await asyncio.to_thread(server.job, self.job)).has_ended:
            await asyncio.sleep(self.poll_s)
        yield TriggerEvent({"job": job.id})

    async def on_kill(self) -> None:
        server = await asyncio.to_thread(connect, self.connection)
        await asyncio.to_thread(lambda: server.job(self.job).stop())
