"""Shared connections: a turn or a clear word for everybody, and never one that is dead, silent or half used."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from django.conf import settings
from django.db import OperationalError, connection, transaction

from agents.link import OutcomeUnknownError
from agents.local import open_local
from portal.database import connection_pool, timeouts
from portal.database.base import DatabaseWrapper
from portal.database.connection_pool import ConnectionPool
from portal.database.pool_middleware import release_connection
from portal.database.roles import as_owner
from portal.models import User
from tests import factories
from tests.agent_program import agent_program
from tests.time_budget import budget_s

pytestmark = pytest.mark.django_db(transaction=True)


def checked_out_count(pool: ConnectionPool) -> int:
    return pool.size - pool._turns.qsize()


def idle_count(pool: ConnectionPool) -> int:
    return len(pool._idle)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectionPool]:
    """Two connections for this process, and little patience."""
    monkeypatch.setattr(connection_pool, "PING_TIMEOUT_S", 0.3)
    monkeypatch.setattr(timeouts.DATABASE_BREAKER, "open_for_s", budget_s(0.3))
    connection.close()
    made = ConnectionPool(2, wait_s=0.3)
    monkeypatch.setattr(DatabaseWrapper, "connection_pool", made)
    yield made
    connection.close()
    made.close_idle()


def backend() -> int:
    """The process of PostgreSQL that serves this thread."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def elsewhere(act: Callable[[], object]) -> object:
    """What a thread of its own gives, which ends without a word to its connection unless ``act`` gives it back."""
    reported: list[object] = []

    def run() -> None:
        try:
            reported.append(act())
        except Exception as error:
            reported.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return reported[0]


def test_threads_share_one_connection_in_turn(pool):
    def work() -> int:
        try:
            return backend()
        finally:
            release_connection()

    assert len({elsewhere(work) for _ in range(5)}) == 1
    assert (checked_out_count(pool), idle_count(pool)) == (0, 1)


def test_a_thread_without_a_connection_gets_an_error_and_the_next_is_served(pool):
    enter, leave = threading.Barrier(3), threading.Event()

    def hold() -> None:
        backend()
        enter.wait(5)
        leave.wait(5)
        release_connection()

    holders = [threading.Thread(target=hold) for _ in range(2)]
    for holder in holders:
        holder.start()
    enter.wait(5)
    began_s = time.monotonic()
    with pytest.raises(OperationalError, match="all 2 connections"):
        backend()
    assert time.monotonic() - began_s < budget_s(2)
    leave.set()
    for holder in holders:
        holder.join(5)
    assert backend()


def test_a_transaction_keeps_its_connection(pool):
    with transaction.atomic():
        factories.user("ada")
        release_connection()
        assert User.objects.filter(username="ada").exists()
    release_connection()
    assert checked_out_count(pool) == 0


def test_an_abandoned_connection_is_returned(pool):
    for _ in range(3):
        assert isinstance(elsewhere(backend), int)
        gc.collect()
    assert checked_out_count(pool) == 0


def test_half_a_transaction_is_never_sent(pool):
    first = backend()
    connection.connection.execute("BEGIN")
    release_connection()
    assert idle_count(pool) == 0
    assert backend() != first


def test_a_connection_closed_before_the_first_statement_of_its_transaction_is_not_kept(pool):
    first = backend()
    with transaction.atomic():  # without autocommit, and no transaction has begun yet
        connection.close()
    time.sleep(2 * connection_pool.CHECK_AFTER_S)  # so that the next one would be checked by a statement
    with transaction.atomic():
        assert backend() != first


def test_the_dead_are_replaced_unnoticed(pool):
    def both() -> set[object]:
        with transaction.atomic():  # so that a second is opened
            mine = backend()
            return {mine, elsewhere(lambda: (backend(), release_connection())[0])}

    dead = both()
    release_connection()
    assert idle_count(pool) == 2
    with psycopg.connect(**plain_parameters()) as killer:
        for pid in dead:
            killer.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    assert backend() not in dead
    assert idle_count(pool) == 0


def test_unresponsive_connections_are_dropped_and_later_restored(pool):
    silent = backend()
    release_connection()
    time.sleep(2 * connection_pool.CHECK_AFTER_S)
    os.kill(silent, signal.SIGSTOP)
    try:
        with pytest.raises(OperationalError, match="has not responded"):
            backend()
        with pytest.raises(OperationalError, match="a moment ago"):
            backend()
    finally:
        os.kill(silent, signal.SIGCONT)
    time.sleep(timeouts.DATABASE_BREAKER.open_for_s + 0.1)
    assert backend() != silent
    release_connection()
    assert (checked_out_count(pool), idle_count(pool)) == (0, 1)


def test_a_child_process_does_not_use_connections_of_its_parent(pool):
    with transaction.atomic():
        elsewhere(lambda: (backend(), release_connection()))
        parents = backend()
        child = os.fork()
        if child == 0:
            try:
                fine = idle_count(pool) == 0 and checked_out_count(pool) == 0
                connection.in_atomic_block = False
                connection.close()
                fine = fine and backend() != parents
                os._exit(0 if fine else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert backend() == parents
    release_connection()
    assert idle_count(pool) == 2
    assert elsewhere(backend) == parents


def test_another_role_or_database_gets_no_connection_of_this_one(pool):
    services = connection.settings_dict["USER"]
    assert session_user() == services
    release_connection()
    with as_owner():
        assert session_user() == settings.DATABASE_OWNER["USER"] != services
    assert session_user() == services
    release_connection()
    assert idle_count(pool) == 1
    other = pool.check_out(
        ("other",), lambda: timeouts.TimeoutConnection.connect(**plain_parameters("postgres"))
    )
    assert other.info.dbname == "postgres"
    assert idle_count(pool) == 0
    pool.check_in(other)


def plain_parameters(name: str = "") -> dict[str, object]:
    parameters = connection.get_connection_params()
    wanted = {key: parameters[key] for key in ("host", "user", "password", "port") if key in parameters}
    return wanted | {"dbname": name or parameters["dbname"], "autocommit": True}


def session_user() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT session_user")
        return str(cursor.fetchone()[0])


def test_waiting_for_an_unresponsive_node_holds_no_connection(pool: ConnectionPool, tmp_path: Path) -> None:
    program, settings = tmp_path / "agent.pyz", tmp_path / "node.json"
    program.write_bytes(agent_program().read_bytes())
    folders = {"state_dir": str(tmp_path / "state"), "home_root": str(tmp_path / "homes")}
    settings.write_text(json.dumps({"cluster": "test", "runtimes": [{"kind": "process"}], **folders}))
    with open_local(program, "control", settings, cluster="test") as link, frozen(link.process_id):
        link.on_wait = release_connection
        begun = threading.Barrier(3)

        def ask() -> None:
            backend()
            begun.wait(5)
            with contextlib.suppress(OutcomeUnknownError):
                link.request("list", timeout_s=3)
            connection.close()

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        assert checked_out_count(pool) <= 2
        begun.wait(5)
        for _ in range(5):
            backend()  # within 0.3 s, while both still wait
            release_connection()
            time.sleep(0.05)
        assert all(thread.is_alive() for thread in asking)
        for thread in asking:
            thread.join(5)


@contextlib.contextmanager
def frozen(process_id: int | None) -> Iterator[None]:
    """A process that is there and says nothing."""
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)
