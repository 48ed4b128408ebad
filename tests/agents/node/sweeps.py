"""Kills an agent between any two steps of start and stop; a repeat heals, and at most one task ever ran."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from agents.link import AgentError, Link, OutcomeUnknownError
from tests.agents.node.conftest import GPUS, LoneNode

CRASHING = Path(__file__).with_name("crashing_agent.py")
MOST_STEPS = 160


def crash(node: LoneNode, verb: str, at: int, **fields: Any) -> bool:
    """Asks an agent that dies at a step; False when it had no such step and answered."""
    environment = {"CRASH_PYZ": str(node.pyz), "CRASH_AT": str(at), "CRASH_VERB": verb}
    link = node.open(pyz=CRASHING, environment=environment)
    try:
        link.request(verb, timeout_s=30, epoch=1, **fields)
        return False
    except OutcomeUnknownError:
        return True
    finally:
        link.close()


def marking(node: LoneNode, job: str, runtime: str) -> dict[str, Any]:
    """A task that leaves a line in its home each time it runs."""
    more: dict[str, Any] = {"runtime": runtime}
    if runtime == "podman":
        more["image"] = node.image  # type: ignore[attr-defined]
    return node.spec(
        job,
        "sh",
        "-c",
        "echo ran >> ~/ran; sleep 600",
        gpus=[{"uuid": GPUS[0], "milli": 1000}],
        mounts=[{"kind": "home", "source": job, "target": "/home/ada"}],
        secret_files={"token": "x"},
        ports=[8888],
        **more,
    )


def times_run(node: LoneNode, job: str) -> int:
    path = node.folder / "homes" / job / "ran"
    return len(path.read_text().splitlines()) if path.exists() else 0


def end(link: Link, job: str) -> None:
    assert link.request("stop", timeout_s=30, epoch=1, job=job, attempt=1, grace_s=0)["gone"] is True
    link.request("remove", timeout_s=30, epoch=1, job=job, attempt=1)


def sweep_start(node: LoneNode, runtime: str, stride: int, *, spare: bool = False) -> int:
    points = 0
    for at in range(1, MOST_STEPS, stride):
        job = f"js{at}"
        spec = marking(node, job, runtime)
        if spare:
            with node.open():
                node.wait_for_spare()
        if not crash(node, "start", at, spec=spec):
            with node.open() as link:
                end(link, job)
            break
        points += 1
        with node.open() as link:
            rows = link.request("list", timeout_s=30)["containers"]
            assert len([row for row in rows if row["job"] == job]) <= 1
            assert link.request("start", timeout_s=30, epoch=1, spec=spec)["state"] == "running"
            end(link, job)
            assert times_run(node, job) <= 1
            assert node.ledger()["tasks"] == {}
    else:
        raise AssertionError("the sweep did not reach the end of a start")
    return points


def sweep_abandoned_start(node: LoneNode, runtime: str, stride: int) -> None:
    """A crashed start that is never repeated, but stopped: nothing runs afterwards and the GPU is free."""
    for at in range(1, MOST_STEPS, stride):
        job = f"ja{at}"
        spec = marking(node, job, runtime)
        crashed = crash(node, "start", at, spec=spec)
        with node.open() as link:
            end(link, job)
            after = marking(node, f"jb{at}", runtime)
            assert link.request("start", timeout_s=30, epoch=1, spec=after)["state"] == "running"
            end(link, f"jb{at}")
        if not crashed:
            break


def sweep_stop(node: LoneNode, runtime: str, stride: int) -> int:
    points = 0
    for at in range(1, MOST_STEPS, stride):
        job = f"jt{at}"
        with node.open() as link:
            link.request("start", timeout_s=30, epoch=1, spec=marking(node, job, runtime))
        crashed = crash(node, "stop", at, job=job, attempt=1, grace_s=0)
        with node.open() as link:
            end(link, job)
            assert link.request("list", timeout_s=30)["containers"] == []
        if not crashed:
            break
        points += 1
    return points


def crash_while_making_a_spare(node: LoneNode, at: int) -> bool:
    """Opens an agent that dies at a step of making a network ahead; False when it had no such step."""
    environment = {"CRASH_PYZ": str(node.pyz), "CRASH_AT": str(at), "CRASH_VERB": "refill"}
    with node.open(pyz=CRASHING, environment=environment) as link:
        deadline_s = time.monotonic() + 10
        while link.is_open and time.monotonic() < deadline_s:
            if any(spare["ready"] for spare in node.ledger().get("network_pool", {}).values()):
                time.sleep(0.3)  # it may yet die on its way back
                return not link.is_open
            time.sleep(0.02)
        assert not link.is_open, "it neither died nor made a network"
        return True


def sweep_spare(node: LoneNode, stride: int) -> int:
    """Whatever was promised, made or noted: the next session has one spare ready, and nothing else is left."""
    for points, at in enumerate(range(1, MOST_STEPS, stride)):
        crashed = crash_while_making_a_spare(node, at)
        with node.open() as link:
            spare = node.wait_for_spare()
            assert set(node.ledger()["network_pool"]) == {spare} == node.networks()
            job = f"jq{at}"
            assert link.request("start", timeout_s=30, epoch=1, spec=marking(node, job, "podman"))
            assert spare not in node.ledger()["network_pool"]
            end(link, job)
            assert node.networks() <= set(node.ledger()["network_pool"])
        if not crashed:
            return points
        for name in node.networks():  # so that the next one has a spare to make
            node.podman("network", "rm", name)  # type: ignore[attr-defined]
        (node.folder / "state/ledger.json").write_text(json.dumps({**node.ledger(), "network_pool": {}}))
    raise AssertionError("the sweep did not reach the end")


def sweep_full_disk(node: LoneNode, runtime: str, stride: int) -> int:
    """The disk fills at a step of a start: either it is refused and nothing runs, or it runs and is known."""
    for refused, at in enumerate(range(1, MOST_STEPS, stride)):
        job = f"jf{at}"
        spec = marking(node, job, runtime)
        environment = {"CRASH_PYZ": str(node.pyz), "CRASH_AT": str(at), "CRASH_VERB": "start"}
        with node.open(pyz=CRASHING, environment=environment | {"CRASH_KIND": "disk_full_message"}) as link:
            try:
                refusal, _ = None, link.request("start", timeout_s=30, epoch=1, spec=spec)
            except (AgentError, OutcomeUnknownError) as error:
                refusal = error
        with node.open() as link:
            rows = link.request("list", timeout_s=30)["containers"]
            running = [row for row in rows if row["job"] == job and row["state"] == "running"]
            assert len(running) == (refusal is None), (at, refusal)
            end(link, job)
        if refusal is None:
            return refused
        assert isinstance(refusal, AgentError) and refusal.code == "disk_full", (at, refusal)
    raise AssertionError("the sweep did not reach the end of a start")
