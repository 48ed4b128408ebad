"""Clients of four people on the scene: nobody, a stranger to its projects, a member, an admin.

The scene is written once for each module, in a transaction that is rolled back; each test has a savepoint in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
from django.db import transaction
from django.test import Client, override_settings

from tests.saved_rows import make_once
from tests.web.dataset import Dataset, fill_without_passwords

WHO = {"stranger": "stranger", "member": "m-okafor", "admin": "r-castellan"}


@pytest.fixture(scope="module")
def filled(django_db_setup, django_db_blocker, tmp_path_factory) -> Iterator[Dataset]:
    logs = tmp_path_factory.mktemp("logs")
    with django_db_blocker.unblock(), override_settings(LOG_DIR=logs), transaction.atomic():
        yield make_once(fill_without_passwords)
        transaction.set_rollback(True)


@pytest.fixture
def dataset(filled, db) -> Dataset:
    return copy.deepcopy(filled)


@pytest.fixture
def client_of(dataset) -> Callable[..., Client]:
    """A signed-in client by kind of person; anonymous without."""

    def make(kind: str = "anonymous") -> Client:
        client = Client()
        if kind != "anonymous":
            client.force_login(dataset.people[WHO.get(kind, kind)])
        return client

    return make


@pytest.fixture
def typed(dataset) -> dict[str, str]:
    """What makes a valid form of a training run on the launch page."""
    return {
        "kind": "training",
        "name": "my run",
        "project": dataset.projects["vision"].public_id,
        "environment": dataset.environments["batch"].public_id,
        "gpu_model": "",
        "gpus_per_task": "2",
        "tasks": "1",
        "milli_per_gpu": "1000",
        "cores": "1.5",
        "memory_gib": "4",
        "command": "python train.py --name 'two words'",
        "env": "SEED=1\n# a remark\nNAME=two words",
        "time_limit_s": "90 min",
        "preemptible": "on",
        "priority": "0",
        "max_attempts": "3",
    }
