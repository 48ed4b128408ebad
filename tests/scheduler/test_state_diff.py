"""Record against node, as a table: each row is one thing that can have happened to one task."""

from __future__ import annotations

import pytest

from agents.engines.replies import Container, TaskKey
from portal.domain.states import AttemptState
from scheduler.nodes.state_diff import StoredTask, diff_state

KEY = TaskKey("j1", 1, 0)
C, R, E = AttemptState.CONFIGURING, AttemptState.RUNNING, AttemptState.COMPLETED


def task(
    state: AttemptState, *, gone: bool = False, stop: bool = False, leave: bool = False, others: bool = False
) -> StoredTask:
    return StoredTask(
        7,
        KEY,
        state,
        gone=gone,
        sent=True,
        stop_requested=stop,
        eviction_requested=leave,
        attempt_continues=others,
    )


def there(state: str) -> Container:
    return Container(KEY, "fw-c-j1-1-0", "d", state, exit_code=0 if state == "exited" else None)


@pytest.mark.parametrize(
    ("recorded", "container", "does"),
    [
        (None, None, {}),
        (task(C), None, {}),  # not started yet: dispatch starts it
        (task(C), there("created"), {}),  # a start broke off: the agent or the next start goes on
        (task(C), there("running"), {"adopt": 1}),  # started, and the answer was lost
        (task(C), there("exited"), {"finish": 1}),  # came and went unseen
        (task(C, stop=True), None, {"stop": {("j1", 1)}}),  # cancel: the tombstone still has to be written
        (task(C, stop=True), there("running"), {"adopt": 1, "stop": {("j1", 1)}}),
        (task(C, stop=True), there("created"), {"stop": {("j1", 1)}}),
        (task(R), there("running"), {}),
        (task(R), there("exited"), {"finish": 1}),
        (task(R), None, {"lost": 1}),
        (task(R, stop=True), there("running"), {"stop": {("j1", 1)}}),
        (task(R, stop=True), there("exited"), {"finish": 1}),
        (task(R, stop=True), None, {"stop": {("j1", 1)}}),
        (task(E, gone=True), there("running"), {"stop": {("j1", 1)}}),  # it must not live
        (task(E, gone=True), there("exited"), {"collect": 1}),
        (task(E, gone=True), None, {}),
        (task(R, leave=True), there("running"), {"evict": 1}),  # one of an elastic job, while others go on
        (task(R, leave=True), there("exited"), {"finish": 1}),
        (task(R, leave=True), None, {"evict": 1}),
        (task(C, leave=True), None, {"evict": 1}),  # its tombstone still has to be written
        (task(C, leave=True), there("created"), {"evict": 1}),
        (task(R, leave=True, stop=True), there("running"), {"stop": {("j1", 1)}}),
        (task(E, gone=True, others=True), there("running"), {"evict": 1}),  # it alone must not live
        (task(E, gone=True, others=True), there("exited"), {"collect": 1}),
        (None, there("running"), {"orphans": 1}),
        (None, there("created"), {"orphans": 1}),
        (None, there("exited"), {"collect": 1}),
    ],
)
def test_every_case_has_one_answer(recorded, container, does) -> None:
    found = diff_state({KEY: recorded} if recorded else {}, [container] if container else [])
    reported = {
        name: value if isinstance(value, set) else len(value) for name, value in vars(found).items() if value
    }
    assert reported == does
