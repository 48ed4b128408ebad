"""Image pins: which image a tag means is agreed on once, stored with each job, and changed by administrators.

A pin identifies one image: ``name@sha256:...`` in a registry, or ``sha256:...`` (the digest of its
configuration) for a loaded image. What a tag names on a node is a claim of that node, stored in its own row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.node.spec.image_names import normalize_image_name
from portal.access import Permission, require_permission
from portal.domain.jobs.reasons import EndReason
from portal.domain.nodes.node_breaker import BreakerState
from portal.domain.states import CONTAINER_RUNTIMES, NodeState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.models import Environment, ImagePresence, Job, Node, Task, User
from portal.outbox import notify_node
from portal.selectors.environments.environments import nodes_by_pin, tag_claims
from portal.services.audit import record_action
from portal.services.environments.archives import archive_config_digest
from portal.services.environments.environments import compatible_nodes
from portal.services.lifecycle.state_events import record_event

ImageRow = Mapping[str, Any]
"""An image as a node reports it: image_id, refs and digests."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MIN_AGREEING_NODES = 2
"""Number of nodes that must report the same image before it applies to others; fewer if fewer can run it."""


def pin_of(environment: Environment, image: ImageRow) -> str:
    """Return the pin of a node's image under the environment's tag; blank without a usable digest."""
    name, _, tag = environment.image.rpartition(":")
    if not name or "/" in tag:
        name = environment.image
    digests = [
        each.rpartition("@")[2]
        for each in map(str, image["digests"])
        if not each.startswith("localhost/") and _same_name(each, name)
    ]
    digests = [digest for digest in digests if DIGEST.fullmatch(digest)]
    if digests and not environment.archive:
        return f"{name}@{min(digests)}"
    image_id = str(image["image_id"])
    return image_id if DIGEST.fullmatch(image_id) else ""


def tagged_images(environment: Environment, images: Iterable[ImageRow]) -> list[ImageRow]:
    """Return a node's images under the environment's tag: several if it has several image stores."""
    wanted = normalize_image_name(environment.image)
    return [row for row in images if any(normalize_image_name(ref) == wanted for ref in row["refs"])]


def has_pin(pin: str, images: Iterable[ImageRow]) -> bool:
    """Return True if a node has the image of a pin; False for a blank pin."""
    wanted = normalize_image_name(pin)
    return bool(pin) and any(
        wanted in (normalize_image_name(str(name)) for name in (row["image_id"], *row["digests"]))
        for row in images
    )


def record_claim(environment: Environment, node: Node, images: Iterable[ImageRow]) -> ImagePresence:
    """Store what the environment's tag names on a node, and pin the environment once nodes agree.

    Return the node's row. Updates ``environment`` if it was pinned.
    """
    row, _ = ImagePresence.objects.get_or_create(
        environment=environment, node=node, defaults={"state": "missing"}
    )
    claim = _claimed_pin(environment, node, images)
    if row.image_pin != claim:
        row.image_pin = claim
        row.save(update_fields=["image_pin"])
    if claim and not environment.image_digest:
        _pin_environment(environment)
    return row


def _claimed_pin(environment: Environment, node: Node, images: Iterable[ImageRow]) -> str:
    """Return the pin of what the tag names on a node; blank if none.

    An image can have several digests, so the environment's pin is preferred, then what other nodes report.
    """
    tagged = [image for image in tagged_images(environment, images) if pin_of(environment, image)]
    if not tagged or "@" in environment.image:
        return ""
    known = [environment.image_digest]
    if not environment.image_digest:
        others = tag_claims().filter(environment=environment).exclude(node=node)
        known = [pin for pin, _ in Counter(row.image_pin for row in others).most_common()]
    for pin in known:
        if all(has_pin(pin, [image]) for image in tagged):
            return pin
    return next(
        pin_of(environment, image) for image in tagged if not has_pin(environment.image_digest, [image])
    )


def _pin_environment(environment: Environment) -> None:
    """Pin an unresolved environment to the image that most nodes report, once enough of them do.

    Quarantined nodes do not count. The image in the environment's archive counts like a node.
    """
    nodes = compatible_nodes(environment)
    claims = nodes_by_pin(
        tag_claims()
        .filter(environment=environment, node__in=nodes)
        .exclude(node__breaker_state=BreakerState.QUARANTINED.value)
    )
    votes = Counter({pin: len(names) for pin, names in claims.items()})
    archived = archive_config_digest(environment.archive, environment.image) if environment.archive else ""
    if archived in votes:
        votes[archived] += 1
    (pin, most), (_, second) = (*votes.most_common(2), ("", 0), ("", 0))[:2]
    if most == second or most < min(MIN_AGREEING_NODES, len(nodes)):
        return
    with transaction.atomic():
        unpinned = Environment.objects.filter(
            pk=environment.pk, image_digest="", image=environment.image, archive=environment.archive
        )
        if (row := unpinned.select_for_update(no_key=True).first()) is not None:
            row.image_digest, row.image_resolved_at = pin, timezone.now()
            row.image_resolved_by = ", ".join(claims[pin])[:200]
            row.save(update_fields=["image_digest", "image_resolved_at", "image_resolved_by"])
            after = {"digest": pin, "nodes": claims[pin]}
            record_action(None, "environment.image_resolved", row, after=after)
    environment.refresh_from_db(fields=["image_digest"])


