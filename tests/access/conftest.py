"""Fixtures of the access tests: the world of the contract suite, with every kind of actor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from portal.domain.states import Role
from portal.models import Terminal
from portal.selectors.scheduling.project_settings import project_settings_sheet
from portal.services.accounts.users import do_create_invitation
from tests.api import world as worlds
from tests.api.conftest import logs_of_this_test, made, rates_of_this_test, world

__all__ = ["logs_of_this_test", "made", "rates_of_this_test", "world"]


@pytest.fixture(scope="module")
def make_world() -> Callable[[], worlds.World]:
    """One with every kind of actor, a terminal and an invitation."""
    return with_more


def with_more() -> worlds.World:
    """What pages name beside what REST names."""
    world = worlds.make_wide()
    world.names["terminal"] = terminal_of(world).public_id
    project = world.rows["project"]
    invitation, _ = do_create_invitation(world.people["manager"], project=project, role=Role.VIEWER)
    world.names["invitation"] = invitation.public_id
    world.names["person"] = world.people["colleague"].public_id
    world.names["change"] = str(world.rows["quota"].changes.get().pk)
    world.names["policy_version"] = str(project_settings_sheet(project).version)
    return world


def terminal_of(world: worlds.World) -> Terminal:
    """A terminal that the member asked for."""
    task = world.rows["running"].attempts.get().task_rows.get(rank=0)
    return Terminal.objects.create(
        task=task, user=world.people["member"], session_key="", secret="", cols=80, rows=24
    )
