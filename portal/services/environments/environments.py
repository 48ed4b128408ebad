"""Environments: the images and virtual environments that administrators allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from agents.node.spec.image_names import InvalidImageError, parse_image_reference
from portal.access import require_admin, require_own_account
from portal.domain.nodes.driver_versions import CUDA_VERSION, DRIVER_VERSION, NO_CUDA
from portal.domain.projects.project_tree import path_to_root
from portal.domain.states import NodeState, RuntimeKind, compatible_runtimes
from portal.errors import Conflict, InvalidRequest
from portal.models import Environment, ImagePresence, Job, Node, Project, User
from portal.models.public_id import name_error
from portal.outbox import notify_node, trigger_cycle
from portal.services.audit import record_action
from portal.services.lifecycle.rights_changes import DEFAULT_CHOICE, JobChoice, applying_choice
from portal.services.names import atomic_unique


@dataclass(frozen=True)
class EnvironmentInput:
    """Input of an environment. ``archive`` is a tar file on the portal that nodes load.

    ``projects`` and their descendants may run it: empty means all, None leaves them unchanged.
    """

    name: str
    title: str
    runtime: RuntimeKind
    description: str = ""
    image: str = ""
    archive: str = ""
    prefix: str = ""
    min_driver: str = ""
    min_cuda: str = ""
    tool: str = ""
    tool_command: tuple[str, ...] = ()
    tool_port: int | None = None
    enabled: bool = True
    projects: Sequence[Project] | None = None


RUN_COLUMNS = ("runtime", "image", "archive", "prefix", "tool", "tool_command", "tool_port")
"""What jobs of an environment run."""
COLUMNS = [key for key in EnvironmentInput.__dataclass_fields__ if key != "projects"]


def do_save_environment(
    actor: User | None,
    spec: EnvironmentInput,
    environment: Environment | None = None,
    *,
    choice: JobChoice | None = DEFAULT_CHOICE,
) -> Environment:
    """Create or change an environment; running jobs are not affected.

    ``choice``: what to do with jobs that may not use it any more.
    """
    if actor is not None:
        require_admin(actor, "change environments")
    _validate(spec, environment)
    row = environment or Environment()
    before = _audit_values(row) if environment else None
    runs = [getattr(row, key) for key in RUN_COLUMNS]
    for key in COLUMNS:
        setattr(row, key, getattr(spec, key))
    row.runtime, row.tool_command = spec.runtime.value, list(spec.tool_command)
    if actor is not None and row.owner is not None and runs != [getattr(row, key) for key in RUN_COLUMNS]:
        require_own_account(actor, row.owner, _("Disable it, or add another environment."))
    new_image = before is None or any(before[key] != getattr(spec, key) for key in ("image", "archive"))
    with atomic_unique("name", _("An environment with this name already exists."), code=None):
        if new_image:
            row.image_digest = spec.image if "@" in spec.image else ""
            row.image_resolved_by = row.image_cuda = ""
            row.image_resolved_at = None
        with applying_choice(actor, row, Job.objects.filter(environment=row.pk or 0), choice):
            row.save()
            if spec.projects is not None:
                row.projects.set(spec.projects)
        record_action(actor, "environment.save", row, before=before, after=_audit_values(row))
        if new_image:
            ImagePresence.objects.filter(environment=row).delete()
        for node in compatible_nodes(row):
            notify_node(node.public_id, "images")
        if before and any(before[key] != getattr(spec, key) for key in ("min_driver", "min_cuda")):
            trigger_cycle("environment")
    return row


def is_available_to(environment: Environment, project: Project) -> bool:
    """Return whether jobs of the project may use it: it is unrestricted, or shared with it or an ancestor."""
    allowed = set(environment.projects.values_list("pk", flat=True))
    line = path_to_root(project, lambda below: below.parent)
    shared = environment.owner_id is None
    return shared and (not allowed or not allowed.isdisjoint(each.pk for each in line))


def do_allow_environment(
    actor: User, environment: Environment, project: Project, *, requested_by: User
) -> None:
    """Let all users of a project use a restricted or private environment; an unrestricted one stays so.

    Raise Conflict for a private one unless its owner requested that: its image has files of the owner.
    """
    require_admin(actor, "change environments")
    with transaction.atomic():
        row = Environment.objects.select_for_update(no_key=True).get(pk=environment.pk)
        if row.owner not in (None, requested_by):
            raise Conflict(_("This environment is private; only its owner can share it."), code="private")
        if is_available_to(row, project):
            return
        before = _audit_values(row)
        row.projects.add(project)
        row.owner = None
        row.save(update_fields=["owner"])
        record_action(actor, "environment.save", row, before=before, after=_audit_values(row))
        trigger_cycle("environment")


def record_image_cuda(environment: Environment, node: Node, cuda: str) -> None:
    """Record the CUDA version that an environment's image requires of the driver, as this node reports it.

    The report applies to this node. Nodes without a report use what more than half of the reporting nodes
    say, but not the report of a single node if others can run the environment, because it would block jobs on
    all of them.
    """
    cuda = cuda if CUDA_VERSION.fullmatch(cuda) else ""
    rows = ImagePresence.objects.filter(environment=environment)
    with transaction.atomic():
        if not rows.filter(node=node).exclude(cuda=cuda).update(cuda=cuda):
            return
        reported = Counter(rows.filter(state="present").values_list("cuda", flat=True))
        ((most, times),) = reported.most_common(1) or (("", 0),)
        enough = 2 * times > reported.total() and (times > 1 or compatible_nodes(environment) == [node])
        Environment.objects.filter(pk=environment.pk).update(image_cuda=most if enough else "")
        trigger_cycle("environment")


def compatible_nodes(environment: Environment) -> list[Node]:
    rows = Node.objects.filter(runtime__in=compatible_runtimes(environment.runtime))
    return list(rows.exclude(state=NodeState.RETIRED.value).order_by("name"))


def image_error(image: str, environment: Environment | None = None) -> str | None:
    """Return why an environment cannot have an image of this name; None if it can.

    The images that users save have names too; only the environment that was saved may have such a name.
    """
    try:
        reference = parse_image_reference(image)
    except InvalidImageError:
        return _(
            "Enter an image of a registry, such as registry.example/name:tag or name@sha256:…; archives, "
            "folders and image ids of a node are not accepted."
        )
    saved = reference.is_saved_image and not (environment is not None and environment.image == image)
    return _("This is an image that a user saved; others cannot use it by its name.") if saved else None


def _validate(spec: EnvironmentInput, environment: Environment | None) -> None:
    wrong: dict[str, str] = {}
    if fault := name_error(spec.name):
        wrong["name"] = fault
    if not spec.title.strip():
        wrong["title"] = _("Enter a title.")
    if spec.runtime is RuntimeKind.PROCESS:
        if not spec.prefix.startswith("/"):
            wrong["prefix"] = _("Enter the path of a virtual environment on the node.")
    elif fault := image_error(spec.image, environment):
        wrong["image"] = fault
    if spec.archive and not spec.archive.startswith("/"):
        wrong["archive"] = _("Enter the full path of a tar file on the portal's machine.")
    if spec.min_driver and not DRIVER_VERSION.fullmatch(spec.min_driver):
        wrong["min_driver"] = _("Enter a driver version, such as 525.60.13.")
    if spec.min_cuda not in ("", NO_CUDA) and not CUDA_VERSION.fullmatch(spec.min_cuda):
        wrong["min_cuda"] = _("Enter a CUDA version, such as 12.4, or {no_cuda}.").format(no_cuda=NO_CUDA)
    if spec.tool and not spec.tool_command:
        wrong["tool_command"] = _("Enter the command that starts its tool.")
    if spec.tool and not (spec.tool_port and 1 <= spec.tool_port <= 65_535):
        wrong["tool_port"] = _("Must be between 1 and 65535.")
    if wrong:
        raise InvalidRequest(fields=wrong)


def _audit_values(row: Environment) -> dict[str, Any]:
    shown = {key: getattr(row, key) for key in COLUMNS if key != "description"}
    owner = {"owner": row.owner.username} if row.owner else {}
    return shown | owner | {"projects": sorted(row.projects.values_list("name", flat=True))}
