"""``manage.py subject-docs``: writes docs/subjects.md, where each subject stands in each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

SUBJECTS: Mapping[str, str] = {
    "accounts": "users, sign-in, invitations, sessions, tokens",
    "projects": "projects and members, quotas and their additions, secrets",
    "requests": "what users request of managers and administrators, and the answers",
    "reports": "usage, waits and idle time by day, project and user",
    "environments": "images and tools of jobs, registries, distribution of images to nodes",
    "storage": "volumes, data sets, uploads, usage of folders",
    "nodes": "nodes, pools and GPUs: adding, operations, drains, alerts, topologies, network links",
    "scheduling": "policy, queue, fair share, reservations, forecasts, cycles",
    "jobs": "launch, attempts, logs, files, checkpoints, failures, templates, schedules, pipeline plans",
    "workspaces": "entering a notebook or tool, terminals, SSH, sharing, saved environments",
    "sweeps": "searches and their trials",
    "serving": "model servers with replicas",
    "experiments": "runs, metrics and models of the tracking server",
    "notices": "inbox, web push, webhooks, announcements of administrators",
    "cluster": "the whole installation: overview, health, recovery, audit trail, demo",
}
LAYERS = ("domain", "models", "selectors", "services", "api", "web")
"""Lowest first; templates stand beside them."""
OTHER_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "services": {"lifecycle": "the only writer of job state"},
    "api": {"framework": "base of views", "serializers": "answers that several subjects share"},
    "web": {
        "display": "how values look",
        "middleware": "what every page has",
    },
    "templates": {
        "partials": "parts of several subjects",
        "home": "the first page",
        "help": "the handbook",
        "errors": "refusals",
        "api": "the page of the REST description",
    },
}
"""Packages that are not of one subject, by layer."""
HEADER = """# Subjects and layers

Written by `manage.py subject-docs`; a test fails when it differs. A subject has the same name in every layer, so
`portal/*/storage/` has all of volumes and data sets. Layers import downwards only: web and api, services, selectors,
models, domain. What no subject owns stands at the top of its layer.
"""


def subjects_text() -> str:
    """Return the page: a section for each subject, and the packages beside them."""
    parts = [HEADER]
    for subject, contents in SUBJECTS.items():
        parts.append(f"## {subject}\n{contents[0].upper()}{contents[1:]}.\n\n| layer | modules |\n|---|---|")
        for layer, folder in folders():
            if modules := list(_modules(folder / subject)):
                parts.append(f"| {layer} | {', '.join(f'`{name}`' for name in modules)} |")
        parts[-1] += "\n"
    parts.append("## Beside the subjects\n\n| place | contents |\n|---|---|")
    for layer, folder in folders():
        for name, contents in OTHER_PACKAGES.get(layer, {}).items():
            parts.append(f"| `{folder.relative_to(settings.BASE_DIR) / name}/` | {contents} |")
    return "\n".join(parts) + "\n"


def folders() -> Iterator[tuple[str, Path]]:
    """Yield each layer with its folder, lowest first."""
    for layer in LAYERS:
        yield layer, Path(settings.BASE_DIR, "portal", layer)
    yield "templates", Path(settings.BASE_DIR, "templates")


def _modules(folder: Path) -> Iterator[str]:
    """Yield the names of modules or templates, and of packages with a slash."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and path.name != "__pycache__":
            yield f"{path.name}/"
        elif path.suffix in (".py", ".html") and path.stem != "__init__":
            yield path.stem


class Command(BaseCommand):
    help = "Write docs/subjects.md from the tree of modules."

    def handle(self, *args: Any, **options: Any) -> None:
        Path(settings.BASE_DIR, "docs", "subjects.md").write_text(subjects_text())
