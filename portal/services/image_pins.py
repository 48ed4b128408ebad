"""Which image an environment's tag means: resolved once, recorded with each job, and changed by administrators only.

A pin is how a node starts exactly one image: ``name@sha256:...`` for one of a registry, ``sha256:...`` (the digest of
its configuration) for one that was loaded. Nodes resolve a tag: the first one that has the image, or pulls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.db import transaction
from django.utils import timezone

from agents.node.image_names import plain_name
from portal.access import Verb, require
from portal.errors import Conflict
from portal.models import Environment, EnvironmentOnNode, Job, Node, User
from portal.services.audit import record_act
from portal.services.catalogue import nodes_for
from portal.wake import hint_node, hint_nodes
from portal.words.states import CONTAINERS, NodeState

ImageRow = Mapping[str, Any]
"""An image as a node reports it: image_id, refs and digests."""


def pin_of(environment: Environment, image: ImageRow) -> str:
    """The pin of an image that a node has under the environment's tag."""
    name, _, tag = environment.image.rpartition(":")
    if not name or "/" in tag:
        name = environment.image
    digests = [
        each.rpartition("@")[2]
        for each in map(str, image["digests"])
        if not each.startswith("localhost/") and _same_name(each, name)
    ]
    return f"{name}@{min(digests)}" if digests and not environment.archive else str(image["image_id"])


def tagged_images(environment: Environment, images: Iterable[ImageRow]) -> list[ImageRow]:
    """The images that a node has under the environment's tag: several where it has several stores."""
    wanted = plain_name(environment.image)
    return [row for row in images if any(plain_name(ref) == wanted for ref in row["refs"])]


def has_pin(pin: str, images: Iterable[ImageRow]) -> bool:
    """Whether a node has the image of a pin."""
    wanted = plain_name(pin)
    return any(
        wanted in (plain_name(str(name)) for name in (row["image_id"], *row["digests"])) for row in images
    )


def has_all(pin: str, images: Iterable[ImageRow]) -> bool:
    """Whether each of these is the image of a pin."""
    return all(has_pin(pin, [row]) for row in images)


def record_tag(environment: Environment, node: Node, images: Iterable[ImageRow]) -> None:
    """Record what the environment's tag names on a node: the first answer is its pin, another one is shown.

    Updates ``environment`` when it was resolved meanwhile.
    """
    tagged = tagged_images(environment, images)
    if not tagged or "@" in environment.image:
        return
    known = environment.image_digest
    if known and has_all(known, tagged) and environment.image_retagged_on != node.name:
        return
    with transaction.atomic():
        row = Environment.objects.select_for_update(no_key=True).get(pk=environment.pk)
        others = [image for image in tagged if not has_pin(row.image_digest, [image])]
        if not row.image_digest:
            row.image_digest, row.image_resolved_at = pin_of(environment, tagged[0]), timezone.now()
            row.image_resolved_by = node.name
            after = {"digest": row.image_digest, "node": node.name}
            record_act(None, "environment.image_resolved", row, after=after)
        elif others:
            row.image_retagged, row.image_retagged_on = pin_of(environment, others[0]), node.name
        elif row.image_retagged_on == node.name:
            row.image_retagged = row.image_retagged_on = ""
        row.save(
            update_fields=[
                "image_digest",
                "image_resolved_at",
                "image_resolved_by",
                "image_retagged",
                "image_retagged_on",
            ]
        )
    for key in ("image_digest", "image_retagged", "image_retagged_on"):
        setattr(environment, key, getattr(row, key))


def pin_job(job: Job) -> str:
    """The pin of a job, taken from its environment where it has none yet; blank: nobody resolved that yet.

    Every rank and every later attempt uses the same.
    """
    if not job.image_digest:
        pin = Environment.objects.values_list("image_digest", flat=True).get(pk=job.environment_id)
        if pin:
            Job.objects.filter(pk=job.pk, image_digest="").update(image_digest=pin)
        job.image_digest = Job.objects.values_list("image_digest", flat=True).get(pk=job.pk)
    return job.image_digest


def do_check_tag(actor: User, environment: Environment) -> Node:
    """Have one node pull the environment's tag, to see whether it names another image now; gives the node."""
    require(actor, Verb.CHANGE, environment)
    if environment.runtime not in CONTAINERS or "@" in environment.image:
        raise Conflict(f"The image of {environment.title} has no tag that could change.", code="no_tag")
    nodes = [row for row in nodes_for(environment) if row.state == NodeState.READY.value and row.reachable]
    if not nodes:
        raise Conflict("No node that answers can pull it now.", code="no_node")
    with transaction.atomic():
        Environment.objects.filter(pk=environment.pk).update(check_tag=True)
        EnvironmentOnNode.objects.update_or_create(
            environment=environment,
            node=nodes[0],
            defaults={"wanted_at": timezone.now()},
            create_defaults={"wanted_at": timezone.now(), "state": "missing"},
        )
        record_act(actor, "environment.check_tag", environment, after={"node": nodes[0].name})
        hint_nodes({nodes[0].public_id: ("bring", "")})
    return nodes[0]


def do_update_image(actor: User, environment: Environment) -> Environment:
    """Pin the environment to the image that its tag names now; jobs that were submitted keep theirs."""
    require(actor, Verb.CHANGE, environment)
    with transaction.atomic():
        row = Environment.objects.select_for_update(no_key=True).get(pk=environment.pk)
        if not row.image_retagged:
            raise Conflict("No node reports another image under this tag.", code="image_unchanged")
        before = row.image_digest
        row.image_digest, row.image_resolved_by = row.image_retagged, row.image_retagged_on
        row.image_resolved_at, row.image_retagged, row.image_retagged_on = timezone.now(), "", ""
        row.image_cuda = ""
        row.save()
        record_act(
            actor,
            "environment.update_image",
            row,
            before={"digest": before},
            after={"digest": row.image_digest, "node": row.image_resolved_by},
        )
        EnvironmentOnNode.objects.filter(environment=row, state="present").update(state="missing")
        for node in nodes_for(row):
            hint_node(node.public_id, "images")
    return row


def _same_name(digest: str, name: str) -> bool:
    return plain_name(digest).partition("@")[0] == plain_name(name).rpartition(":")[0]
