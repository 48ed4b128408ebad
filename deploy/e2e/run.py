#!/usr/bin/env python3
"""Builds the production stack and runs it once with its own docker daemon, on Debian without a registry.

    apt-get install docker.io docker-compose debootstrap openssl nodejs npm
    python3 deploy/e2e/run.py [--folder /var/tmp/fairway-e2e] [--keep]

Run as root. It builds local replacements of images from registries, builds the image of deploy/Dockerfile,
and follows docs/operations.md: keys and tables, up, sign-in, a node, jobs, a restart of each service under a
running job, a backup restored into empty volumes, down.

The first run takes minutes; the folder caches Debian packages and docker layers for the next. All processes
it starts are stopped; without --keep no file is left either. The bridge docker0 and docker's chains in
iptables stay, as after any dockerd.
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

import scenarios
from compose_stack import SERVICES, ComposeStack


def run_steps(stack: ComposeStack) -> Iterator[str]:
    """Run the steps of docs/operations.md in order; yield the name of each finished step."""
    stack.build_stand_in_images()
    yield "stand-ins for the images of a registry"
    stack.compose("--profile", "init", "build", within_s=1800)
    yield "deploy/Dockerfile builds"
    said = stack.compose("run", "--rm", "-T", "init", within_s=300)
    link = re.search(r"https://\S+", said)
    scenarios.expect(link is not None, f"init prints no link: {said}")
    yield "init: keys, tables, first link"
    stack.compose("up", "--detach", within_s=600)
    stack.wait("all services healthy", stack.healthy, 600)
    yield f"{SERVICES} services are healthy"
    client = scenarios.sign_in(stack, link[0])  # type: ignore[index]
    yield "healthz, readyz, signed in by the link, every asset of a page"
    scenarios.add_node(stack, client)
    yield "a node over SSH, enrolled by the page's script"
    long = scenarios.first_job(stack, client)
    yield "one completed job, and one that keeps running"
    yield from scenarios.restart_each(stack, client, long)
    stack.wait("all services healthy", stack.healthy, 600)
    yield "all services are healthy again"
    yield from scenarios.back_up_and_restore(stack, client, long)


def main() -> int:
    """Run the stack; return 0 when every step succeeded."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, default=Path("/var/tmp/fairway-e2e"))  # noqa: S108
    options.add_argument("--keep", action="store_true", help="keep docker's layers and Debian's packages")
    chosen = options.parse_args()
    stack = ComposeStack(chosen.folder.resolve())
    shutil.rmtree(stack.site, ignore_errors=True)
    stack.site.mkdir(parents=True)
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    stack.compose_command = ["docker", "compose"] if plugin else ["docker-compose"]
    began_s = time.monotonic()
    try:
        with stack.daemon():
            try:
                stack.prepare_site()
                stack.clean()
                for step in run_steps(stack):
                    print(f"{time.monotonic() - began_s:6.0f} s  {step}", flush=True)  # noqa: T201
            except Exception:
                print(stack.diagnostics(), file=sys.stderr)  # noqa: T201
                raise
            finally:
                stack.clean()
        print(f"{time.monotonic() - began_s:6.0f} s  stopped, no container is left")  # noqa: T201
    finally:
        shutil.rmtree(stack.site, ignore_errors=True)
        if not chosen.keep:
            shutil.rmtree(stack.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
