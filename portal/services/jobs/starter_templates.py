"""The shipped templates: declared in ``deploy/training/templates.yaml``, with their programs beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

import yaml
from django.conf import settings

from portal.domain.jobs.template_parameters import placeholders
from portal.models import Template, TemplateVersion
from portal.services.jobs.job_templates import TemplateInput, build_version
from portal.services.jobs.launching import training_program

PROGRAM_PATH = "{fairway:secrets}/program"


@cache
def shipped_templates() -> tuple[TemplateInput, ...]:
    """Return the templates without environment: users choose one with the framework."""
    folder = settings.BASE_DIR / "deploy/training"
    declared = yaml.safe_load((folder / "templates.yaml").read_text())
    return tuple(_build(each) for each in declared)


def _build(declared: dict[str, Any]) -> TemplateInput:
    given = {"scope": "everyone", **declared}
    if program := given.pop("program", None):
        used = placeholders(given["fields"])
        options = [each["name"] for each in given["parameters"] if each["name"] not in used]
        # a parameter that is the size of the job is an option of the program, too, if it has one of that name
        text = training_program(program)
        options += [name for name in sorted(used) if f'"--{name}"' in text]
        words = [word for name in options for word in (f"--{name}", f"{{{name}}}")]
        command = ["python", PROGRAM_PATH, *words]
        given["fields"] = {**given["fields"], "command": command, "program": text}
    return TemplateInput(**given)


def ensure_starter_templates() -> None:
    """Create the shipped templates that do not exist; existing ones keep their changes."""
    known = set(Template.objects.values_list("name", flat=True))
    new = [each for each in shipped_templates() if each.name not in known]
    fields = TemplateInput.__dataclass_fields__
    Template.objects.bulk_create(
        [Template(**{name: getattr(each, name) for name in fields}) for each in new], ignore_conflicts=True
    )
    unversioned = Template.objects.filter(name__in=[each.name for each in new], versions=None)
    TemplateVersion.objects.bulk_create([build_version(row) for row in unversioned], ignore_conflicts=True)
