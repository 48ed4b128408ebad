"""The page that asks what becomes of jobs when somebody loses a right, and the same over REST."""

from __future__ import annotations

import pytest
from django.urls import reverse

from portal.models import AuditEntry, Environment, Job, Membership, User, Volume
from tests import factories


@pytest.fixture
def queued(dataset) -> Job:
    """A queued job of the member, in an environment and with a volume of its own."""
    factories.project("elsewhere")
    Volume.objects.create(name="sets", kind="host_path", path="/srv/sets")
    owner, project = dataset.people["m-okafor"], dataset.projects["vision"]
    Job.objects.filter(owner=owner).update(desired_state="cancelled")  # what the scene has of this person
    environment = factories.environment("closing", tool=False)
    return factories.job(owner, project, environment, volumes=[{"volume": "sets"}])


def changes(job: Job) -> dict[str, tuple[str, dict[str, str]]]:
    project, owner, environment = job.project, job.owner, job.environment
    member = reverse("set-member", args=[project.public_id])
    words = {"name": environment.name, "title": "Closing", "runtime": "podman", "image": environment.image}
    volume = {"row": "sets", "name": "sets", "kind": "host_path", "reach": "node", "path": "/srv/sets"}
    return {
        "remove": (member, {"username": owner.username, "role": "none"}),
        "viewer": (member, {"username": owner.username, "role": "viewer"}),
        "account": (reverse("change-user", args=[owner.public_id]), {"act": "close"}),
        "environment": (reverse("save-environment", args=[environment.public_id]), words),
        "volume": (reverse("save-volume"), volume | {"projects": "elsewhere"}),
    }


@pytest.mark.parametrize("change", ["remove", "viewer", "account", "environment", "volume"])
def test_the_dialog_shows_the_numbers_and_follows_the_choice(client_of, queued, change) -> None:
    admin = client_of("admin")
    address, form = changes(queued)[change]
    asked = admin.post(address, form)
    assert asked.status_code == 409, asked.content.decode()[:2000]
    page = asked.content.decode().replace("\xa0", " ")
    assert "1 queued job" in page and "0 running jobs" in page
    assert all(f'name="{name}" value="{value}"' in page for name, value in form.items())
    assert not Job.objects.get(pk=queued.pk).held
    assert User.objects.get(pk=queued.owner_id).is_active
    assert Environment.objects.get(pk=queued.environment_id).enabled
    assert Membership.objects.get(user=queued.owner, project=queued.project).role == "member"
    assert admin.post(address, form | {"queued_jobs": "burn"}).status_code in (302, 400)
    assert Job.objects.get(pk=queued.pk).state == "PENDING"
    done = admin.post(address, form | {"queued_jobs": "cancel", "running_jobs": "finish"})
    assert done.status_code == 302
    job = Job.objects.get(pk=queued.pk)
    assert (job.state, job.reason) == ("CANCELLED", "owner_not_permitted")
    assert AuditEntry.objects.filter(action="rights.jobs").count() == 1


def test_rest_accepts_the_same_choice_and_holds_by_default(client_of, queued) -> None:
    admin = client_of("admin")
    address = f"/api/v1/projects/{queued.project.public_id}/members/{queued.owner.username}/"
    viewer = admin.put(address, {"role": "viewer"}, content_type="application/json")
    assert viewer.status_code == 200, viewer.content
    assert Job.objects.get(pk=queued.pk).held
    again = {"role": "member"}
    assert admin.put(address, again, content_type="application/json").status_code == 200
    assert admin.delete(f"{address}?queued_jobs=burn").status_code == 400
    assert admin.delete(f"{address}?queued_jobs=cancel&running_jobs=stop").status_code == 204
    assert Job.objects.get(pk=queued.pk).state == "CANCELLED"
