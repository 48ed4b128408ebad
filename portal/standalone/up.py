"""`manage.py up`: starts servers, migrates, builds the front end, seeds, then starts the processes."""

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
from portal.config import data_paths, production_checks
from portal.database.roles import single_role_warning
from portal.domain.states import JobState
from portal.models import Job
from portal.services.cluster.demo import evict_demo_jobs, running_demo_tasks
from portal.services.cluster.initial_data import ensure_initial_data
from portal.standalone.account import service_account
from portal.standalone.address import (
    check_bind_options,
    portal_url,
    sign_in_link,
    ssh_forward_command,
)
from portal.standalone.cluster_match import check_same_cluster
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError, database_start_error
from portal.standalone.instance_lock import InstanceLock, refuse_second
from portal.standalone.original_folder import refuse_copy
from portal.standalone.process_table import (
    ListenOptions,
    common_environment,
    portal_processes,
    start_servers,
    web_socket,
)
from portal.standalone.processes.log_prefix import PrefixedWriter
from portal.standalone.processes.orphan_processes import terminate_orphans
from portal.standalone.processes.supervisor import StopRequested, Supervisor
from portal.standalone.servers.postgres import prepare_postgres
from portal.standalone.servers.server import Server
from portal.standalone.servers.valkey import ping, prepare_valkey
from portal.version import VERSION

READY_TIMEOUT_S = 90.0
MAX_START_FAILURES = 3
DEMO_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class UpOptions:
    listening: ListenOptions
    demo: bool = False
    local_node: bool = True
    simulated_gpus: bool = True
    quiet: bool = False


def run(checkout: Path, options: UpOptions) -> None:
    """Start everything and return after everything has stopped.

    Raise StartError with a message when a requirement does not start; nothing is left running then.
    """
    refuse_second(data_paths.data_dir() / "run")
    check_bind_options(options.listening)
    folder = DataDir(data_paths.data_dir(), service_account())
    folder.prepare()
    lines = PrefixedWriter(sys.stdout, quiet=options.quiet)
    with ExitStack() as held:
        only = held.enter_context(InstanceLock(folder.run))
        records = folder.run / "children.json"
        for name in terminate_orphans(records, *folder.marks):
            lines.supervisor_line(f"stopped {name}, left over from a previous start")
        held.callback(web_socket(folder).unlink, missing_ok=True)  # the web server does not remove its socket
        supervisor = held.enter_context(Supervisor(records, lines))
        try:
            url = _start(checkout, options, folder, supervisor, lines)
            only.write_info(url=url)
            supervisor.run()
        except StopRequested:
            pass
        _stop_demo_jobs(supervisor, lines)
        _print_running_jobs(lines)
        lines.supervisor_line("stopping")
    lines.supervisor_line("stopped; the data remain in " + str(folder.root))


def _stop_demo_jobs(supervisor: Supervisor, lines: PrefixedWriter) -> None:
    """Requeue jobs on simulated nodes: their processes do not outlive the portal."""
    if not supervisor.is_running("worker-nodes"):
        return
    try:
        if not running_demo_tasks().exists():
            return
        supervisor.stop_processes("worker-cycle", "beat")  # evicted jobs must not start again
        count = evict_demo_jobs()
        lines.supervisor_line(
            f"stopping {count} {'job' if count == 1 else 'jobs'} of the demo's simulated nodes"
        )
        deadline = time.monotonic() + DEMO_STOP_TIMEOUT_S
        while (
            running_demo_tasks().exists()
            and time.monotonic() < deadline
            and not supervisor.force_stop_requested
        ):
            time.sleep(0.1)
    except DatabaseError as error:
        lines.supervisor_line(f"the demo's jobs could not be stopped: {error}")
    finally:
        connections.close_all()


def _print_running_jobs(lines: PrefixedWriter) -> None:
    """Print which jobs keep running: they are not children of these processes."""
    try:
        running = Job.objects.filter(state=JobState.RUNNING.value).count()
    except DatabaseError:
        return
    finally:
        connections.close_all()
    if running:
        what = "1 job keeps running" if running == 1 else f"{running} jobs keep running"
        lines.supervisor_line(f"{what} without the portal and will be found again by the next start")


def _start(
    checkout: Path, options: UpOptions, folder: DataDir, supervisor: Supervisor, lines: PrefixedWriter
) -> str:
    """Return the portal's URL once it answers."""
    began = time.monotonic()
    if not os.environ.get("DATABASE_URL"):
        refuse_copy(folder.root)
    url = portal_url(options.listening, os.environ.get("FAIRWAY_PORTAL_URL"))
    environment = common_environment(folder, {**os.environ, **_address_settings(url)})
    settings.PORTAL_URL = url
    check_settings(url, environment)
    if _start_servers(folder, supervisor):
        environment["FAIRWAY_BUNDLED_SERVERS"] = "true"
    check_same_cluster(folder)
    folder.ensure_secret_key()
    settings.SECRET_KEY = environment.get("FAIRWAY_SECRET_KEY") or folder.secret_key.read_text().strip()
    build_frontend(checkout)
    migrate_database()
    if warning := single_role_warning():
        lines.supervisor_line(warning)
    if options.local_node and not any(folder.root.glob("environments/*")):
        lines.supervisor_line(
            "preparing the first environment of this machine, JupyterLab (once, a minute or two) ..."
        )
    code = ensure_initial_data(
        local_node=options.local_node, simulated_gpus=options.simulated_gpus, demo=options.demo
    )
    connections.close_all()
    servers, workers = portal_processes(checkout, folder, options.listening, environment)
    for process in servers:
        supervisor.start(process)
    _wait_until_ready(supervisor, options.listening, url, web_socket(folder))
    web_socket(folder).chmod(
        0o600
    )  # uvicorn opens it to every account; restarted, it keeps the mode that it finds
    # started after the public processes answer: on two cores they would only slow them down
    for process in workers:
        supervisor.start(process)
    lines.raw(_welcome_text(url, code, options.listening, time.monotonic() - began))
    return url


