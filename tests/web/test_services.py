"""Services in the browser: deployed from the form, changed, updated, stopped; what others see of a shared one."""

from __future__ import annotations

import html
from typing import Any

import pytest
from django.urls import reverse

from portal.domain.jobs.reasons import EndReason
from portal.models import Job, Service
from portal.services.lifecycle import job_control
from portal.services.serving.advance import advance_service
from tests.web.test_pages import count

FIELDS = {
    "kind": "service",
    "command": "serve --port {port}",
    "port": "9000",
    "readiness_path": "/health",
    "replicas": "2",
    "access": "project",
    "tasks": "1",
}


@pytest.fixture
def service(dataset: Any, client_of: Any, typed: dict[str, str]) -> Service:
    """A service with two replicas that wait."""
    answer = client_of("member").post(reverse("launch"), typed | FIELDS)
    found = Service.objects.get(name=typed["name"])
    assert answer.status_code == 302 and answer["Location"] == reverse("service", args=[found.public_id])
    advance_service(found.public_id)
    return found


def page_of(client: Any, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200
    return html.unescape(answer.content.decode())


def test_the_form_deploys_a_service_as_typed(service: Service, typed: dict[str, str], client_of: Any) -> None:
    version = service.versions.get()
    assert (service.replicas, service.access, service.idle_timeout_s) == (2, "project", None)
    assert (version.port, version.readiness_path, version.readiness_timeout_s) == (9000, "/health", 600)
    jobs = Job.objects.filter(replica__version=version)
    assert [(job.kind, job.name, job.command) for job in jobs] == [
        ("service", f"{service.name}-v1", ["serve", "--port", "{port}"])
    ] * 2
    shown = page_of(client_of("member"), reverse("service", args=[service.public_id]))
    assert f"http://svc-{service.public_id}." in shown and shown.count(f"{service.name}-v1") == 2
    assert service.name in page_of(client_of("member"), reverse("services"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": "0"}, "Must be at least 1."),
        ({"readiness_path": "health"}, "Enter a path such as /health."),
        ({"command": ""}, "Enter a command."),
    ],
)
def test_a_wrong_service_is_refused_on_the_form(
    client_of: Any, typed: dict[str, str], fields: dict[str, str], message: str
) -> None:
    answer = client_of("member").post(reverse("launch"), typed | FIELDS | fields)
    assert answer.status_code == 400 and message in html.unescape(answer.content.decode())
    assert not Service.objects.filter(name=typed["name"]).exists()


def test_a_second_service_of_the_name_is_refused(
    service: Service, client_of: Any, typed: dict[str, str]
) -> None:
    answer = client_of("member").post(reverse("launch"), typed | FIELDS)
    assert answer.status_code == 400 and "already runs in this project" in answer.content.decode()


def test_the_owner_changes_updates_and_stops_a_service(
    service: Service, client_of: Any, typed: dict[str, str]
) -> None:
    member = client_of("member")

    def post(name: str, **fields: str) -> str:
        answer = member.post(reverse(name, args=[service.public_id]), fields, follow=True)
        service.refresh_from_db()
        return html.unescape(answer.content.decode())

    assert "Enter 1 to 32 replicas." in post("change-service", replicas="0", drain_s="10")
    post("change-service", replicas="3", idle_timeout_s="120", drain_s="20", access="signed_in")
    assert (service.replicas, service.idle_timeout_s, service.drain_s) == (3, 120, 20)
    assert service.access == "signed_in"
    form = member.get(f"{reverse('launch')}?kind=service&service={service.public_id}").context["form"]
    preview = html.unescape(member.post(reverse("launch-check"), form.as_posted().data).content.decode())
    filled = page_of(member, f"{reverse('launch')}?kind=service&service={service.public_id}")
    assert "This updates a service" in filled and "serve --port '{port}'" in preview
    typed |= FIELDS | {"service": service.public_id, "command": "serve2 --port {port}", "replicas": "1"}
    assert member.post(reverse("launch"), typed).status_code == 302
    numbers = service.versions.order_by("number").values_list("number", "state")
    assert list(numbers) == [(1, "REPLACED"), (2, "ROLLING")]  # the first one never served
    service.refresh_from_db()
    assert service.replicas == 1
    assert "There is no update to cancel." in post("cancel-service-update")
    post("stop-service")
    assert service.state == "STOPPED"
    assert not Job.objects.filter(kind="service", state="PENDING", replica__version__service=service).exists()
    post("start-service")
    assert service.state == "ACTIVE"


def test_a_cancelled_replica_is_replaced(service: Service) -> None:
    first = Job.objects.filter(replica__version__service=service).order_by("pk").first()
    assert first is not None
    job_control.cancel_job(first.pk, EndReason.CANCELLED_BY_USER, actor="x")
    advance_service(service.public_id)
    live = Job.objects.filter(replica__version__service=service, replica__ended_at__isnull=True)
    assert live.count() == 2 and first not in live


def test_an_outsider_sees_only_how_to_use_a_shared_service(service: Service, client_of: Any) -> None:
    address = reverse("service", args=[service.public_id])
    assert client_of("stranger").get(address).status_code == 404
    Service.objects.filter(pk=service.pk).update(access="signed_in", message="secret words")
    shown = page_of(client_of("stranger"), address) + page_of(client_of("stranger"), reverse("services"))
    assert f"svc-{service.public_id}." in shown and "Open" in shown
    for hidden in ("serve --port", "secret words", service.project.name, f"{service.name}-v1"):
        assert hidden not in shown


def test_the_number_of_queries_does_not_depend_on_the_replicas(service: Service, client_of: Any) -> None:
    member, address = client_of("member"), reverse("service", args=[service.public_id])
    few = count(member, address)
    Service.objects.filter(pk=service.pk).update(replicas=12)
    advance_service(service.public_id)
    assert count(member, address) == few
