"""Two nodes with real agents and processes on this machine, for jobs whose tasks stand on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agents.engines.node_engine import NodeEngine
from agents.verbs import Verb
from portal.domain.states import JobState
from portal.models import Job
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive


def agents_without(monkeypatch: pytest.MonkeyPatch, feature: Verb | str) -> None:
    """Let nodes appear to have agents without this verb or capability."""
    supports = NodeEngine.supports
    monkeypatch.setattr(
        NodeEngine, "supports", lambda engine, asked: asked != feature and supports(engine, asked)
    )


class TwoLocalNodes:
    """Two nodes of one GPU each in a pool, a project with a member and a manager, and a folder for words."""

    def __init__(self, harness: EngineHarness, name: str, command: str) -> None:
        """``command`` is the script that jobs run unless told otherwise, with ``{folder}`` for that folder."""
        self.harness, self.engine = harness, InProcessEngine()
        self.folder = harness.folder / f"word-{name}"
        self.folder.mkdir(mode=0o777)
        self.folder.chmod(0o777)
        self.command = command.replace("{folder}", str(self.folder))
        self.owner, self.manager = factories.user("ada"), factories.user("cem")
        self.project = factories.project(member=self.owner, manager=self.manager)
        self.environment = factories.environment(runtime="process", tool=False)
        self.pool = factories.pool()
        self.names = [f"{name}{number}" for number in (1, 2)]
        self.nodes = [
            harness.mark_enrolled(harness.create_node(pool=self.pool, gpus=1, name=each), gpus=1)
            for each in self.names
        ]

    def submit(self, who: str = "owner", command: str | None = None, **fields: Any) -> Job:
        words = ["sh", "-c", command or self.command]
        fields = {"memory_mib": 64, "termination_grace_s": 1, **fields}
        return factories.job(getattr(self, who), self.project, self.environment, command=words, **fields)

    def reach(self, job: Job, look: Callable[[], bool], within_s: float = 30.0) -> None:
        assert self.engine.run_until(look, within_s), self.story(job)

    def story(self, job: Job) -> str:
        """What befell a job so far, and what its ranks have said."""
        events = [f"{e.kind} {e.before}>{e.after} {e.reason} {e.message}" for e in job.events.all()]
        problems = [
            f"{task} {task.state} {task.status_message}"
            for each in job.attempts.all()
            for task in each.task_rows.all()
        ]
        said = [
            f"{path.parent.name}: {path.read_text()}"
            for path in self.harness.folder.glob("*/state/tasks/*/log*")
        ]
        return "\n".join([*events, *problems, *said])

    def run(self, job: Job) -> dict[int, str]:
        """The tasks that run by the record, with their nodes."""
        job.refresh_from_db()
        rows = job.attempts.order_by("number").last()
        tasks = (
            rows.task_rows.filter(container_removed=False, state="RUNNING").select_related("node")
            if rows
            else ()
        )
        return {task.rank: task.node.name for task in tasks}

    def alive(self) -> list[str]:
        """The containers that live on both nodes."""
        return sorted(name for each in self.names for name in containers_alive(self.harness.folder / each))

    def ended(self, job: Job, state: JobState = JobState.COMPLETED) -> Callable[[], bool]:
        def look() -> bool:
            job.refresh_from_db()
            return job.state == state

        return look
