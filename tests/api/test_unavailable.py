"""The sentence of a 503 names what is slow: a held lock, a slow statement, a full pool, a lost connection."""

from __future__ import annotations

import json

import psycopg
import pytest
from django.db import OperationalError, connection, transaction
from redis import Redis
from redis.exceptions import RedisError

from portal.api.framework.problems import response_for
from portal.database.connection_pool import ConnectionPool
from portal.database.failures import DATABASE_AWAY, LOCK_WAIT, POOL_FULL, STATEMENT_TIMEOUT, VALKEY_AWAY
from portal.models import User
from tests import factories
from tests.locked_rows import locked_row

pytestmark = pytest.mark.django_db(transaction=True)


def sentence(failure: Exception) -> str:
    answer = response_for(failure)
    assert answer is not None and answer.status_code == 503 and answer["Retry-After"] == "5"
    return str(json.loads(answer.content)["detail"])


def test_a_held_lock_is_named():
    user = factories.user("ada")
    with locked_row(user), pytest.raises(OperationalError) as failure, transaction.atomic():
        connection.cursor().execute("SET LOCAL lock_timeout = '50ms'")
        User.objects.select_for_update().get(pk=user.pk)
    assert sentence(failure.value) == LOCK_WAIT


def test_a_slow_statement_is_named():
    with pytest.raises(OperationalError) as failure, transaction.atomic():
        connection.cursor().execute("SET LOCAL statement_timeout = '50ms'")
        connection.cursor().execute("SELECT pg_sleep(5)")
    assert sentence(failure.value) == STATEMENT_TIMEOUT


def test_a_full_pool_is_named():
    with pytest.raises(psycopg.OperationalError) as failure:
        ConnectionPool(0, wait_s=0.05).check_out((), lambda: pytest.fail("there is no turn"))
    wrapped = OperationalError(*failure.value.args)
    wrapped.__cause__ = failure.value
    assert sentence(wrapped) == POOL_FULL


def test_a_lost_connection_says_that_the_change_may_have_been_made():
    connection.ensure_connection()
    try:
        with pytest.raises(OperationalError) as failure:
            connection.cursor().execute("SELECT pg_terminate_backend(pg_backend_pid())")
    finally:
        connection.close()
    assert sentence(failure.value) == DATABASE_AWAY and "Idempotency-Key" in DATABASE_AWAY


def test_valkey_is_named(tmp_path):
    with pytest.raises(RedisError) as failure:
        Redis(unix_socket_path=str(tmp_path / "none")).ping()
    assert sentence(failure.value) == VALKEY_AWAY
