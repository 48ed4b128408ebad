"""Every page of a researcher passes axe's WCAG 2.2 AA rules, in light and, where colours differ most, in dark."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from django.db import transaction
from django.utils import timezone

from portal.domain.serving.model_servers import ServiceSpec
from portal.domain.storage.volumes import VolumeKind
from portal.models import (
    ClusterSettings,
    Environment,
    Node,
    NodeOperation,
    OrphanContainer,
    Service,
    ServiceReplica,
    Template,
)
from portal.services.audit import record_action
from portal.services.jobs.submission import JobRequest
from portal.services.nodes.topologies import do_save_topology, do_set_labels
from portal.services.projects.projects import QuotaValues, do_change_quota
from portal.services.scheduling.reservations import (
    ReservationInput,
    do_cancel_reservation,
    do_save_reservation,
)
from portal.services.serving.advance import advance_service
from portal.services.serving.model_servers import Deployment, do_deploy_service
from portal.services.storage.volumes import VolumeInput, do_save_volume

pytestmark = [pytest.mark.browser, pytest.mark.early, pytest.mark.django_db(transaction=True)]

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
SQUEEZED = """[...document.querySelectorAll("td")].filter((cell) => cell.offsetParent && cell.innerText.trim()
  && cell.getBoundingClientRect().width < Math.min(20, 6 * cell.innerText.length)).map((cell) => cell.innerText)"""
"""The cells of a table that are drawn narrower than their words."""
EVERYTHING = {
    "type": "tag",
    "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
}
RUN = "(rules) => axe.run({ runOnly: rules, resultTypes: ['violations'] })"
COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
"""All that another theme changes."""


def test_pages_pass_axe(open_as, dataset):
    page = open_as("m-okafor")
    names = ("vit-h-pretrain", "depth-anything-ft", "dino-abl-b128")
    jobs = [f"/jobs/{dataset.jobs[name].public_id}/" for name in names]
    addresses = ["/", "/jobs/", "/launch/?kind=training&repeat=1", "/schedules/", "/account/", *jobs]
    addresses += [f"{jobs[0]}{tab}/" for tab in ("logs", "metrics", "run", "files", "audit")]
    addresses += [f"{jobs[0]}files/?path=/home/m-okafor", f"{jobs[1]}scheduling/", f"{jobs[1]}change/"]
    assert look_at(page, addresses) == ""


def test_dark_pages_pass_axe(open_as, dataset):
    page = open_as("m-okafor", dark=True)
    job = f"/jobs/{dataset.jobs['depth-anything-ft'].public_id}/"
    failed = f"/jobs/{dataset.jobs['dino-abl-b128'].public_id}/"
    assert look_at(page, ["/", "/launch/?kind=training", job, f"{failed}help/"]) == ""


# an administrator's pages hold whatever a member's do, and the phone below looks at light ones
@pytest.mark.parametrize(
    ("name", "dark"),
    [
        pytest.param("m-okafor", False, marks=pytest.mark.long),
        pytest.param("r-castellan", False, marks=pytest.mark.long),
        ("r-castellan", True),
    ],
)
def test_shared_pages_pass_axe(open_as, dataset, name, dark):
    with_history(dataset)
    with_places(dataset)
    page = open_as(name, dark=dark)
    node = f"/nodes/{dataset.nodes['ada-1'].public_id}/"
    project = f"/projects/{dataset.projects['vision'].public_id}/"
    assert (
        look_at(
            page,
            [
                "/cluster/",
                "/queue/",
                node,
                "/quotas/?pool=h200",
                "/policy/",
                "/projects/",
                project,
                "/environments/",
                "/calendar/",
                "/topologies/",
                "/volumes/",
                *(["/registries/", "/failure-rules/"] if name == "r-castellan" else []),
            ],
        )
        == ""
    )
    page.goto("/cluster/")
    page.get_by_role("tab", name="Table").click()
    assert look_here(page) == ""


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.long)], ids=["light", "dark"])
def test_shared_pages_pass_axe_on_a_phone(open_as, dataset, dark):
    with_history(dataset)
    with_places(dataset)
    page = open_as("r-castellan", width=390, dark=dark)
    for address in (
        "/cluster/",
        f"/nodes/{dataset.nodes['ada-1'].public_id}/",
        f"/projects/{dataset.projects['vision'].public_id}/",
        "/environments/",
        "/registries/",
        "/failure-rules/",
        "/queue/",
        "/quotas/?pool=h200",
        "/policy/?pool=h200",
        "/calendar/",
        "/topologies/",
        "/volumes/",
        "/projects/",
        "/users/",
        "/audit/",
        "/jobs/",
    ):
        assert look_at(page, [address]) == ""
        assert page.evaluate(SQUEEZED) == [], f"{address}: cells that others cover"


@pytest.mark.parametrize(
    ("dark", "width"),
    [pytest.param(False, 1280, marks=pytest.mark.long), (True, 390)],
    ids=["light", "dark-phone"],
)
def test_the_page_after_a_restore_passes_axe(open_as, dataset, dark, width):
    ClusterSettings.objects.update(recovery_mode=True)
    row = OrphanContainer.objects.create(
        node=dataset.nodes["ada-1"], name="fw-c-newer22-1-0", job="newer22", attempt=1, rank=0
    )
    away = dataset.nodes["a100-1"].public_id
    page = open_as("r-castellan", dark=dark, width=width)
    acts = [f"/recovery/{row.public_id}/adopt/", f"/recovery/{row.public_id}/stop/"]
    assert look_at(page, ["/recovery/", *acts, f"/recovery/nodes/{away}/fence/", "/users/"]) == ""
    page.goto("/recovery/")
    assert page.evaluate(SQUEEZED) == []


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)], ids=["light", "dark-phone"])
def test_pages_of_services_and_templates_pass_axe(open_as, dataset, dark, width):
    service = with_service(dataset)
    template = Template.objects.first()
    page = open_as("m-okafor", dark=dark, width=width)
    for address in (
        "/services/",
        f"/services/{service.public_id}/",
        "/launch/?kind=service",
        f"/launch/?kind=service&service={service.public_id}",
        "/templates/",
        f"/templates/?template={template.public_id}",
        "/templates/new/",
    ):
        assert look_at(page, [address]) == ""
        assert page.evaluate(SQUEEZED) == [], f"{address}: cells that others cover"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{address}: too wide"


@pytest.mark.parametrize("width", [360, 1280])
def test_long_words_do_not_widen_a_page(open_as, dataset, width):
    key = "SHA256:" + "k" * 43
    node = Node.objects.first()
    node.status_message = f"{node.name} presents the host key {key}, but {key} was confirmed."
    node.reachable, node.unreachable_code = False, "host_key_mismatch"
    node.save()
    steps = [{"name": "Host key", "ok": False, "message": node.status_message, "seconds": 0.1}]
    check = NodeOperation.objects.create(
        node=node, kind="test", steps=steps, finished_at=timezone.now(), ok=False
    )
    with transaction.atomic():
        record_action(
            None, "node.confirm_key", node, before={"host_key": key * 2}, after={"host_key": key * 3}
        )
    page = open_as("r-castellan", width=width)
    for address in (
        f"/nodes/{node.public_id}/",
        f"/nodes/{node.public_id}/operations/{check.public_id}/",
        "/audit/",
    ):
        page.goto(address)
        assert key[:20] in page.content()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address


def with_service(dataset):
    """A service with a replica that waits, one that failed, and a message."""
    owner, project = dataset.people["m-okafor"], dataset.projects["vision"]
    request = JobRequest(
        name="depth-api", project=project, environment=Environment.objects.filter(enabled=True).first(),
        command=["serve", "--host", "{address}", "--port", "{port}"], milli_per_gpu=500,
    )  # fmt: skip
    service = do_deploy_service(owner, Deployment(ServiceSpec(replicas=2, readiness_path="/health"), request))
    advance_service(service.public_id)
    replica = ServiceReplica.objects.filter(version__service=service).first()
    replica.ended_at = timezone.now()
    replica.save()
    Service.objects.filter(pk=service.pk).update(
        message="The replica ended. The next one starts in 20 s.", failures=2
    )
    return service


def with_places(dataset):
    """A topology that nodes fill in, nodes kept for a course, and a maintenance that was given up."""
    admin, now, hour = dataset.people["r-castellan"], timezone.now(), dt.timedelta(hours=1)
    do_save_topology(admin, "fabric", ["block", "rack"])
    do_set_labels(admin, dataset.nodes["ada-1"], {"block": "a", "rack": "r1"})
    course = ReservationInput(
        "course",
        dataset.pools["h200"],
        [dataset.nodes["h200-3"]],
        [dataset.projects["vision"]],
        now,
        now + 5 * hour,
    )
    do_save_reservation(admin, course)
    do_save_volume(
        admin, VolumeInput("imagenet", VolumeKind.HOST_PATH, path="/data/sets/imagenet", read_only=True)
    )
    nodes = [dataset.nodes["a100-1"], dataset.nodes["a100-2"]]
    update = ReservationInput("update", dataset.pools["a100"], nodes, [], now + hour, now + 2 * hour)
    do_cancel_reservation(admin, do_save_reservation(admin, update))


def with_history(dataset) -> None:
    """A quota that was changed, so that its history stands on the page."""
    numbers = QuotaValues(guaranteed_milli=2000, limit_milli=9000, weight=2.0, priority=0)
    project, pool = dataset.projects["vision"], dataset.pools["h200"]
    do_change_quota(dataset.people["r-castellan"], project, pool, numbers, version=None, reason="A deadline.")


def test_the_sign_in_page_passes_axe(open_as):
    assert look_at(open_as(), ["/sign-in/", "/sign-in/link/", "/invitation/"]) == ""


def look_at(page, addresses: list[str]) -> str:
    """What axe finds on these pages, one line a rule and place; empty when nothing."""
    found = []
    for address in addresses:
        page.goto(address)
        found += [f"{address}: {line}" for line in look_here(page).splitlines()]
    return "\n".join(found)


def look_here(page) -> str:
    """What axe finds on the page as it stands."""
    page.wait_for_load_state("networkidle")
    page.evaluate(AXE.read_text())
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    answer = page.evaluate(RUN, COLOURS if dark else EVERYTHING)
    return "\n".join(
        f"{rule['id']}: {node['html'][:160]} {' '.join(node['failureSummary'].split())[:200]}"
        for rule in answer["violations"]
        for node in rule["nodes"][:3]
    )
