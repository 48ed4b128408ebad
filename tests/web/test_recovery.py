"""The page after a restore: who gets in, what it asks, what the acts do, and the banner that leads to it."""

from __future__ import annotations

import pytest
from django.urls import reverse

from portal.models import ClusterSettings, Job, Node, OrphanContainer


@pytest.fixture
def after(dataset):
    """The scene after a restore: one node is away, one runs a gang of two that nobody knows."""
    ClusterSettings.objects.update(recovery_mode=True)
    Node.objects.update(reconciled_at="2026-11-21T12:00Z")
    Node.objects.filter(name__in=["ada-1", "a100-1"]).update(reconciled_at=None)
    rows = [
        OrphanContainer.objects.create(
            node=dataset.nodes["ada-1"],
            name=f"fw-c-newer22-1-{rank}",
            job="newer22",
            attempt=1,
            rank=rank,
            owner=dataset.people["a-lindqvist"].public_id,
            gpus=[{"uuid": f"GPU-ada-1-{6 + rank}", "milli": 1000}],
        )
        for rank in (0, 1)
    ]
    dataset.row = rows[0]
    return dataset


def words(answer) -> str:
    return " ".join(answer.content.decode().split())


def addresses(after) -> list[str]:
    row = after.row.public_id
    away = after.nodes["a100-1"].public_id
    return [
        reverse("recovery"),
        reverse("recovery-adopt", args=[row]),
        reverse("recovery-stop", args=[row]),
        reverse("recovery-fence", args=[away]),
    ]


@pytest.mark.parametrize(
    ("kind", "status"), [("anonymous", 302), ("stranger", 403), ("member", 403), ("admin", 200)]
)
def test_recovery_is_for_administrators(after, client_of, kind, status):
    for address in addresses(after):
        assert client_of(kind).get(address).status_code == status
    if kind != "admin":
        for address in addresses(after)[1:]:
            assert client_of(kind).post(address, {"reason": "x"}).status_code == status
        assert not OrphanContainer.objects.exclude(decision="").exists()


def test_missing_containers_are_listed_by_node(after, client_of):
    page = words(client_of("admin").get(reverse("recovery")))
    assert "2 containers need a decision." in page and "fw-c-newer22-1-1" in page
    assert "a-lindqvist" in page and "GPU 6" in page and "not in the database" in page
    assert "Fence node" in page and "a100-1" in page
    assert "h200-1" not in page


def test_an_action_is_confirmed_with_its_consequence(after, client_of):
    client = client_of("admin")
    keep = reverse("recovery-adopt", args=[after.row.public_id])
    asked = words(client.get(keep))
    assert 'owner <b class="fw-medium">a-lindqvist</b>' in asked and "kept-after-restore" in asked
    assert "The same happens to the other ranks" in asked
    assert not Job.objects.filter(public_id="newer22").exists()
    done = words(client.post(keep, follow=True))
    assert "is adopted as the job kept-newer22 of a-lindqvist" in done and "Adopted containers" in done
    refused = client.post(reverse("recovery-stop", args=[after.row.public_id]))
    assert refused.status_code == 409 and "It is already being adopted." in words(refused)


def test_stopping_shows_until_it_is_proved(after, client_of):
    client = client_of("admin")
    client.post(reverse("recovery-stop", args=[after.row.public_id]))
    page = words(client.get(reverse("recovery")))
    assert "Waiting for proof that stopped containers are gone." in page and "Stopping" in page


def test_fencing_needs_a_justification(after, client_of):
    client, node = client_of("admin"), after.nodes["a100-1"]
    fence = reverse("recovery-fence", args=[node.public_id])
    assert "How do you know?" in words(client.get(fence))
    assert client.post(fence, {"reason": ""}).status_code == 400
    done = words(client.post(fence, {"reason": "switched off"}, follow=True))
    assert "a100-1 is fenced" in done
    answering = client.post(reverse("recovery-fence", args=[after.nodes["ada-1"].public_id]), {"reason": "x"})
    assert answering.status_code == 409


def test_a_banner_on_every_administration_page_links_to_recovery(after, client_of):
    for page in ("home", "cluster", "jobs", "quotas", "users", "audit"):
        shown = words(client_of("admin").get(reverse(page)))
        assert "1 node is unreachable and 2 unknown containers need a decision." in shown, page
        assert f'href="{reverse("recovery")}"' in shown
    assert "no job starts yet" not in words(client_of("member").get(reverse("home")))
    ClusterSettings.objects.update(recovery_mode=False)
    assert "no job starts yet" not in words(client_of("admin").get(reverse("home")))


def test_without_a_restore_the_page_reports_it(dataset, client_of):
    assert "Nothing to decide" in words(client_of("admin").get(reverse("recovery")))
