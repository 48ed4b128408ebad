"""Requests for quota and access: who may make and answer them, once, and what an approval does."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from portal.access import answerable_requests, visible_requests
from portal.domain.states import Role
from portal.errors import Conflict, FairwayError, Forbidden, InvalidRequest, NotFound
from portal.models import AuditEntry, Membership, Quota, QuotaAddition, UserRequest
from portal.selectors.projects.quota_additions import with_effective_quota
from portal.selectors.projects.quota_usage import project_quota_usage
from portal.services.accounts.users import do_change_user
from portal.services.environments.environments import is_available_to
from portal.services.projects.projects import (
    QuotaValues,
    do_change_project,
    do_change_quota,
    do_undo_quota_change,
)
from portal.services.projects.quota_additions import (
    do_add_quota,
    do_end_quota_addition,
    record_ended_additions,
)
from portal.services.requests import user_requests
from portal.services.requests.user_requests import (
    MAX_OPEN_REQUESTS,
    do_answer_request,
    do_request_environment,
    do_request_project_role,
    do_request_quota,
    do_withdraw_request,
    expire_requests,
    prepare_quota_request,
)
from scheduler.snapshot.cluster import read_quotas
from tests import factories

pytestmark = pytest.mark.django_db

DAY = dt.timedelta(days=1)


@pytest.fixture
def dataset():
    people = {name: factories.user(name) for name in ("member", "viewer", "manager", "stranger")}
    return people | {
        "admin": factories.user("root", admin=True),
        "pool": factories.pool("main-pool"),
        "project": factories.project(
            "vision", member=people["member"], viewer=people["viewer"], manager=people["manager"]
        ),
    }


def ask(dataset, extra_milli: int = 2000, **times) -> UserRequest:
    return do_request_quota(
        prepare_quota_request(
            dataset["member"], dataset["project"], dataset["pool"], extra_milli, reason="a paper", **times
        )
    )


def quota_of(dataset) -> Quota:
    return with_effective_quota(Quota.objects.filter(project=dataset["project"])).get()


def test_approved_quota_is_added_to_guarantee_and_limit_and_can_be_undone(dataset) -> None:
    values = QuotaValues(guaranteed_milli=1000, limit_milli=4000)
    do_change_quota(dataset["admin"], dataset["project"], dataset["pool"], values, version=0)
    asked = ask(dataset)
    assert asked.state == "open" and asked.effect is None  # no scheduler answers here
    with pytest.raises(Forbidden, match="Only administrators can answer"):
        do_answer_request(dataset["manager"], asked, approve=True)
    done = do_answer_request(dataset["admin"], asked, approve=True, answer="until spring")
    assert (done.state, done.decided_by, done.answer) == ("approved", dataset["admin"], "until spring")
    quota = quota_of(dataset)
    assert (quota.guaranteed_milli, quota.limit_milli, quota.extra_milli) == (3000, 6000, 0)
    actions = list(AuditEntry.objects.order_by("id").values_list("action", "actor_name"))
    assert actions[-3:] == [("request.open", "member"), ("quota.change", "root"), ("request.approve", "root")]
    change = quota.changes.first()
    assert change.reason == "Request of member: until spring"
    do_undo_quota_change(dataset["admin"], change)
    assert quota_of(dataset).guaranteed_milli == 1000


def test_temporary_quota_is_in_force_between_its_times_only(dataset) -> None:
    now = timezone.now()
    do_answer_request(
        dataset["admin"], ask(dataset, starts_at=now + DAY, ends_at=now + 3 * DAY), approve=True
    )
    for days, milli in ((0, 0), (0.99, 0), (1.01, 2000), (2.99, 2000), (3.01, 0)):
        (row,) = read_quotas((now + days * DAY).timestamp())
        assert (row.guaranteed_milli, row.limit_milli) == (milli, None), days
    assert not quota_of(dataset).guaranteed_milli
    QuotaAddition.objects.update(starts_at=now - DAY)
    assert quota_of(dataset).effective_guaranteed_milli == 2000
    (usage,) = project_quota_usage([dataset["project"]], dataset["member"])
    assert usage.guaranteed_milli == 2000


def test_an_addition_ends_by_itself_and_the_end_is_recorded_once(dataset) -> None:
    do_change_quota(
        dataset["admin"], dataset["project"], dataset["pool"], QuotaValues(limit_milli=1000), version=0
    )
    later = timezone.now() + DAY
    row = do_add_quota(dataset["admin"], dataset["project"], dataset["pool"], extra_milli=500, ends_at=later)
    assert (quota_of(dataset).effective_limit_milli, record_ended_additions()) == (1500, 0)
    QuotaAddition.objects.update(starts_at=timezone.now() - 2 * DAY, ends_at=timezone.now() - DAY)
    assert quota_of(dataset).effective_limit_milli == 1000  # at once, without the pass
    assert (record_ended_additions(), record_ended_additions()) == (1, 0)
    entry = AuditEntry.objects.get(action="quota.addition_end")
    assert entry.actor is None and entry.before["extra_milli"] == 500 and entry.after is None
    row.refresh_from_db()
    assert row.ended_at == row.ends_at and row.ended_by is None
    with pytest.raises(Conflict, match="already ended"):
        do_end_quota_addition(dataset["admin"], row)


def test_an_administrator_ends_an_addition_early(dataset) -> None:
    later = timezone.now() + DAY
    row = do_add_quota(dataset["admin"], dataset["project"], dataset["pool"], extra_milli=500, ends_at=later)
    with pytest.raises(Forbidden):
        do_end_quota_addition(dataset["manager"], row)
    assert do_end_quota_addition(dataset["admin"], row).ended_by == dataset["admin"]
    assert quota_of(dataset).effective_guaranteed_milli == 0


def test_a_project_whose_guarantee_is_that_of_its_children_gets_no_addition(dataset) -> None:
    factories.project("below", parent=dataset["project"])
    with pytest.raises(Conflict, match="set its quota first"):
        do_add_quota(
            dataset["admin"],
            dataset["project"],
            dataset["pool"],
            extra_milli=1,
            ends_at=timezone.now() + DAY,
        )


@pytest.mark.parametrize(
    ("amount", "times", "field"),
    [
        (0, {}, "extra_milli"),
        (10_000_001, {}, "extra_milli"),
        (1000, {"ends_at": -DAY}, "ends_at"),
        (1000, {"ends_at": 400 * DAY}, "ends_at"),
        (1000, {"starts_at": DAY}, "ends_at"),
        (1000, {"starts_at": 2 * DAY, "ends_at": DAY}, "ends_at"),
    ],
)
def test_impossible_amounts_and_times_are_refused(dataset, amount, times, field) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(dataset, amount, **{name: timezone.now() + delta for name, delta in times.items()})
    assert list(refusal.value.fields) == [field]
    assert not UserRequest.objects.exists()


def test_who_may_request_quota(dataset) -> None:
    for name, error in (("viewer", Forbidden), ("stranger", NotFound)):
        with pytest.raises(error):
            do_request_quota(
                prepare_quota_request(dataset[name], dataset["project"], dataset["pool"], 1000, reason="mine")
            )
    with pytest.raises(InvalidRequest, match="what it is needed for"):
        do_request_quota(
            prepare_quota_request(dataset["member"], dataset["project"], dataset["pool"], 1000, reason=" ")
        )
    ask(dataset)
    with transaction.atomic(), pytest.raises(Conflict, match="already have an open request"):
        ask(dataset)


def test_a_user_has_a_limited_number_of_open_requests(dataset) -> None:
    for number in range(MAX_OPEN_REQUESTS):
        project = factories.project(f"p{number}")
        do_request_project_role(dataset["member"], project.name, Role.VIEWER, reason="to look")
    with pytest.raises(Conflict, match="already have 20 open requests"):
        ask(dataset)


def test_a_manager_lets_a_stranger_join(dataset) -> None:
    stranger = dataset["stranger"]
    for name, role, field in (("vison", Role.MEMBER, "project"), ("vision", Role.MANAGER, "role")):
        with pytest.raises(InvalidRequest) as refusal:
            do_request_project_role(stranger, name, role, reason="a paper")
        assert list(refusal.value.fields) == [field]
    asked = do_request_project_role(stranger, "vision", Role.MEMBER, reason="a paper")
    for name, sees, answers in (
        ("stranger", True, False),
        ("member", False, False),
        ("viewer", False, False),
        ("manager", True, True),
        ("admin", True, True),
    ):
        assert visible_requests(dataset[name]).exists() == sees, name
        assert bool(answerable_requests(dataset[name], [asked])) == answers, name
    with pytest.raises(Forbidden):
        do_answer_request(stranger, asked, approve=True)
    do_answer_request(dataset["manager"], asked, approve=True)
    assert Membership.objects.get(user=stranger).role == "member"
    with pytest.raises(InvalidRequest, match="already have this role"):
        do_request_project_role(stranger, "vision", Role.VIEWER, reason="again")


def test_an_approval_does_not_replace_a_stronger_role(dataset) -> None:
    asked = do_request_project_role(dataset["stranger"], "vision", Role.VIEWER, reason="to look")
    Membership.objects.create(user=dataset["stranger"], project=dataset["project"], role="manager")
    assert do_answer_request(dataset["admin"], asked, approve=True).state == "approved"
    assert Membership.objects.get(user=dataset["stranger"]).role == "manager"


def test_a_restricted_environment_is_shared_and_an_open_one_stays_open(dataset) -> None:
    environment = factories.environment("licensed", tool=False)
    with pytest.raises(InvalidRequest, match="may already use"):
        do_request_environment(dataset["member"], dataset["project"], "licensed", reason="a paper")
    environment.projects.add(factories.project("others"))
    asked = do_request_environment(dataset["member"], dataset["project"], "licensed", reason="a paper")
    with pytest.raises(Forbidden):
        do_answer_request(dataset["manager"], asked, approve=True)
    environment.projects.clear()  # unrestricted by now: the approval must not exclude all others
    do_answer_request(dataset["admin"], asked, approve=True)
    assert not environment.projects.exists()
    environment.projects.set([factories.project("another")])
    asked = do_request_environment(dataset["member"], dataset["project"], "licensed", reason="a paper")
    do_answer_request(dataset["admin"], asked, approve=True)
    assert is_available_to(environment, dataset["project"])
    assert AuditEntry.objects.get(action="environment.save").after["projects"] == ["another", "vision"]


def test_only_its_owner_shares_a_private_environment(dataset) -> None:
    """Its image has files of the owner, and administrators change what a shared one runs."""
    environment, project = factories.environment("saved-by-max", owner=dataset["manager"]), dataset["project"]
    environment.projects.set([project])
    with pytest.raises(InvalidRequest, match="no environment with this name"):
        do_request_environment(dataset["member"], project, "saved-by-max", reason="curious")
    asked = do_request_environment(dataset["manager"], project, "saved-by-max", reason="for the team")
    UserRequest.objects.filter(pk=asked.pk).update(requested_by=dataset["member"])  # as older requests may be
    with pytest.raises(Conflict, match="only its owner can share it"):
        do_answer_request(dataset["admin"], asked, approve=True)
    environment.refresh_from_db()
    assert environment.owner == dataset["manager"] and not is_available_to(environment, project)
    UserRequest.objects.filter(pk=asked.pk).update(requested_by=dataset["manager"])
    do_answer_request(dataset["admin"], asked, approve=True)
    environment.refresh_from_db()
    assert is_available_to(environment, project)


def test_withdrawn_denied_and_expired_requests_change_nothing(dataset) -> None:
    withdrawn = ask(dataset)
    with pytest.raises(Forbidden):
        do_withdraw_request(dataset["admin"], withdrawn)
    assert do_withdraw_request(dataset["member"], withdrawn).state == "withdrawn"
    with pytest.raises(Conflict, match="already withdrawn"):
        do_answer_request(dataset["admin"], withdrawn, approve=True)
    denied = do_answer_request(dataset["admin"], ask(dataset), approve=False, answer="no room")
    assert (denied.state, denied.answer) == ("denied", "no room")
    old, past, young = ask(dataset), do_request_project_role(
        dataset["stranger"], "vision", Role.VIEWER, reason="x"
    ), do_request_project_role(dataset["viewer"], "vision", Role.MEMBER, reason="x")  # fmt: skip
    UserRequest.objects.filter(pk=old.pk).update(ends_at=timezone.now())
    UserRequest.objects.filter(pk=past.pk).update(requested_at=timezone.now() - 31 * DAY)
    assert (expire_requests(), expire_requests()) == (2, 0)
    states = dict(UserRequest.objects.values_list("pk", "state"))
    assert [states[row.pk] for row in (old, past, young)] == ["expired", "expired", "open"]
    assert AuditEntry.objects.filter(action="request.expire").count() == 2
    assert not Quota.objects.exists() and not QuotaAddition.objects.exists()


def test_a_request_whose_object_changed_cannot_be_approved(dataset) -> None:
    asked = ask(dataset)
    do_change_user(dataset["admin"], dataset["member"], is_active=False)
    with transaction.atomic(), pytest.raises(Conflict, match="deactivated"):
        do_answer_request(dataset["admin"], asked, approve=True)
    do_change_user(dataset["admin"], dataset["member"], is_active=True)
    do_change_project(dataset["admin"], dataset["project"], archived_at=timezone.now())
    with transaction.atomic(), pytest.raises(Conflict, match="archived"):
        do_answer_request(dataset["admin"], asked, approve=True)
    assert UserRequest.objects.get().state == "open"
    assert do_answer_request(dataset["admin"], asked, approve=False).state == "denied"


def test_the_database_refuses_a_request_without_its_subject(dataset) -> None:
    for columns in ({"kind": "quota", "project": dataset["project"]}, {"kind": "time"}, {"kind": "wish"}):
        with transaction.atomic(), pytest.raises(IntegrityError):
            UserRequest.objects.create(requested_by=dataset["member"], **columns)


@pytest.mark.django_db(transaction=True)
def test_of_two_concurrent_answers_one_counts(dataset) -> None:
    asked = do_request_project_role(dataset["stranger"], "vision", Role.MEMBER, reason="a paper")

    def answer(approve: bool) -> str:
        try:
            return do_answer_request(dataset["admin"], asked, approve=approve).state
        except FairwayError as error:
            return error.code
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as threads:
        states = sorted(threads.map(answer, (True, False)))
    row = UserRequest.objects.get()
    assert states == sorted([row.state, "request_answered"])
    assert Membership.objects.filter(user=dataset["stranger"]).exists() == (row.state == "approved")
    assert user_requests.who_answers(row) == "managers of vision"
