"""Pages of schedules: created on the launch page, listed, changed, and disabled with a notice."""

from __future__ import annotations

from typing import Any

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.models import Job, Schedule
from portal.services.jobs.schedules import submit_due_jobs

SCHEDULE = {"cron": "0 6 * * MON-FRI", "time_zone": "Europe/Berlin", "overlap": "skip"}


@pytest.fixture
def schedule(client_of: Any, typed: dict[str, str]) -> Schedule:
    answer = client_of("member").post(reverse("launch"), typed | SCHEDULE)
    found = Schedule.objects.get()
    assert answer["Location"] == reverse("schedule", args=[found.public_id])
    return found


def test_the_launch_page_makes_a_schedule_of_a_job(schedule: Schedule, client_of: Any) -> None:
    assert (schedule.name, schedule.cron, schedule.time_zone) == (
        "my run",
        "0 6 * * MON-FRI",
        "Europe/Berlin",
    )
    assert not Job.objects.filter(name="my run").exists()
    page = client_of("member").get(reverse("schedule", args=[schedule.public_id])).content.decode()
    assert "It was not due yet." in page and "python train.py" in page
    assert "my run" in client_of("member").get(reverse("schedules")).content.decode()


def test_repeat_of_a_job_opens_the_schedule_in_the_users_time_zone(dataset: Any, client_of: Any) -> None:
    user, client = dataset.people["m-okafor"], client_of("member")
    user.timezone = "Asia/Tokyo"
    user.save()
    job = dataset.jobs["vit-h-pretrain"]
    assert (
        f"like={job.public_id}&amp;repeat=1"
        in client_of("admin").get(reverse("job", args=[job.public_id])).content.decode()
    )
    page = client.get(f"{reverse('launch')}?like={job.public_id}&repeat=1").content.decode()
    assert '<details class="fw-more" open><summary>Schedule</summary>' in page
    assert '<option value="Asia/Tokyo" selected>' in page


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cron": "every day"}, "Enter five fields"),
        ({"cron": "0 25 * * *"}, "Bad hour"),
        ({"searcher": "grid", "sweep_parameters": "x = 1, 2"}, "A sweep cannot be repeated"),
        ({"start_after": "2026-12-01T08:00"}, "The job of a schedule cannot have this field."),
    ],
)
def test_a_wrong_schedule_is_refused_beside_its_field(
    client_of: Any, typed: Any, changed: Any, message: str
) -> None:
    answer = client_of("member").post(reverse("launch"), typed | SCHEDULE | changed)
    assert answer.status_code == 400
    assert message in answer.content.decode()
    assert not Schedule.objects.exists()


def test_a_schedule_is_changed_disabled_and_deleted(schedule: Schedule, client_of: Any) -> None:
    client, change = client_of("member"), reverse("change-schedule", args=[schedule.public_id])
    wrong = client.post(change, SCHEDULE | {"cron": "no"})
    assert wrong.status_code == 400 and "Enter five fields" in wrong.content.decode()
    assert client.post(change, SCHEDULE | {"overlap": "replace"}).status_code == 302
    assert client.post(change, {"enabled": "0"}).status_code == 302
    schedule.refresh_from_db()
    assert (schedule.overlap, schedule.enabled) == ("replace", False)
    assert client_of("stranger").post(change, {"enabled": "1"}).status_code == 404
    client.post(reverse("delete-schedule", args=[schedule.public_id]))
    assert "No schedules yet" in client.get(reverse("schedules")).content.decode()


def test_a_disabled_schedule_shows_why(schedule: Schedule, client_of: Any, dataset: Any) -> None:
    Schedule.objects.update(next_at=timezone.now())
    dataset.environments["batch"].enabled = False
    dataset.environments["batch"].save()
    submit_due_jobs()
    for address in (reverse("schedules"), reverse("schedule", args=[schedule.public_id])):
        assert (
            "Disabled. Its job was refused for m-okafor" in client_of("member").get(address).content.decode()
        )
