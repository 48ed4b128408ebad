"""Pulls images to nodes before jobs need them, on request of administrators.

The row of environment and node is the request: it stays until the image is present or the pull failed, and
the node's actor finds it even if its notification is lost.
"""

from __future__ import annotations

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.states import CONTAINER_RUNTIMES
from portal.errors import Conflict
from portal.models import Environment, ImagePresence, Node, Task, User
from portal.outbox import notify_nodes
from portal.services.audit import record_action
from portal.services.environments.environments import compatible_nodes

PULL_IMAGE = "bring"
"""The verb that notifies a node's actor of images to pull."""


def do_prefetch_image(actor: User, environment: Environment, node: Node | None = None) -> int:
    """Make the nodes without an environment's image, or only ``node``, pull it; return how many.

    An unreachable node pulls it when it returns. Raise Conflict for an environment without an image, and for
    a node that cannot run it.
    """
    require_permission(actor, Permission.CHANGE, environment)
    if environment.runtime not in CONTAINER_RUNTIMES:
        message = _("{title} runs without a container: there is no image to pull.").format(
            title=environment.title
        )
        raise Conflict(message, code="no_image")
    nodes = [each for each in compatible_nodes(environment) if node is None or each.pk == node.pk]
    if node is not None and not nodes:
        raise Conflict(_("{name} has no container runtime.").format(name=node.name), code="no_image")
    with transaction.atomic():
        there = ImagePresence.objects.filter(environment=environment, state="present")
        present = set(there.values_list("node_id", flat=True))
        there.filter(node__in=nodes).update(prefetched=True)
        lacking = [each for each in nodes if each.pk not in present]
        now = timezone.now()
        wanted = {"state": "missing", "pull_requested_at": now, "prefetched": True}
        ImagePresence.objects.bulk_create(
            (ImagePresence(environment=environment, node=each, **wanted) for each in lacking),
            update_conflicts=True,
            unique_fields=["environment", "node"],
            update_fields=["pull_requested_at", "prefetched"],
        )
        notify_nodes({each.public_id: (PULL_IMAGE, "") for each in lacking})
        if lacking:
            names = [each.name for each in lacking]
            record_action(actor, "environment.prefetch", environment, after={"nodes": names})
    return len(lacking)


def do_cancel_prefetch(actor: User, environment: Environment) -> int:
    """Cancel pulls that have not started; return for how many nodes. Pulls in progress continue."""
    require_permission(actor, Permission.CHANGE, environment)
    with transaction.atomic():
        waiting = ImagePresence.objects.filter(environment=environment, pull_requested_at__isnull=False)
        stopped = waiting.exclude(state="loading").update(pull_requested_at=None, prefetched=False)
        if stopped:
            record_action(actor, "environment.cancel_prefetch", environment, after={"nodes": stopped})
    return stopped


def images_to_pull(node_id: int) -> list[Environment]:
    """Return the environments to pull to a node (id), in the order of the requests."""
    rows = ImagePresence.objects.filter(node_id=node_id, pull_requested_at__isnull=False)
    return [row.environment for row in rows.order_by("pull_requested_at", "id").select_related("environment")]


def protected_images(node_id: int) -> list[str]:
    """Return the images that must stay on a node (id): prefetched and still enabled, or used by its tasks."""
    ahead = Q(enabled=True, image_presences__node=node_id, image_presences__prefetched=True)
    needed = Task.objects.filter(node_id=node_id, container_removed=False).values("attempt__job__environment")
    rows = Environment.objects.filter(ahead | Q(pk__in=needed)).distinct()
    names = rows.order_by("id").values_list("image", "image_digest")
    tasks = Task.objects.filter(node_id=node_id, container_removed=False)
    pins = tasks.order_by("id").values_list("attempt__job__image_digest", flat=True)
    return [name for each in (*names, pins) for name in each if name]


def nodes_with_images_to_pull() -> list[str]:
    """Return the public ids of nodes with images to pull, even if their notification was lost."""
    rows = ImagePresence.objects.filter(pull_requested_at__isnull=False)
    return list(rows.values_list("node__public_id", flat=True).distinct())
