"""`manage.py check-all`: format, lint, types, contracts, migrations, templates and the deploy check."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

CHECK_TIMEOUT_S = 900


@dataclass(frozen=True)
class Check:
    """One tool: its arguments after `python`, and its environment."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def checks() -> list[Check]:
    """Return the checks, the longest first, so that they run beside all others."""
    production = {
        "FAIRWAY_PORTAL_URL": "https://fairway.example.org",
        "FAIRWAY_ALLOWED_HOSTS": "fairway.example.org",
        "FAIRWAY_APPS_DOMAIN": "apps.example.net",
        "REDIS_URL": "unix:///nonexistent/valkey.sock",
        "FAIRWAY_SECRET_KEY": secrets.token_urlsafe(64),
    }
    # makemigrations warns without a database, which it does not need here
    quiet = {"PYTHONWARNINGS": "ignore"}
    scripts = Path(sys.prefix) / "bin"
    return [
        Check("types", ("-m", "mypy", "--no-error-summary", ".")),
        Check("contracts", (str(scripts / "lint-imports"), "--no-logo")),
        Check("templates", ("-m", "djlint", "--lint", "--quiet", str(Path(settings.BASE_DIR) / "templates"))),
        Check("migrations", ("manage.py", "makemigrations", "--check", "--dry-run"), quiet),
        Check("deploy", ("manage.py", "check", "--deploy", "--fail-level", "WARNING"), production),
        Check("lint", ("-m", "ruff", "check", "--quiet", ".")),
        Check("format", ("-m", "ruff", "format", "--check", "--quiet", ".")),
    ]


class Command(BaseCommand):
    help = "Checks format, lint, types, import contracts, migrations, templates and deployment settings."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", help="run only these (default: all)")

    def handle(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        chosen = [c for c in checks() if not options["names"] or c.name in options["names"]]
        unknown = set(options["names"]) - {c.name for c in chosen}
        if unknown:
            raise CommandError(f"There is no check {', '.join(sorted(unknown))}.")
        failed = 0
        with ThreadPoolExecutor(max_workers=max(2, min(len(chosen), os.cpu_count() or 1))) as pool:
            for check, (passed, output, elapsed_s) in zip(chosen, pool.map(_run, chosen), strict=True):
                word = self.style.SUCCESS("ok    ") if passed else self.style.ERROR("FAILED")
                self.stdout.write(f"{word} {check.name:<11} {elapsed_s:5.1f} s")
                if not passed:
                    failed += 1
                    self.stdout.write(output.rstrip())
        self.stdout.write(
            f"{len(chosen) - failed} of {len(chosen)} passed in {time.monotonic() - began:.1f} s."
        )
        if failed:
            sys.exit(1)


def _run(check: Check) -> tuple[bool, str, float]:
    """Return whether it passed, its output, and the seconds it took."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *check.arguments],
            cwd=settings.BASE_DIR,
            env={**os.environ, **check.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
        passed, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired:
        passed, output = False, f"took longer than {CHECK_TIMEOUT_S} s"
    return passed, output, time.monotonic() - began
