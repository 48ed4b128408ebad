#!/usr/bin/env python3
"""Builds the production stack and runs it once with a docker of its own, on a Debian machine without a registry.

    apt-get install docker.io docker-compose debootstrap openssl nodejs npm
    python3 deploy/trial/run.py [--folder /var/tmp/fairway-trial] [--keep]

As root. It makes stand-ins for the images that would come from a registry, builds the image of deploy/Dockerfile,
and goes through docs/operations.md as written: keys and tables, up, sign-in, a node, jobs, each service begun anew
under a running job, a backup restored into empty volumes, down.
The first run takes minutes; the folder keeps Debian's packages and docker's layers for the next. Everything it
starts is its own, and nothing of it is left running; without --keep no file is left either. The bridge docker0 and
docker's chains in iptables stay, as after any dockerd.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import acts
from stack import SERVICES, ComposeStack


def run_steps(trial: ComposeStack) -> Iterator[str]:
    """The steps of docs/operations.md in their order; a word for each that is done."""
    trial.build_stand_in_images()
    yield "stand-ins for the images of a registry"
    trial.compose("--profile", "init", "build", within_s=1800)
    yield "deploy/Dockerfile builds"
    said = trial.compose("run", "--rm", "-T", "init", within_s=300)
    link = re.search(r"https://\S+", said)
    acts.expect(link is not None, f"init prints no link: {said}")
    yield "init: keys, tables, first link"
    trial.compose("up", "--detach", within_s=600)
    trial.wait("all services healthy", trial.healthy, 600)
    yield f"{SERVICES} services are healthy"
    visitor = acts.sign_in(trial, link[0])  # type: ignore[index]
    yield "healthz, readyz, signed in by the link, every asset of a page"
    acts.add_node(trial, visitor)
    yield "a node over SSH, enrolled by the page's script"
    long = acts.first_job(trial, visitor)
    yield "a job to its end, and one that runs from now on"
    yield from acts.restart_each(trial, visitor, long)
    trial.wait("all services healthy", trial.healthy, 600)
    yield "all services are healthy again"
    yield from acts.back_up_and_restore(trial, visitor, long)


def main() -> int:
    """Runs the trial; 0 when every step went well."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, default=Path("/var/tmp/fairway-trial"))  # noqa: S108
    options.add_argument("--keep", action="store_true", help="keep docker's layers and Debian's packages")
    chosen = options.parse_args()
    trial = ComposeStack(chosen.folder.resolve())
    shutil.rmtree(trial.site, ignore_errors=True)
    trial.site.mkdir(parents=True)
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    trial.compose_command = ["docker", "compose"] if plugin else ["docker-compose"]
    began_s = time.monotonic()
    try:
        with trial.daemon():
            try:
                trial.prepare_site()
                trial.clean()
                for step in run_steps(trial):
                    print(f"{time.monotonic() - began_s:6.0f} s  {step}", flush=True)  # noqa: T201
            except Exception:
                print(trial.diagnostics(), file=sys.stderr)  # noqa: T201
                raise
            finally:
                trial.clean()
        print(f"{time.monotonic() - began_s:6.0f} s  down, nothing is left running")  # noqa: T201
    finally:
        shutil.rmtree(trial.site, ignore_errors=True)
        if not chosen.keep:
            shutil.rmtree(trial.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