def pin_job(task: Task) -> str:
    """Return the pin of a task's job; blank if not known yet.

    Without one, the job takes its environment's pin, else what the tag names on the task's node; all ranks
    and later attempts use the same. Only a pin from a single node is replaced, by the next attempt after one
    that ended because a node could not get that image.
    """
    attempt, job = task.attempt, task.attempt.job
    if job.image_digest and job.image_attempt in (None, attempt.number):
        return job.image_digest
    with transaction.atomic():
        row = Job.objects.select_for_update(no_key=True).get(pk=job.pk)
        lost = row.image_attempt is not None and row.attempts.filter(
            number__gte=row.image_attempt, number__lt=attempt.number, reason=EndReason.IMAGE_MISSING.value
        )
        if not row.image_digest or (lost and lost.exists()):
            before, agreed = row.image_digest, Environment.objects.get(pk=job.environment_id).image_digest
            claims = ImagePresence.objects.filter(node=task.node_id, environment=job.environment_id)
            row.image_digest = agreed or claims.values_list("image_pin", flat=True).first() or ""
            row.image_attempt = None if agreed else attempt.number
            if row.image_digest:
                row.save(update_fields=["image_digest", "image_attempt"])
            if row.image_digest and before not in ("", row.image_digest):
                message = stored_text(
                    f"Uses {row.image_digest} from now on. Only one node had reported "
                    f"{before}, and another could not pull it."
                )
                record_event(attempt, "note", "image_replaced", message)
    job.image_digest, job.image_attempt = row.image_digest, row.image_attempt
    return job.image_digest


def do_check_tag(actor: User, environment: Environment) -> Node:
    """Make one node pull the environment's tag, to detect a changed image; return the node."""
    require_permission(actor, Permission.CHANGE, environment)
    if environment.runtime not in CONTAINER_RUNTIMES or "@" in environment.image:
        raise Conflict(
            _("The image of {title} is not referenced by a tag.").format(title=environment.title),
            code="no_tag",
        )
    ready = (row for row in compatible_nodes(environment) if row.state == NodeState.READY and row.reachable)
    node = next(ready, None)
    if node is None:
        raise Conflict(_("No reachable node can pull it now."), code="no_node")
    with transaction.atomic():
        wanted = {"pull_requested_at": timezone.now(), "check_tag": True}
        created = wanted | {"state": "missing"}
        ImagePresence.objects.update_or_create(
            environment=environment, node=node, defaults=wanted, create_defaults=created
        )
        record_action(actor, "environment.check_tag", environment, after={"node": node.name})
        notify_node(node.public_id, "bring")
    return node


def do_update_image(actor: User, environment: Environment, pin: str = "") -> Environment:
    """Pin the environment to an image that its tag names on a node; submitted jobs keep their pin.

    ``pin`` may be blank if nodes report a single other image.
    """
    require_permission(actor, Permission.CHANGE, environment)
    with transaction.atomic():
        row = Environment.objects.select_for_update(no_key=True).get(pk=environment.pk)
        claims = nodes_by_pin(tag_claims().filter(environment=row))
        claims.pop(row.image_digest, None)
        if not claims:
            raise Conflict(_("No node reports another image for this tag."), code="image_unchanged")
        if not pin and len(claims) > 1:
            message = _("Nodes report {count} other images for this tag: {claims}. Choose one.").format(
                count=len(claims), claims=", ".join(claims)
            )
            raise Conflict(message, code="ambiguous_image")
        pin = pin or next(iter(claims))
        if pin not in claims:
            raise InvalidRequest(fields={"image_digest": _("No node reports this image for the tag now.")})
        before = row.image_digest
        row.image_digest, row.image_resolved_by = pin, actor.username
        row.image_resolved_at, row.image_cuda = timezone.now(), ""
        row.save()
        after = {"digest": pin, "nodes": claims[pin]}
        record_action(actor, "environment.update_image", row, before={"digest": before}, after=after)
        ImagePresence.objects.filter(environment=row, state="present").update(state="missing")
        for node in compatible_nodes(row):
            notify_node(node.public_id, "images")
    return row


def _same_name(digest: str, name: str) -> bool:
    return normalize_image_name(digest).partition("@")[0] == normalize_image_name(name).rpartition(":")[0]
