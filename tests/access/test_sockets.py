"""Every topic of the live socket and every way through the gateway x everybody: who may watch, and who gets in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from portal.access import Permission, can
from portal.domain.states import Role
from portal.errors import FairwayError, NotFound
from portal.gateway.access.authorization import AccessRefusal, Target, decide_access
from portal.gateway.apps.terminal_app import decide_terminal_access
from portal.live.websocket.consumer import WEBSOCKET_ROUTES
from portal.live.websocket.topics import check_topic_access, initial_frame, parse_topic
from portal.models import Job, Terminal, User
from portal.services.accounts.sessions import session_id, session_user
from portal.services.accounts.users import do_change_user
from portal.services.lifecycle import job_control, readiness
from portal.services.projects.projects import do_remove_member, do_set_member
from portal.services.workspaces.access import do_open_workspace, do_redeem_ticket
from portal.services.workspaces.terminals import do_open_terminal
from tests.api.fixture_data import ACTORS, FixtureData
from tests.api.table import ADMIN, EVERYBODY, INSIDE, NOBODY, OUTSIDE, OWNER
from tests.gateway.gateway_harness import sign_in

TOPICS = {
    "cluster": EVERYBODY,
    "user.me": EVERYBODY,
    "user.{member}": OWNER,
    "inbox.me": EVERYBODY,
    "inbox.{member}": OWNER,
    "node.{node}": EVERYBODY,
    "job.{running}": INSIDE,
    "project.{project}": INSIDE,
    "logs.{running}.1": INSIDE,
    "logs.{running_workspace}.0": OWNER | ADMIN,
}


def test_the_table_names_every_socket() -> None:
    assert [consumer.__name__ for consumer in WEBSOCKET_ROUTES.values()] == ["LiveConsumer"]


@pytest.mark.parametrize("name", TOPICS)
def test_who_may_watch(name: str, fixture_data: FixtureData) -> None:
    for actor in ACTORS:
        user = fixture_data.people[actor]
        names = fixture_data.names_of(actor) | {"member": fixture_data.people["member"].public_id}
        if actor in NOBODY:
            assert session_user(session_id(sign_in(user))) is None
            continue
        code = "allowed"
        try:
            topic = parse_topic(name.format(**names), user)
            check_topic_access(user, topic)
            initial_frame(user, topic)
        except FairwayError as error:
            code = error.code
        hidden = actor in OUTSIDE or name.startswith(("user", "inbox"))
        expected = "allowed" if actor in TOPICS[name] else "not_found" if hidden else "forbidden"
        assert code == expected, actor


@pytest.fixture
def ready(fixture_data: FixtureData) -> Job:
    """The member's workspace, whose server answers."""
    job: Job = fixture_data.rows["running_workspace"]
    attempt = job.attempts.get()
    task = attempt.task_rows.get()
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={"8888": 1})
    readiness.record_attempt_ready(attempt.pk)
    return Job.objects.get(pk=job.pk)


WAYS: dict[str, Callable[[User, Job, str], object]] = {
    "workspace": do_open_workspace,
    "terminal": lambda user, job, key: do_open_terminal(user, job, 0, key, cols=80, rows=24),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_may_enter(way: str, fixture_data: FixtureData, ready: Job) -> None:
    for actor in ACTORS:
        user = fixture_data.people[actor]
        try:
            WAYS[way](user, ready, sign_in(user))
            entered = True
        except FairwayError:
            entered = False
        assert entered == (actor in OWNER), actor


@pytest.mark.parametrize("lost", ["the project", "the account"])
def test_losing_a_right_closes_the_socket_at_the_next_check(
    lost: str, fixture_data: FixtureData, ready: Job
) -> None:
    owner, project = fixture_data.people["member"], fixture_data.rows["project"]
    key = sign_in(owner)
    _, ticket = do_open_workspace(owner, ready, key)
    cookie = do_redeem_ticket(ticket, ready.public_id)
    _, unused = do_open_workspace(owner, ready, key)
    terminal = do_open_terminal(owner, ready, 0, key, cols=80, rows=24)
    Terminal.objects.update(port=1)
    assert cookie is not None

    def answers() -> set[str]:
        decisions = (
            decide_access(ready.public_id, cookie),
            decide_terminal_access(terminal.public_id, session_id(key)),
        )
        return {"allowed" if isinstance(each, Target) else each for each in decisions}

    assert answers() == {"allowed"}
    if lost == "the project":
        do_remove_member(fixture_data.people["manager"], project, owner)
    else:
        do_change_user(fixture_data.people["admin"], owner, is_active=False)
    assert answers() == {AccessRefusal.DENIED}
    assert do_redeem_ticket(unused, ready.public_id) is None
    owner.refresh_from_db()
    assert not any(can(owner, verb, ready) for verb in Permission)
    if lost == "the project":
        with pytest.raises(NotFound):
            do_open_workspace(owner, ready, key)
        do_set_member(fixture_data.people["manager"], project, owner, Role.MEMBER)
        assert answers() == {"allowed"}