def _address_settings(url: str) -> dict[str, str]:
    """Return the URL settings of every process, where the environment does not set them."""
    public = urlsplit(url)
    host = public.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    tracking = urlsplit(os.environ.get("FAIRWAY_TRACKING_URL", "")).hostname
    hosts = ",".join(
        dict.fromkeys([host, *([tracking] if tracking else []), "localhost", "127.0.0.1", "[::1]"])
    )
    # workspaces are below the portal's host by default; browsers resolve *.localhost without DNS
    defaults = {"FAIRWAY_APPS_DOMAIN": public.netloc, "FAIRWAY_ALLOWED_HOSTS": hosts}
    return {"FAIRWAY_PORTAL_URL": url, **{n: os.environ.get(n) or v for n, v in defaults.items()}}


def check_settings(url: str, environment: Mapping[str, str]) -> None:
    """Raise once, before anything is started, what each process would refuse by itself."""
    if url.startswith("https://"):
        hosts = environment["FAIRWAY_ALLOWED_HOSTS"].split(",")
        unsafe = production_checks.unsafe_setting_errors(
            debug=settings.DEBUG, allowed_hosts=hosts, redis_url=environment["REDIS_URL"]
        )
        if unsafe:
            raise StartError(f"Fairway does not start at {url}. {' '.join(unsafe)}")


def _start_servers(folder: DataDir, supervisor: Supervisor) -> bool:
    """Start our own servers where none are configured, both at once; return whether one is from a wheel."""
    servers: list[Server] = [] if os.environ.get("DATABASE_URL") else [prepare_postgres(folder)]
    if not os.environ.get("REDIS_URL"):
        servers.append(prepare_valkey(folder))
    start_servers(supervisor, servers)
    try:
        ping(settings.REDIS_URL, timeout_s=5)
    except redis.RedisError as error:
        raise StartError(f"The server of REDIS_URL does not respond: {error}") from error
    return any(server.from_wheel for server in servers)


def migrate_database() -> None:
    """Migrate; raise StartError when the database does not answer or denies it."""
    try:
        call_command("migrate", interactive=False, verbosity=0)
    except OperationalError as error:
        raise database_start_error(error) from error
    except ProgrammingError as error:
        raise StartError(f"The database cannot be migrated: {error}") from error


def _wait_until_ready(supervisor: Supervisor, listening: ListenOptions, url: str, socket: Path) -> None:
    """Return when the portal answers on its public port; raise StartError for a process that keeps dying."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    host = urlsplit(url).netloc

    def decided() -> bool:
        return (
            (socket.exists() and _is_ready(listening, host))  # the gateway logs each request before
            or time.monotonic() > deadline
            or bool(crash_looping(supervisor.exit_counts()))
        )

    supervisor.run(until=decided)
    dead = crash_looping(supervisor.exit_counts())
    if dead:
        raise StartError(f"{' and '.join(dead)} ended {MAX_START_FAILURES} times; see the log lines above.")
    if not _is_ready(listening, host):
        raise StartError(
            f"The portal did not respond within {READY_TIMEOUT_S:.0f} s; see the log lines above."
        )


def crash_looping(exit_counts: Mapping[str, int]) -> list[str]:
    """Return the processes that exited too often during the start to wait any longer."""
    return [name for name, count in exit_counts.items() if count >= MAX_START_FAILURES]


def _is_ready(listening: ListenOptions, host: str) -> bool:
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listening.bind, listening.bind)  # noqa: S104
    if listening.tls_cert:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # our certificate is for the public host, not for loopback
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            here, listening.port, timeout=2, context=context
        )
    else:
        connection = http.client.HTTPConnection(here, listening.port, timeout=2)
    try:
        connection.request("GET", "/readyz?exclude=scheduler", headers={"Host": host})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _welcome_text(url: str, code: str | None, listening: ListenOptions, took_s: float) -> str:
    link = sign_in_link(url, code) if code else f"{url}/"
    purpose = "Sign in once, with this link" if code else "Open"
    text = ["", f"  Fairway {VERSION} is ready after {took_s:.1f} s. {purpose}:", "", f"      {link}", ""]
    if listening.is_loopback:
        text += ["  From another machine, first:", "", f"      {ssh_forward_command(listening)}", ""]
    return "\n".join([*text, "  Ctrl-C stops it.", ""])
