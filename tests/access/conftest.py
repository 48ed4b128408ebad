"""Fixtures of the access tests: the world of the contract suite, with every kind of actor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from portal.domain.states import Role
from portal.models import Terminal
from portal.selectors.scheduling.project_settings import project_settings_sheet
from portal.services.accounts.users import do_create_invitation
from tests.api import fixture_data as worlds
from tests.api.conftest import fixture_data, logs_of_this_test, made, rates_of_this_test

__all__ = ["fixture_data", "logs_of_this_test", "made", "rates_of_this_test"]


@pytest.fixture(scope="module")
def make_world() -> Callable[[], worlds.FixtureData]:
    """One with every kind of actor, a terminal and an invitation."""
    return with_more


def with_more() -> worlds.FixtureData:
    """What pages name beside what REST names."""
    fixture_data = worlds.make_wide()
    fixture_data.names["terminal"] = terminal_of(fixture_data).public_id
    project = fixture_data.rows["project"]
    invitation, _ = do_create_invitation(fixture_data.people["manager"], project=project, role=Role.VIEWER)
    fixture_data.names["invitation"] = invitation.public_id
    fixture_data.names["person"] = fixture_data.people["colleague"].public_id
    fixture_data.names["change"] = str(fixture_data.rows["quota"].changes.get().pk)
    fixture_data.names["policy_version"] = str(project_settings_sheet(project).version)
    return fixture_data


def terminal_of(fixture_data: worlds.FixtureData) -> Terminal:
    """A terminal that the member asked for."""
    task = fixture_data.rows["running"].attempts.get().task_rows.get(rank=0)
    return Terminal.objects.create(
        task=task, user=fixture_data.people["member"], session_key="", secret="", cols=80, rows=24
    )
