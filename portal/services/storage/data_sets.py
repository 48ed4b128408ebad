"""Data sets: entries of users for directories and files of declared volumes, with versions."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.storage.data_sets import (
    DATA_KINDS,
    MAX_DATA_SETS,
    MAX_DESCRIPTION_LENGTH,
    MAX_LABEL_LENGTH,
    MAX_NOTE_LENGTH,
    MAX_PATH_LENGTH,
    MAX_VERSIONS,
    DataSetVisibility,
    is_label,
    is_path,
)
from portal.domain.storage.volumes import VolumeKind
from portal.errors import Conflict, InvalidRequest
from portal.models import DataSet, DataSetVersion, Project, User, Volume
from portal.services.audit import record_action, record_change
from portal.services.names import atomic_unique, check_name
from portal.services.storage.data_set_sizes import request_measurement
from portal.services.storage.volumes import usable_volumes


@dataclass(frozen=True)
class VersionInput:
    """A version as its author writes it; ``volume`` by name."""

    label: str
    volume: str
    path: str = ""
    note: str = ""


def do_create_data_set(
    user: User,
    project: Project,
    *,
    name: str,
    description: str = "",
    visibility: str = DataSetVisibility.PROJECT.value,
) -> DataSet:
    """Create a data set without versions."""
    require_permission(user, Permission.SUBMIT, project)
    check_name(name)
    _check_fields(description, visibility)
    if DataSet.objects.filter(project=project).count() >= MAX_DATA_SETS:
        message = _("{name} has {count} data sets, which is the limit.").format(
            name=project.name, count=MAX_DATA_SETS
        )
        raise Conflict(message, code="too_many_data_sets")
    fields = {"name": name, "description": description, "visibility": visibility}
    taken = _("{project} already has a data set called {name}.").format(project=project.name, name=name)
    with atomic_unique("name", taken):
        row = DataSet.objects.create(project=project, created_by=user, **fields)
        record_action(user, "data_set.create", row, after={**fields, "project": project.name})
    return row


def do_change_data_set(
    user: User, data_set: DataSet, *, description: str | None = None, visibility: str | None = None
) -> DataSet:
    """Change the given fields; the name is fixed."""
    require_permission(user, Permission.CHANGE, data_set)
    with transaction.atomic():
        row = DataSet.objects.select_for_update(of=("self",)).select_related("project").get(pk=data_set.pk)
        before = {"description": row.description, "visibility": row.visibility}
        row.description = row.description if description is None else description
        row.visibility = row.visibility if visibility is None else visibility
        _check_fields(row.description, row.visibility)
        volume = Volume.objects.filter(data_set_versions__data_set=row, kind=VolumeKind.PROJECT.value).first()
        if row.visibility == DataSetVisibility.EVERYONE and volume is not None:
            raise InvalidRequest(fields={"visibility": _own_folder_message(volume)})
        row.save(update_fields=["description", "visibility"])
        after = {"description": row.description, "visibility": row.visibility}
        record_change(user, "data_set.change", row, before, after, reason="")
    return row


def do_delete_data_set(user: User, data_set: DataSet) -> None:
    """Delete a data set with its versions; files and jobs are not affected."""
    require_permission(user, Permission.MANAGE, data_set)
    with transaction.atomic():
        row = DataSet.objects.select_for_update(of=("self",)).select_related("project").get(pk=data_set.pk)
        before = {
            "project": row.project.name,
            "description": row.description,
            "visibility": row.visibility,
            "versions": list(row.versions.values_list("label", flat=True)),
        }
        record_action(user, "data_set.delete", row, before=before)
        row.delete()


def do_add_version(user: User, data_set: DataSet, given: VersionInput) -> DataSetVersion:
    """Add a version, which becomes the default, and begin to measure it."""
    require_permission(user, Permission.CHANGE, data_set)
    taken = _("{name} already has a version {label}.").format(name=data_set.name, label=given.label)
    with atomic_unique("label", taken):
        locked = DataSet.objects.select_for_update(of=("self",)).select_related("project").get(pk=data_set.pk)
        volume = _check_version(locked, given)
        if locked.versions.count() >= MAX_VERSIONS:
            message = _("{name} has {count} versions, which is the limit. Delete old ones.").format(
                name=locked.name, count=MAX_VERSIONS
            )
            raise Conflict(message, code="too_many_versions")
        row = DataSetVersion.objects.create(
            data_set=locked,
            label=given.label,
            volume=volume,
            path=given.path,
            note=given.note,
            created_by=user,
        )
        record_action(user, "data_set.add_version", locked, after=_audit_values(row))
        request_measurement(row)
    return row


def do_delete_version(user: User, version: DataSetVersion) -> None:
    """Delete a version; its files and jobs are not affected, and the newest of the others is the default."""
    require_permission(user, Permission.MANAGE, version.data_set)
    with transaction.atomic():
        record_action(user, "data_set.delete_version", version.data_set, before=_audit_values(version))
        version.delete()


def do_measure_version(user: User, version: DataSetVersion) -> DataSetVersion:
    """Measure a version again, unless it is being measured."""
    require_permission(user, Permission.CHANGE, version.data_set)
    with transaction.atomic():
        row = DataSetVersion.objects.select_for_update(of=("self",)).get(pk=version.pk)
        if row.measure_requested_at is None:
            record_action(user, "data_set.measure", version.data_set, after={"version": row.label})
            request_measurement(row)
    return row


def _check_fields(description: str, visibility: str) -> None:
    wrong: dict[str, str] = {}
    if len(description) > MAX_DESCRIPTION_LENGTH:
        wrong["description"] = _("Enter at most {max_description_length} characters.").format(
            max_description_length=MAX_DESCRIPTION_LENGTH
        )
    if visibility not in set(DataSetVisibility):
        wrong["visibility"] = _("Choose one of {values}.").format(values=", ".join(DataSetVisibility))
    if wrong:
        raise InvalidRequest(fields=wrong)


def _check_version(data_set: DataSet, given: VersionInput) -> Volume:
    """Return the volume of a valid version. Raise InvalidRequest."""
    wrong: dict[str, str] = {}
    if not is_label(given.label):
        wrong["label"] = _(
            "Use at most {max_label_length} letters, digits and . _ + -, and begin with a letter or digit."
        ).format(max_label_length=MAX_LABEL_LENGTH)
    if not is_path(given.path):
        wrong["path"] = _(
            "Enter a relative path below the volume of at most {max_path_length} bytes, such as "
            "imagenet/2012, without .. and without / at its beginning or end."
        ).format(max_path_length=MAX_PATH_LENGTH)
    if len(given.note) > MAX_NOTE_LENGTH:
        wrong["note"] = _("Enter at most {max_note_length} characters.").format(
            max_note_length=MAX_NOTE_LENGTH
        )
    volumes = data_volumes(data_set.project)
    volume = next((each for each in volumes if each.name == given.volume), None)
    if volume is None:
        names = ", ".join(each.name for each in volumes) or _("none is declared")
        wrong["volume"] = _("Choose a volume that jobs of {project} may use: {names}.").format(
            project=data_set.project.name, names=names
        )
    elif volume.kind == VolumeKind.PROJECT and data_set.visibility == DataSetVisibility.EVERYONE:
        wrong["volume"] = _own_folder_message(volume)
    if wrong or volume is None:
        raise InvalidRequest(fields=wrong)
    return volume


def data_volumes(project: Project) -> list[Volume]:
    """Return the volumes on which a project can have data sets, by name."""
    return list(usable_volumes(project).filter(kind__in=DATA_KINDS).order_by("name"))


def _own_folder_message(volume: Volume) -> str:
    return _(
        "{volume} has a separate folder for each project, so only its project can use the data set."
    ).format(volume=volume.name)


def _audit_values(row: DataSetVersion) -> dict[str, str]:
    return {"version": row.label, "volume": row.volume.name, "path": row.path, "note": row.note}
