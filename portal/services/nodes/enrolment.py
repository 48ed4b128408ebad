"""Enrolment of a machine: its host key to confirm and pin, and the script to run, or one sudo login.

The web process has no private key for nodes: it shows public keys and the signed agent that ``up`` left in
the data directory. What requires the control key runs in worker-nodes, called by task name.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils.translation import gettext as _
from redis.exceptions import RedisError

from agents.enrolment import EnrolmentError, EnrolmentOptions, PublicKeys, check_options, enrolment_script
from agents.keys import PURPOSES, cluster_of_keys, key_path, make_keys, read_public_key, sign_agent
from agents.node.host.atomic_files import make_folder, write_atomic
from agents.ssh import HostKey, SshError, scan_host_key
from portal.access import Permission, require_permission
from portal.admission import waiting_for_others
from portal.domain.nodes.node_operations import OperationKind
from portal.domain.states import NodeTransport, RuntimeKind
from portal.errors import Conflict, InvalidRequest, ServiceUnavailable
from portal.models import ClusterSettings, Node, NodeOperation, NodePool, User
from portal.outbox import enqueue_task
from portal.selectors.nodes.agent_version import bundled_agent
from portal.services.encryption import DecryptionError, EncryptionContext, decrypt, encrypt
from portal.services.nodes.locks import lock_node
from portal.services.nodes.nodes import do_create_node, require_ssh, validate_host
from portal.valkey.client import valkey_client

log = logging.getLogger(__name__)

PASSWORD_TTL_S = 60
STORE_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class SudoLogin:
    """A login that is used once; stored encrypted in Redis for at most a minute, and nowhere else."""

    username: str
    password: str
    engine: str = "auto"  # see EnrolmentOptions


def ensure_cluster() -> None:
    """Create the row of the cluster and its keys, where they are missing.

    In one transaction: a database with a cluster and a data folder without its keys are no interrupted first
    start, and are refused (``portal.standalone.cluster_match``). Keys without a row keep their cluster.
    """
    with transaction.atomic():
        known = cluster_of_keys(settings.KEY_DIR)
        own, _created = ClusterSettings.objects.get_or_create(
            id=1, defaults={"cluster_id": known} if known else {}
        )
        make_keys(settings.KEY_DIR, own.cluster_id)


def prepare_agent(program: bytes) -> None:
    """Store the signed agent. Needs the signing key."""
    folder = settings.DATA_DIR / "agent"
    make_folder(str(folder), 0o711)
    for name, content in (
        ("agent.pyz", program),
        ("agent.pyz.sig", sign_agent(program, key_path(settings.KEY_DIR, "signing")).encode()),
    ):
        write_atomic(str(folder / name), content, mode=0o644)


def do_create_local_node(
    actor: User, name: str, pool: NodePool, folder: Path, homes: Path, gpu_provider: str, **more: Any
) -> None:
    """Create a node whose agent runs on this machine and starts plain processes; ``more`` are its settings."""
    for place in (folder, homes):
        make_folder(str(place), 0o711)
    own = {
        "cluster": ClusterSettings.objects.get(id=1).cluster_id,
        "state_dir": str(folder / "state"),
        "home_root": str(homes),
        "runtimes": [{"kind": RuntimeKind.PROCESS.value}],
        "gpu_provider": gpu_provider,
        "firewall": False,
    }
    link, runtime = NodeTransport.LOCAL, RuntimeKind.PROCESS
    do_create_node(actor, name=name, pool=pool, link=link, runtime=runtime, settings=own | more)


def simulated_gpu_provider(path: Path, uuid_prefix: str, model: str, memory_mib: int, count: int) -> str:
    """Return a provider of simulated GPUs, described in a file that is written unless it exists."""
    if not path.exists():
        make_folder(str(path.parent), 0o711)
        gpus = [
            {"uuid": f"GPU-{uuid_prefix}-{index}", "model": model, "memory_mib": memory_mib}
            for index in range(count)
        ]
        write_atomic(str(path), json.dumps({"gpus": gpus}, indent=1).encode())
    return f"file:{path}"


def get_script(host: str, *, engine: str = "auto", runtime: str = "podman", account: str = "fairway") -> str:
    """Return the script to run in a root shell on a new node. Raise InvalidRequest for invalid choices, and
    Conflict without the cluster's keys.

    Containers there may not connect to this machine's address on the route to ``host``.
    """
    choices, agent = check_choices(engine=engine, runtime=runtime, account=account), bundled_agent()
    try:
        public = {name: read_public_key(key_path(settings.KEY_DIR, name)) for name in PURPOSES}
    except FileNotFoundError as error:
        message = _("The public keys of this cluster are missing in {folder}. Run manage.py prepare.")
        raise Conflict(message.format(folder=settings.KEY_DIR), code="keys_missing") from error
    cluster = ClusterSettings.objects.get(id=1).cluster_id
    options = replace(choices, denied_networks=_portal_addresses(host))
    with _refusing():
        return enrolment_script(cluster, PublicKeys(**public), agent.signed, options)


def get_node_script(actor: User, node: Node, *, engine: str = "auto") -> str:
    """Return the script that sets up a known node again, such as after a reinstallation.

    Raise Conflict for a node that is retired or not reached over SSH.
    """
    require_permission(actor, Permission.CHANGE, node)
    require_ssh(node)
    return get_script(node.host, engine=engine, runtime=node.runtime, account=node.ssh_user)


def check_choices(*, engine: str, runtime: str, account: str) -> EnrolmentOptions:
    """Return the options for a script. Raise InvalidRequest by field."""
    choices = EnrolmentOptions(engine=engine, runtime=runtime, user=account)  # type: ignore[arg-type]
    with _refusing():
        check_options(choices)
    return choices


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn an EnrolmentError into InvalidRequest."""
    try:
        yield
    except EnrolmentError as error:
        fields = {error.field: str(error)} if error.field else None
        raise InvalidRequest(str(error), fields=fields) from error


