"""What is asked once in a look is asked anew in the next, and each time where something may change."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from portal.access import project_ids, roles_by_project
from portal.models import Membership
from portal.request_cache import request_cache
from tests import factories


@pytest.mark.django_db
def test_memberships_are_read_once_per_request() -> None:
    person = factories.user("ada")
    project = factories.project("vision", member=person)
    with request_cache(), CaptureQueriesContext(connection) as asked:
        for _ in range(3):
            assert roles_by_project(person).keys() == project_ids(person) == {project.pk}
        assert project_ids(factories.user("ben")) == set()
        Membership.objects.all().delete()
        assert project_ids(person) == {project.pk}, "as it stood when the look began"
    assert sum("parent_id" in query["sql"] for query in asked if "SELECT" in query["sql"]) == 1
    assert project_ids(person) == set()
    factories.project("speech", member=person)
    assert len(project_ids(person)) == 1
