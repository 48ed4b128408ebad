"""`manage.py test`: the tests that need neither root nor containers; with `--all` the others, too.

Their order is in tests/conftest.py: those that wait for an installation later, the heavy ones last.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from portal.bootstrap.frontend import FrontendError, build_frontend
from portal.standalone.testing_requirements import (
    MACHINE_REQUIREMENTS,
    can_install_packages,
    debian_packages,
    missing_requirements,
)

DEFAULT_KINDS = ("browser", "ssh")
"""Of ``MACHINE_REQUIREMENTS``: without --all, the other tests with requirements are left out."""
DEFAULT_MARKS = "not (rig or gpu or heavy)"
INSTALL_LOCK = "FAIRWAY_TESTS_INSTALL_LOCK"
"""Environment variable with the path of the log of apt-get, which is locked until that has ended."""
INSTALL_LIMIT_S = 600
NOTHING_COLLECTED, TESTS_FAILED = 5, 1
MAX_REPEATED = 5
"""More failures than this are no accident of timing."""


class Command(BaseCommand):
    help = "Runs the tests; as root on Debian, installs their requirements beside the first ones."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("paths", nargs="*", help="files or folders below tests/ (default: all)")
        parser.add_argument(
            "--all",
            action="store_true",
            help="also run those with nodes, containers and whole portals, which need root; given paths imply it",
        )
        parser.add_argument(
            "--long", action="store_true", help="also run the long campaigns; it implies --all"
        )
        parser.add_argument("--no-install", action="store_true", help="never call apt-get")
        parser.add_argument("-k", dest="expression", default="", help="pytest's -k")

    def handle(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        complete = bool(options["all"] or options["long"] or options["paths"])
        kinds = tuple(MACHINE_REQUIREMENTS) if complete else DEFAULT_KINDS
        installing = None if options["no_install"] else _start_install(kinds)
        reading = _start_compile()
        try:
            build_frontend(settings.BASE_DIR)
        except FrontendError as error:
            raise CommandError(str(error)) from error
        finally:
            if reading is not None:
                reading.wait()
        chosen = [*options["paths"], *(["--long"] if options["long"] else [])]
        chosen += ["-k", options["expression"]] if options["expression"] else []
        cores = min(len(os.sched_getaffinity(0)), 8)
        # Tests wait as much as they compute: more workers than cores.
        code = _pytest("" if complete else DEFAULT_MARKS, cores + 3, *chosen)
        if installing is not None:
            self._report_install(installing[0].wait(), installing[1])
        if not complete:
            self.stdout.write("Tests with nodes, containers and whole portals were not run: add --all.")
        self.stdout.write(f"Tests took {time.monotonic() - began:.0f} s.")
        if code == NOTHING_COLLECTED:
            raise CommandError("No test was found there.", returncode=NOTHING_COLLECTED)
        if code:
            sys.exit(code)

    def _report_install(self, code: int, log: IO[bytes]) -> None:
        """Show why apt-get failed; the tests whose requirements are missing were skipped with a message."""
        if code:
            log.seek(0)
            self.stderr.write(log.read()[-3000:].decode(errors="replace"))
            self.stderr.write("apt-get did not install everything; the skipped tests name what is missing.")


def _start_compile() -> subprocess.Popen[bytes] | None:
    """Collect all tests once unless their bytecode is cached, so that workers do not each compile them."""
    if any((Path(settings.BASE_DIR) / "tests/__pycache__").glob("conftest.*")):
        return None
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq"]
    return subprocess.Popen(command, cwd=settings.BASE_DIR, stdout=subprocess.DEVNULL, env=_environment())


def _environment() -> dict[str, str]:
    """Return the environment of pytest: this one without its data folder, and with cached bytecode.

    Tests start hundreds of processes. Without bytecode each compiles the portal, and each worker all tests.
    """
    left_out = ("FAIRWAY_DATA_DIR", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _start_install(kinds: Sequence[str]) -> tuple[subprocess.Popen[bytes], IO[bytes]] | None:
    """Start apt-get in parallel with the quick tests when requirements are missing and can be installed."""
    wanted = debian_packages([need for kind in kinds for need in missing_requirements(kind)])
    if not wanted or not can_install_packages():
        return None
    sys.stderr.write(f"Installing {' '.join(wanted)} with apt-get beside the first tests ...\n")
    log = tempfile.NamedTemporaryFile(prefix="fairway-install-")  # noqa: SIM115  (it lives as long as apt-get)
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *wanted]
    script = 'apt-get update && exec "$@"'
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    process = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *install],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
    )
    os.environ[INSTALL_LOCK] = log.name
    handle = os.open(log.name, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    threading.Thread(target=_unlock_when_ended, args=(process, handle), daemon=True).start()
    return process, log


def _unlock_when_ended(process: subprocess.Popen[bytes], handle: int) -> None:
    try:
        process.wait(INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    os.close(handle)


def _pytest(marks: str, workers: int, *arguments: str) -> int:
    """Return the exit code of pytest for the tests with these marks, in this many workers.

    A few failed tests run once more, alone: see docs/decisions/failed-tests-run-again.md.
    """
    parallel = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder", "--cache-clear"]
    code = _run_pytest("-m", marks, *parallel, *arguments)
    failed = _failed_tests() if code == TESTS_FAILED else []
    if not 0 < len(failed) <= MAX_REPEATED:
        return code
    code = _run_pytest("-m", marks, "--last-failed", "--last-failed-no-failures=none", *arguments)
    outcome = "They failed again." if code else "They passed alone: see why they depend on the load."
    print("Failed beside others, and run again alone:", *failed, outcome, sep="\n  ")
    return code


def _run_pytest(*arguments: str) -> int:
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=settings.BASE_DIR, env=_environment(), check=False).returncode


def _failed_tests() -> list[str]:
    """Return the tests that failed in the run before."""
    path = Path(settings.BASE_DIR) / ".pytest_cache/v/cache/lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []
