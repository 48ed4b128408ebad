"""Repeats an ended job exactly, and lists what differs from it: before the submission, and after its start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.states import NodeState, RuntimeKind
from portal.errors import Conflict, FairwayError, InvalidRequest
from portal.models import EnvironmentRecord, Gpu, ImagePresence, Job, Node, Rerun, User
from portal.selectors.nodes.gpu_states import COUNTED_GPU
from portal.services.jobs.submission import (
    check_resubmission,
    create_job,
    preview_start,
    request_from_job,
    validate_request,
)

MAX_PACKAGES_NAMED = 20


@dataclass(frozen=True)
class Drift:
    """One difference from the first run. With a blocking one nothing can be submitted."""

    code: str
    message: str
    blocking: bool = False


def find_drift(user: User, job: Job) -> list[Drift]:
    """Return what is known before a rerun of the job to differ, blocking ones first."""
    require_permission(user, Permission.CONTROL, job)
    check_resubmission(user, job)
    record = record_of(job)
    return [*_refusals(user, job), *_image_drift(job), *_node_drift(job, record), *_code_drift(job, record)]


def do_rerun(user: User, job: Job, *, dry_run: bool = False) -> tuple[list[Drift], Job | None]:
    """Submit the job again with its image by digest, its commit, its seed and its request; return drift and job.

    A dry run submits nothing. Raise Conflict if a difference is blocking.
    """
    drift = find_drift(user, job)
    if dry_run:
        return drift, None
    if blocking := next((each for each in drift if each.blocking), None):
        raise Conflict(blocking.message, code=blocking.code)
    request = request_from_job(job)
    if commit := checked_out_commit(job):
        request = replace(request, code_ref=commit)
    preview_start(user, request)
    with transaction.atomic():
        fresh = create_job(user, request, image_digest=job.image_digest)
        Rerun.objects.create(job=fresh, source=job)
    return drift, fresh


def record_of(job: Job) -> EnvironmentRecord | None:
    """Return what was recorded of the job; None if nothing was."""
    return EnvironmentRecord.objects.filter(job=job, recorded_at__isnull=False).first()


def checked_out_commit(job: Job) -> str:
    """Return the commit of its repository that the job checked out; blank without one."""
    commits = job.attempts.exclude(code_commit="").order_by("-number").values_list("code_commit", flat=True)
    return commits.first() or "" if job.code_repository else ""


def compare_with_source(job: Job) -> list[Drift] | None:
    """Return how a rerun differs from its source; None if one of the two has no record."""
    source = Rerun.objects.filter(job=job).values_list("source", flat=True).first()
    old = EnvironmentRecord.objects.filter(job=source, recorded_at__isnull=False).first() if source else None
    new = record_of(job)
    return None if old is None or new is None else list(_record_drift(old, new))


def _refusals(user: User, job: Job) -> Iterator[Drift]:
    """What the submission would be rejected for, such as a missing volume or secret."""
    try:
        validate_request(user, request_from_job(job))
    except InvalidRequest as error:
        for field, message in error.fields.items():
            yield Drift(f"{field}_unavailable", message, blocking=True)
    except FairwayError as error:
        yield Drift(error.code or "not_permitted", error.message, blocking=True)


def _image_drift(job: Job) -> Iterator[Drift]:
    environment = job.environment
    if environment.runtime == RuntimeKind.PROCESS.value:
        yield Drift("no_image", _("It ran without a container: the software of the node is not pinned."))
        return
    if not job.image_digest:
        yield Drift("image_unknown", _("Its image was never resolved, so the present one is used."))
        return
    if environment.image_digest == job.image_digest:
        return
    yield Drift(
        "environment_changed",
        _("{title} has another image now. The rerun uses the recorded one, {digest}.").format(
            title=environment.title, digest=job.image_digest
        ),
    )
    if not ImagePresence.objects.filter(image_pin=job.image_digest, state="present").exists():
        pullable = "@" in job.image_digest
        message = (
            _("No node has the recorded image. It must be pulled by its digest, which may fail.")
            if pullable
            else _("No node has the recorded image. It was loaded from an archive, which may fail.")
        )
        yield Drift("image_not_present", message)


def _node_drift(job: Job, record: EnvironmentRecord | None) -> Iterator[Drift]:
    """Where the rerun may be placed: drivers and GPU models of ready nodes."""
    if record is None:
        return
    nodes = Node.objects.filter(state=NodeState.READY.value, runtime=job.environment.runtime)
    if job.pool_id is not None:
        nodes = nodes.filter(pool=job.pool_id)
    drivers = {str(info.get("driver") or "") for info in nodes.values_list("agent_info", flat=True)}
    if record.driver and (other := sorted(drivers - {record.driver})):
        seen = ", ".join(each or _("none") for each in other)
        text = (
            _("It ran with driver {driver}. Ready nodes also have {others}.")
            if record.driver in drivers
            else _("It ran with driver {driver}. Ready nodes only have {others}.")
        )
        yield Drift("driver", text.format(driver=record.driver, others=seen))
    if not record.gpu_model or job.gpu_model:
        return
    models = set(Gpu.objects.filter(COUNTED_GPU, node__in=nodes).values_list("model", flat=True))
    if other := sorted(models - {record.gpu_model}):
        text = (
            _("It ran on {model}. Ready nodes also have {others}.")
            if record.gpu_model in models
            else _("It ran on {model}. Ready nodes only have {others}.")
        )
        yield Drift("gpu_model", text.format(model=record.gpu_model, others=", ".join(other)))


def _code_drift(job: Job, record: EnvironmentRecord | None) -> Iterator[Drift]:
    """What cannot be repeated for certain: code that no commit names is read when the job starts."""
    if job.seed is None:
        yield Drift("no_seed", _("It has no seed in FAIRWAY_SEED."))
    if job.code_repository and not checked_out_commit(job):
        ref = job.code_ref or _("the default branch")
        yield Drift(
            "commit_unknown",
            _("No commit was checked out. The rerun uses {ref} as it is then.").format(ref=ref),
        )
    if record is None:
        yield Drift("no_record", _("Its code and packages were not recorded, so they cannot be compared."))
        return
    if not record.git_commit:
        yield Drift("no_commit", _("Its code was not in a git repository with a commit."))
    if record.git_diff_bytes or record.untracked_files:
        yield Drift(
            "not_committed",
            _("It ran with uncommitted changes ({size} bytes) and {count} untracked files.").format(
                size=record.git_diff_bytes or 0, count=len(record.untracked_files)
            ),
        )


def _record_drift(old: EnvironmentRecord, new: EnvironmentRecord) -> Iterator[Drift]:
    for code, label in (
        ("git_commit", _("Commit")),
        ("git_remote", _("Remote")),
        ("python_version", "Python"),
        ("driver", _("Driver")),
        ("gpu_model", _("GPU model")),
    ):
        before, after = getattr(old, code), getattr(new, code)
        if before != after:
            text = _("{label}: {before} before, {after} now.")
            yield Drift(code, text.format(label=label, before=before or _("none"), after=after or _("none")))
    if (old.git_diff, old.git_diff_bytes) != (new.git_diff, new.git_diff_bytes):
        yield Drift("git_diff", _("The uncommitted changes differ."))
    yield from _package_drift("packages", _("Packages"), old.packages, new.packages)
    yield from _package_drift("conda_packages", _("Conda packages"), old.conda_packages, new.conda_packages)


def _package_drift(code: str, label: str, old: Sequence[str], new: Sequence[str]) -> Iterator[Drift]:
    changes = [f"- {each}" for each in old if each not in set(new)]
    changes += [f"+ {each}" for each in new if each not in set(old)]
    if changes:
        more = len(changes) - MAX_PACKAGES_NAMED
        named = ", ".join(sorted(changes[:MAX_PACKAGES_NAMED], key=lambda each: each[2:].lower()))
        text = _("{label}: {named} and {more} more.") if more > 0 else _("{label}: {named}.")
        yield Drift(code, text.format(label=label, named=named, more=more))
