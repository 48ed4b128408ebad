"""What a transaction leaves to be sent goes once, in order, and never when it was rolled back."""

from __future__ import annotations

import pytest
from django.db import transaction

from portal.models import OutboxMessage
from portal.on_commit import send_after_commit
from portal.outbox import trigger_cycle

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def sent() -> list[tuple[str, list[int]]]:
    return []


@pytest.fixture
def ways(sent):
    def one(items: list[int]) -> None:
        sent.append(("one", items))

    def two(items: list[int]) -> None:
        sent.append(("two", items))

    return one, two


def test_messages_of_one_kind_are_sent_together_after_the_commit(sent, ways) -> None:
    one, two = ways
    with transaction.atomic():
        send_after_commit(one, [1])
        send_after_commit(two, [2, 3])
        send_after_commit(one, [4])
        send_after_commit(one, [])
        with transaction.atomic():
            send_after_commit(two, [5])
        send_after_commit(two, [6])
        assert sent == []
    assert sent == [("one", [1, 4]), ("two", [2, 3, 6]), ("two", [5])]
    send_after_commit(one, [7])
    assert sent[3:] == [("one", [7])]


def test_messages_of_a_rollback_are_not_sent(sent, ways) -> None:
    one, _ = ways
    with transaction.atomic():
        send_after_commit(one, [1])
        with pytest.raises(RuntimeError), transaction.atomic():
            send_after_commit(one, [2])
            raise RuntimeError
        send_after_commit(one, [3])
    assert sent == [("one", [1, 3])]
    with pytest.raises(RuntimeError), transaction.atomic():
        send_after_commit(one, [4])
        raise RuntimeError
    with transaction.atomic():
        send_after_commit(one, [5])
    assert sent[1:] == [("one", [5])]


def test_concurrent_senders_do_not_share_messages(sent, ways) -> None:
    """One that sends leaves more for the next transaction, as a hint that wakes a cycle does."""
    one, two = ways

    def again(items: list[int]) -> None:
        two(items)
        send_after_commit(one, [9])

    with transaction.atomic():
        send_after_commit(again, [1])
        send_after_commit(one, [2])
    assert sent == [("two", [1]), ("one", [9]), ("one", [2])]


def test_a_transaction_requests_one_cycle_for_each_trigger_that_was_not_rolled_back() -> None:
    with transaction.atomic():
        with pytest.raises(RuntimeError), transaction.atomic():
            trigger_cycle("hold")
            raise RuntimeError
        for _ in range(3):
            with transaction.atomic():
                trigger_cycle("hold")
                trigger_cycle("requeue")
    assert sorted(row.arguments[0] for row in OutboxMessage.objects.all()) == ["hold", "requeue"]
    trigger_cycle("hold")
    assert OutboxMessage.objects.count() == 3