def check_resolves(host: str) -> None:
    """Raise InvalidRequest for a name without an address: the script could not deny this machine's."""
    try:
        socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        message = _("{host} has no address ({reason}).").format(host=host, reason=error.strerror)
        raise InvalidRequest(fields={"host": message}) from error


def _portal_addresses(host: str) -> tuple[str, ...]:
    """Return this machine's address on the route to ``host``, without sending a packet.

    Loopback is closed to containers anyway.
    """
    if not host:
        return ()
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return ()
    return () if ipaddress.ip_address(own).is_loopback else (own,)


def get_host_key(host: str, port: int) -> HostKey:
    """Return the host key that a machine presents, for the administrator to confirm. Takes at most 5 s."""
    host = validate_host(host)
    try:
        with waiting_for_others():
            return scan_host_key(host, port)
    except SshError as error:
        raise InvalidRequest(fields={"host": str(error)}) from error


def do_enrol_by_sudo(actor: User, node: Node, login: SudoLogin) -> NodeOperation:
    """Make worker-nodes run the script through a sudo login; its steps are added to the operation's row."""
    require_permission(actor, Permission.CHANGE, node)
    if not login.username or not login.password:
        raise InvalidRequest(fields={"password": _("Enter an account that may use sudo, and its password.")})
    check_choices(engine=login.engine, runtime=node.runtime, account=node.ssh_user)
    with transaction.atomic():
        check = NodeOperation.objects.create(
            node=lock_node(node), kind=OperationKind.ENROL.value, actor=actor
        )
        sealed = encrypt(json.dumps(asdict(login)), _encryption_context(check.public_id))
        try:
            valkey_client(STORE_TIMEOUT_S).set(_login_key(check.public_id), sealed, ex=PASSWORD_TTL_S)
        except RedisError as error:
            message = _("Valkey does not respond, so the credentials cannot be passed on.")
            raise ServiceUnavailable(message) from error
        enqueue_task("scheduler.enrol_node", [check.public_id], "nodes")
    return check


def pop_sudo_login(check_id: str) -> SudoLogin | None:
    """Return and delete the login of this operation; None if it has expired."""
    sealed = valkey_client(STORE_TIMEOUT_S).getdel(_login_key(check_id))
    if not isinstance(sealed, bytes):
        return None
    try:
        return SudoLogin(**json.loads(decrypt(sealed.decode(), _encryption_context(check_id))))
    except DecryptionError:
        log.warning("the credentials of check %s cannot be decrypted", check_id)
        return None


def _login_key(check_id: str) -> str:
    return f"fairway:sudo:{check_id}"


def _encryption_context(check_id: str) -> EncryptionContext:
    return EncryptionContext("node_check", check_id, "sudo_login")
