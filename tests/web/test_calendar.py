"""The calendar page: what an admin reserves, what others see of it, and what a refusal keeps."""

from __future__ import annotations

import datetime as dt
import zoneinfo

import pytest
from django.utils import timezone

from portal.models import Job, Reservation
from portal.services.projects.quota_additions import do_add_quota, do_end_quota_addition

LOCAL = "%Y-%m-%dT%H:%M"


@pytest.fixture
def form(dataset) -> dict[str, str]:
    """Tomorrow, from eight to twelve."""
    day = (timezone.now() + dt.timedelta(days=1)).date()
    return {
        "name": "vision course", "pool": dataset.pools["h200"].public_id, "nodes": "h200-1, h200-3",
        "projects": "vision", "starts_at": f"{day}T08:00", "ends_at": f"{day}T12:00", "reason": "spring",
    }  # fmt: skip


def test_an_administrator_creates_changes_cancels_and_restores_a_reservation(
    client_of, dataset, form
) -> None:
    admin = client_of("admin")
    assert "Nothing is reserved" in admin.get("/calendar/").content.decode()
    assert admin.post("/calendar/save/", form).status_code == 302
    row = Reservation.objects.get()
    assert sorted(one.node.name for one in row.reservation_nodes.all()) == ["h200-1", "h200-3"]
    page = admin.get("/calendar/").content.decode()
    assert "vision course" in page and "Upcoming" in page
    assert "moe-7b-sft" in page and "without a time limit" in page  # nlp stands on h200-3
    edit = admin.get(f"/calendar/?edit={row.public_id}").content.decode()
    assert 'value="h200-1 h200-3"' in edit
    changed = form | {"row": row.public_id, "version": "1", "nodes": "1"}
    admin.post("/calendar/save/", changed)
    assert Reservation.objects.get().reservation_nodes.count() == 1
    stale = admin.post("/calendar/save/", changed)
    assert stale.status_code == 409 and "Another user changed" in stale.content.decode()
    admin.post(f"/calendar/{row.public_id}/cancel/")
    assert "Restore" in admin.get("/calendar/").content.decode()
    admin.post(f"/calendar/{row.public_id}/restore/")
    assert Reservation.objects.get().cancelled_at is None


def test_times_are_entered_and_shown_in_the_time_zone_of_the_user(client_of, dataset, form) -> None:
    dataset.people["r-castellan"].timezone = "Asia/Kolkata"
    dataset.people["r-castellan"].save()
    admin = client_of("admin")
    admin.post("/calendar/save/", form)
    row = Reservation.objects.get()
    assert f"{row.starts_at.astimezone(dt.UTC):%H:%M}" == "02:30"
    page = admin.get(f"/calendar/?edit={row.public_id}").content.decode()
    assert f'value="{form["starts_at"]}"' in page and "Times are in Asia/Kolkata" in page
    berlin = f"{row.starts_at.astimezone(zoneinfo.ZoneInfo('Europe/Berlin')):%H:%M}"
    assert berlin in client_of("member").get("/calendar/").content.decode()
    assert client_of("member").get("/queue/?span=3d").content.decode().count('class="band"') == 2


def test_other_users_see_reservations_without_hidden_names(client_of, dataset, form) -> None:
    client_of("admin").post("/calendar/save/", form | {"projects": "nlp", "nodes": "h200-3"})
    member = client_of("member").get("/calendar/").content.decode()
    assert "vision course" in member and "1\xa0other project" in member
    assert "nlp" not in member and "Edit" not in member and "Reserve nodes</h2>" not in member
    assert "depth-eda" in member and "attn-probe" not in member  # theirs; the second is surely gone by then
    outsider = client_of("stranger").get("/calendar/").content.decode()
    assert "A job of another project" in outsider and "depth-eda" not in outsider
    row = Reservation.objects.get()
    for path in ("save/", f"{row.public_id}/cancel/", f"{row.public_id}/restore/"):
        assert client_of("member").post(f"/calendar/{path}", form).status_code == 403


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": "h200-1 nowhere"}, "h200 has no node called nowhere."),
        ({"nodes": "99"}, "Enter 1 to 3"),
        ({"nodes": "0"}, "Enter 1 to 3"),
        ({"projects": "vision, nothing"}, "There is no project called nothing."),
        ({"starts_at": "soon"}, "Enter a date and a time"),
        ({"ends_at": "0001-01-01T00:00"}, "must be after the start"),
        ({"ends_at": "9999-12-31T23:59"}, "At most 400 days."),
        ({"pool": "nothing"}, "Choose a pool."),
        ({"name": ""}, "Enter a name"),
    ],
)
def test_a_refused_form_keeps_what_was_typed(client_of, dataset, form, changes, message) -> None:
    answer = client_of("admin").post("/calendar/save/", form | changes)
    page = answer.content.decode()
    assert answer.status_code == 400 and message in page
    assert 'value="spring"' in page
    assert not Reservation.objects.exists()


def test_a_clash_names_the_other(client_of, dataset, form) -> None:
    admin = client_of("admin")
    admin.post("/calendar/save/", form)
    answer = admin.post("/calendar/save/", form | {"name": "another", "nodes": "all"})
    assert answer.status_code == 409
    assert "h200-1 is already reserved at that time (vision course)." in answer.content.decode()
    assert Job.objects.filter(state="RUNNING").count() > 0  # nobody was thrown out


def test_maintenance_may_preempt_running_jobs_and_the_node_page_shows_it(client_of, dataset, form) -> None:
    admin = client_of("admin")
    refused = admin.post("/calendar/save/", form | {"drain_at_start": "on"})
    assert refused.status_code == 400
    page = refused.content.decode()
    assert "Only a maintenance reservation" in page and 'name="drain_at_start" checked' in page
    assert admin.post("/calendar/save/", form | {"drain_at_start": "on", "projects": ""}).status_code == 302
    row = Reservation.objects.get()
    assert row.drain_at_start
    node = row.reservation_nodes.first().node
    shown = client_of("member").get(f"/nodes/{node.public_id}/").content.decode()
    assert ", maintenance" in shown and "jobs that still run when it begins are preempted" in shown


def test_the_calendar_lists_additions_to_quotas_that_have_not_ended(client_of, dataset) -> None:
    admin, day = dataset.people["r-castellan"], dt.timedelta(days=1)
    for days, reason in ((2, "for the deadline"), (3, "for the spring school")):
        row = do_add_quota(
            admin, dataset.projects["vision"], dataset.pools["h200"], extra_milli=2000,
            starts_at=timezone.now() + day, ends_at=timezone.now() + days * day, reason=reason,
        )  # fmt: skip
    do_end_quota_addition(admin, row)
    page = client_of("admin").get("/calendar/").content.decode()
    assert "Quota additions" in page and "for the deadline" in page and "for the spring school" not in page
    assert "for the deadline" not in client_of("stranger").get("/calendar/").content.decode()
