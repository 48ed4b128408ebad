"""The thread pool of a node's work: nothing is done twice because a read was older than the work's end."""

from __future__ import annotations

import queue
import threading
import time

from scheduler.nodes.node_queue import KeyedPool


def test_work_read_before_the_same_work_ended_does_not_start_again() -> None:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    reads: queue.SimpleQueue[None] = queue.SimpleQueue()
    pool = KeyedPool("test", lambda error: done.put(repr(error)), lambda: reads.put(None))
    proceed = threading.Event()

    def work() -> None:
        proceed.wait(20)
        done.put("done")

    read_s = time.monotonic()
    pool.submit("terminal", work, read_s)
    pool.submit("terminal", work, time.monotonic())  # it is running
    stale_s = time.monotonic()
    proceed.set()
    assert done.get(timeout=20) == "done" and reads.get(timeout=20) is None
    pool.submit("terminal", work, stale_s)
    pool.submit("another", work, stale_s)
    assert done.get(timeout=20) == "done" and reads.get(timeout=20) is None
    pool.submit("terminal", work, time.monotonic())
    assert done.get(timeout=20) == "done" and reads.get(timeout=20) is None
    pool.shut_down()
    assert done.empty()
