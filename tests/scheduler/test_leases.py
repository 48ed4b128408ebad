"""Leases: one holder at a time, epochs that only grow, and a fence that a replaced holder cannot pass."""

from __future__ import annotations

import datetime as dt
import threading

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from portal.models import Lease
from portal.services.cluster import recovery
from portal.services.cluster.recovery import begin_recovery
from scheduler import leases
from scheduler.leases import LeaseLostError, acquire, check, command_epoch, release, renew

pytestmark = pytest.mark.django_db(transaction=True)


def run_out(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE portal_lease SET expires_at = clock_timestamp() - interval '1 s' WHERE name = %s", [name]
        )


def test_one_holder_until_it_runs_out() -> None:
    first = acquire("leader", "a", 10)
    assert first is not None
    assert acquire("leader", "b", 10) is None
    assert acquire("leader", "a", 10) == first
    run_out("leader")
    second = acquire("leader", "b", 10)
    assert second is not None
    assert second.epoch > first.epoch
    with transaction.atomic(), pytest.raises(LeaseLostError):
        check(first)
    with transaction.atomic():
        check(second)


def test_a_lease_that_ran_out_unseen_is_kept_with_its_epoch() -> None:
    first = acquire("leader", "a", 10)
    run_out("leader")
    assert renew(["leader"], "a", 10) == [first]


def test_releasing_a_lease_admits_another_at_once() -> None:
    first = acquire("leader", "a", 10)
    release(["leader"], "a")
    second = acquire("leader", "b", 10)
    assert first is not None and second is not None and second.epoch == first.epoch + 1


def test_epochs_are_of_one_row_over_all_leases() -> None:
    node = acquire("node:x", "a", 10)
    leader = acquire("leader", "a", 10)
    other = acquire("node:y", "b", 10)
    assert node and leader and other
    assert node.epoch < leader.epoch < other.epoch
    assert command_epoch(node) == leader.epoch  # a new leader lifts what nodes have to hear
    assert command_epoch(other) == other.epoch
    run_out("node:x")
    acquire("node:x", "b", 10)
    with pytest.raises(LeaseLostError):
        command_epoch(node)


def test_a_restore_gives_epochs_above_all_since_the_backup(monkeypatch) -> None:
    node = acquire("node:x", "a", 10)
    assert node is not None
    heard, now = 0, timezone.now()
    for seconds in range(
        3
    ):  # the same backup again and again: the record is back at the same epoch each time
        monkeypatch.setattr(recovery.timezone, "now", lambda at=now + dt.timedelta(seconds=seconds): at)
        Lease.objects.all().delete()
        Lease.objects.create(name="node:x", holder="a", epoch=node.epoch, expires_at=timezone.now())
        with transaction.atomic():
            begin_recovery()
        later = acquire("node:x", "b", 10)
        assert later is not None and heard < command_epoch(later) < 2**53
        heard = command_epoch(later)
        Lease.objects.filter(name="node:x").update(epoch=F("epoch") + 1000)
        heard += 1000


def test_restore_ends_every_lease() -> None:
    held = acquire("leader", "a", 10)
    assert held is not None
    with transaction.atomic():
        begin_recovery()
    assert renew(["leader"], "a", 10) == []
    with transaction.atomic(), pytest.raises(LeaseLostError):
        check(held)


def test_of_many_concurrent_claims_one_succeeds() -> None:
    won: list[leases.HeldLease] = []
    gate = threading.Barrier(6)

    def run(holder: str) -> None:
        gate.wait()
        held = acquire("leader", holder, 10)
        if held:
            won.append(held)
        connection.close()

    threads = [threading.Thread(target=run, args=(f"h{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert Lease.objects.get().holder == won[0].holder


def test_the_lease_cannot_change_between_check_and_commit() -> None:
    first = acquire("leader", "a", 10)
    assert first is not None
    run_out("leader")
    took: list[object] = []

    def take() -> None:
        took.append(acquire("leader", "b", 10))
        connection.close()

    other = threading.Thread(target=take)
    with transaction.atomic():
        check(first)
        other.start()
        other.join(0.5)
        assert other.is_alive(), "the take-over must wait for this transaction"
    other.join(5)
    assert took and took[0] is not None
