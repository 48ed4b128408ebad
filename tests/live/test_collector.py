"""The collector with real agents: samples reach a browser, logs grow, no node holds up another."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import socket
import threading
import time
from itertools import pairwise

import pytest
from channels.layers import get_channel_layer
from django.db import connections, transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.live.collector.collector import Collector
from portal.live.collector.node_stream import WatchError, open_stream
from portal.live_events import channel_group
from portal.models import Attempt, AttemptSeconds, Gpu, NodeMetricsMinute, Task
from portal.selectors.jobs.logs.files import log_path
from portal.selectors.jobs.logs.lines import log_file, read_lines
from portal.selectors.nodes.metric_series import read_job_series
from portal.services.lifecycle import job_control
from portal.valkey import sample_cache
from tests import factories
from tests.live.testbed import browser_of, control, local_node
from tests.time_budget import budget_s

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _folders(settings, tmp_path):
    settings.DATA_DIR = tmp_path / "data"
    settings.LOG_DIR = tmp_path / "logs"
    settings.DATA_DIR.mkdir()


@contextlib.contextmanager
def collecting(opener=open_stream):
    """A collector in a thread of its own, as the process runs it."""
    made = threading.Event()
    held = []

    def run():
        async def collect():
            held.append((Collector(opener), asyncio.get_running_loop()))
            made.set()
            await held[0][0].run()

        asyncio.run(collect())
        connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    made.wait(5)
    try:
        yield held[0][0]
    finally:
        held[0][1].call_soon_threadsafe(held[0][0].stop)
        thread.join(15)
        assert not thread.is_alive()


def until(met, within_s: float = 15.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = met()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def running_job(owner, node, *, command=("true",)):
    """A training job that is placed on a node, up to where its start goes out."""
    project = factories.project(member=owner)
    environment = factories.environment(runtime="process", tool=False)
    job = factories.job(owner, project, environment, command=list(command))
    gpu = Gpu.objects.filter(node=node).first()
    with transaction.atomic():
        attempt = job_control.start_attempt(
            job, node.pool, [job_control.RankPlacement(node, [(gpu.pk, 1000)])], epoch=1
        )
    task = Task.objects.get(attempt=attempt)
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    return job, task, gpu


def test_samples_reach_browsers_and_the_last_samples(testbed, tmp_path):
    node, person = local_node(tmp_path), factories.user()
    uuids = [gpu.uuid for gpu in node.gpus.all()]

    async def run():
        async with browser_of(testbed, person) as browser:
            await browser.say(subscribe=["cluster", f"node.{node.public_id}"])
            first = await browser.hear(topic="cluster", kind="backfill")
            assert first["data"]["gpus"] == {node.public_id: uuids}
            while True:
                reported = await browser.hear(10, topic="cluster", kind="sample")
                if node.public_id in reported["data"]["nodes"]:
                    break
            row = reported["data"]["nodes"][node.public_id]
            assert len(row["u"]) == len(row["m"]) == 2
            assert row["lag_s"] < 2.5
            begin = time.time()
            ticks = [await browser.hear(3, topic=f"node.{node.public_id}", kind="sample") for _ in range(4)]
            assert 2 < time.time() - begin < 5
            assert [gpu["uuid"] for gpu in ticks[0]["data"]["gpus"]] == uuids
            assert all(tick["data"]["lag_s"] < 2.5 for tick in ticks)
            assert abs(ticks[-1]["data"]["at_s"] - time.time()) < 1
            await browser.say(unsubscribe=[f"node.{node.public_id}"])

    with collecting():
        asyncio.run(run())
        frame = sample_cache.latest_frames([node.public_id])[node.public_id]
        assert {gpu["uuid"] for gpu in frame["gpus"]} == set(uuids)
    minutes = NodeMetricsMinute.objects.filter(node=node)
    assert sum(row.samples for row in minutes) >= 3  # a minute may have ended in between
    row = minutes.latest("minute")
    assert row.gpu_uuids == uuids
    assert all(value is not None for value in row.utilisation_percent)
    assert all(joules > 0 for joules in row.energy_joules)


def test_unwatched_samples_are_not_sent(testbed, tmp_path):
    node, person = local_node(tmp_path), factories.user()
    topic = f"node.{node.public_id}"

    async def run():
        layer = get_channel_layer()
        unmarked = await layer.new_channel()
        await layer.group_add(channel_group(topic), unmarked)
        async with browser_of(testbed, person) as browser:
            await browser.say(subscribe=["cluster"])
            while (
                node.public_id
                not in (await browser.hear(10, topic="cluster", kind="sample"))["data"]["nodes"]
            ):
                pass
            await browser.hear(3, topic="cluster", kind="sample")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await layer.receive(unmarked)
            await browser.say(subscribe=[topic])
            await browser.hear(3, topic=topic, kind="sample")
            async with asyncio.timeout(2):
                while (await layer.receive(unmarked)).get("text") is None:
                    pass  # the hub's proof that it has joined

    with collecting():
        asyncio.run(run())


@pytest.mark.skipif(os.geteuid() != 0, reason="the runtime process gives each job a uid of its own")
def test_logs_of_a_running_task_grow_in_the_browser(testbed, tmp_path):
    node, owner = local_node(tmp_path), factories.user()
    words = 'i=0; while [ $i -lt 60 ]; do echo "line $i"; i=$((i+1)); sleep 0.1; done'
    job, task, gpu = running_job(owner, node, command=["sh", "-c", words])
    spec = {
        "cluster": node.settings["cluster"],
        "job": job.public_id,
        "attempt": 1,
        "task": 0,
        "digest": "d",
        "runtime": "process",
        "command": job.command,
        "uid": owner.uid,
        "gid": owner.gid,
        "user": owner.username,
        "gpus": [{"uuid": gpu.uuid, "milli": 1000}],
        "ports": [],
        "mounts": [],
        "env": {},
        "secret_files": {},
        "termination_grace_s": 1,
    }

    async def run():
        async with browser_of(testbed, owner) as browser:
            await browser.say(subscribe=[f"logs.{job.public_id}.0", f"job.{job.public_id}"])
            lines = []
            while len(lines) < 20:
                reported = await browser.hear(15, kind="logs")
                lines += [line["text"] for line in reported["data"]["lines"]]
            first = int(lines[0].split()[1])  # what was written before the collector followed is read by REST
            assert lines[:20] == [f"line {number}" for number in range(first, first + 20)]
            while True:
                reported = await browser.hear(5, topic=f"job.{job.public_id}", kind="sample")
                used = reported["data"]["tasks"][0]
                if used["memory_mib"] is not None:
                    break
            assert used["rank"] == 0
            assert [each["uuid"] for each in used["gpus"]] == [gpu.uuid]
            assert used["gpus"][0]["utilisation_percent"] > 10

    with control(node, tmp_path) as link:
        link.request("start", timeout_s=20, epoch=1, spec=spec)
        try:
            with collecting():
                asyncio.run(run())
                until(lambda: Task.objects.get(pk=task.pk).log_bytes > 100)
                copy = log_path(job.public_id, 1, 0, "k8s")
                copy.unlink()  # as after a restore, while it runs on
                until(lambda: copy.exists() and b"line 0\n" in copy.read_bytes(), 20)
        finally:
            link.request(
                "stop", timeout_s=20, epoch=1, job=job.public_id, attempt=1, tombstone=True, grace_s=1
            )
    page = read_lines(log_file(job.public_id, 1, 0))
    assert page.lines[0].text == "line 0"


def test_an_unresponsive_node_delays_no_other(tmp_path):
    """One node accepts and says nothing, one refuses, one breaks off: the fourth ticks on."""
    good = local_node(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, port in [("hole", silent.getsockname()[1]), ("shut", 9)]:
            factories.node(
                good.pool,
                name=name,
                transport="ssh",
                host="127.0.0.1",
                port=port,
                host_key="ssh-ed25519 AAAA",
            )
        (tmp_path / "key").write_text("")
        opened = []

        def opener(node, on_event):
            opened.append(node.name)
            if node.name == "hole":
                time.sleep(8)
                raise WatchError("nothing was said")
            if node.name == "shut":
                raise WatchError("nobody listens")
            return open_stream(node, on_event)

        with collecting(opener) as collector:
            until(lambda: sample_cache.latest_frames([good.public_id]))
            began = time.monotonic()
            seen = set()
            while len(seen) < 4:
                seen |= {each["at_s"] for each in sample_cache.latest_frames([good.public_id]).values()}
                time.sleep(0.1)
                assert time.monotonic() - began < budget_s(6)
            assert collector.last_tick_s < budget_s(0.2)
    assert {"hole", "shut"} <= set(opened)


def test_a_broken_stream_reconnects(tmp_path):
    node = local_node(tmp_path)
    links = []

    def opener(watched, on_event):
        links.append(open_stream(watched, on_event))
        return links[-1]

    with collecting(opener):
        until(lambda: sample_cache.latest_frames([node.public_id]))
        os.kill(links[0].process_id, 9)
        until(lambda: len(links) == 2 and links[1].is_open)
        node.state = "retired"
        node.save()
        until(lambda: not links[1].is_open)


def test_a_short_run_has_a_point_for_each_second(testbed, tmp_path):
    node, person = local_node(tmp_path), factories.user()
    job, task, gpu = running_job(person, node)
    with collecting():
        until(lambda: len(sample_cache.attempt_seconds(job.public_id, 1)) > 3)
        job.refresh_from_db()
        growing = read_job_series(person, job)
        job_control.record_task_ended(task.pk, exit_code=0, reason=EndReason.EXIT_CODE)
        until(AttemptSeconds.objects.filter(attempt=task.attempt).exists)
    assert len(growing.times_s) > 3
    job.refresh_from_db()
    series = read_job_series(person, job)
    assert series.times_s[: len(growing.times_s)] == growing.times_s
    assert {b - a for a, b in pairwise(series.times_s)} == {1}
    (line,) = [each for each in series.gpus if each.uuid == gpu.uuid]
    assert len(line.utilisation_percent) == len(series.times_s) and None not in line.utilisation_percent[:3]
    Attempt.objects.update(running_at=timezone.now() - dt.timedelta(hours=1))
    assert len(read_job_series(person, job).times_s) < 3  # a longer run is drawn by minute
