"""Enrolment of a node: builds the script from keys and options, and runs it through one sudo login."""

from __future__ import annotations

import base64
import functools
import ipaddress
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from agents.ssh import LoginError, SshTarget, login_with_password

EngineAccess = Literal["auto", "rootless", "rootful"]
RuntimeKind = Literal["podman", "docker", "process"]
ENGINE_ACCESS_MODES: tuple[EngineAccess, ...] = get_args(EngineAccess)
RUNTIME_KINDS: tuple[RuntimeKind, ...] = get_args(RuntimeKind)

INSTALL_DIR = Path(__file__).parent / "node_install"
LOADER_PATH = "/usr/local/lib/fairway/fairway-node"
STATE_DIR = "/var/lib/fairway-node/state"
AGENT_PATH = "/var/lib/fairway-node/agent/agent.pyz"
ALLOWED_SIGNERS_PATH = "/etc/fairway/agent_signers"
JOB_ADDRESS = "127.77.0.1"
ENROLMENT_TIMEOUT_S = 600.0  # installing an engine takes minutes on a slow line

_PUBLIC_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]+={0,2}")
_ACCOUNT_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_LOADER_VERSION = re.compile(r"^FAIRWAY_LOADER=(\d+)", re.MULTILINE)
_ABSOLUTE_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")


class EnrolmentError(ValueError):
    """An option that no script can be built from; ``field`` names it, blank if it is not an option."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class EnrolmentScriptError(Exception):
    """The script failed on the node; the message is its last error line, ``output`` its whole output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class SignedAgent:
    """The agent program and its signature, which the node's loader verifies."""

    program: bytes
    signature: str


@dataclass(frozen=True)
class PublicKeys:
    """The public keys, each as ``type base64``; comments are dropped."""

    control: str
    watch: str
    tunnel: str
    signing: str


@dataclass(frozen=True)
class EnrolmentOptions:
    """Options of an enrolment. ``settings`` overrides or extends the agent's settings.

    With the engine access ``auto`` the script decides: rootless podman where limits work without root (cgroup
    v2 and systemd), otherwise a sudoers rule for exactly the loader.
    """

    engine: EngineAccess = "auto"
    runtime: RuntimeKind = "podman"
    user: str = "fairway"
    home_root: str = "/var/lib/fairway-homes"
    allowed_sources: tuple[str, ...] = ()
    denied_networks: tuple[str, ...] = ()  # networks of the portal that containers may not connect to
    install_runtime: bool = True
    settings: Mapping[str, object] = field(default_factory=dict)


def enrolment_script(
    cluster: str, keys: PublicKeys, agent: SignedAgent, choices: EnrolmentOptions | None = None
) -> str:
    """Return the POSIX shell script that enrols a machine; equal arguments give equal scripts.

    Raise EnrolmentError for a value that is unsafe in a root shell.
    """
    choices = choices or EnrolmentOptions()
    if not _ACCOUNT_NAME.fullmatch(cluster):
        raise EnrolmentError(f"{cluster!r} is not a cluster id: lower-case letters, digits and '-' only.")
    check_options(choices)
    script = (INSTALL_DIR / "enrol.sh").read_text()
    values = {
        "CLUSTER": cluster,
        "ACCOUNT": choices.user,
        "ENGINE": choices.engine,
        "RUNTIME": choices.runtime,
        "INSTALL_RUNTIME": "yes" if choices.install_runtime else "no",
        "HOME_ROOT": choices.home_root,
        "LOADER": _loader_script(),
        "SIGNING_KEY": _public_key(keys.signing),
        "SETTINGS": json.dumps(node_settings(cluster, choices), sort_keys=True),
        "AUTHORIZED_KEYS": authorized_keys(keys, choices.allowed_sources),
        "AGENT": base64.encodebytes(agent.program).decode().strip(),
        "AGENT_SIGNATURE": agent.signature,
    }
    return render_script(script, values)


@functools.cache
def loader_version() -> int:
    return int(_LOADER_VERSION.findall(_loader_script())[0])


def loader_upgrade_script() -> str:
    """Return the POSIX shell script that updates the loader on an enrolled node."""
    values = {"LOADER": _loader_script(), "LOADER_PATH": LOADER_PATH, "LOADER_VERSION": str(loader_version())}
    return render_script((INSTALL_DIR / "renew.sh").read_text(), values)


def _loader_script() -> str:
    return (INSTALL_DIR / "fairway-node").read_text()


def render_script(script: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder by its value as one quoted shell word; nothing else inserts values."""
    for name, value in values.items():
        if "\0" in value:
            raise EnrolmentError(f"{name} contains a zero byte.")
    return _PLACEHOLDER.sub(lambda found: shlex.quote(values[found[1]]), script)


def authorized_keys(keys: PublicKeys, from_addresses: tuple[str, ...] = ()) -> str:
    """Return the three ``authorized_keys`` lines that restrict what each key may do on a node.

    OpenSSH's ``port-forwarding`` allows both directions; ``permitlisten`` names a privileged port, so that
    the tunnel key can reach job ports but cannot listen.
    """
    origin = f'from="{",".join(from_addresses)}",' if from_addresses else ""
    return "".join(
        f"{line}\n"
        for line in (
            f'{origin}restrict,command="{LOADER_PATH} control" {_public_key(keys.control)} fairway-control',
            f'{origin}restrict,command="{LOADER_PATH} watch" {_public_key(keys.watch)} fairway-watch',
            f'{origin}restrict,port-forwarding,permitopen="{JOB_ADDRESS}:*",permitlisten="127.0.0.1:1",'
            f'command="/bin/false" {_public_key(keys.tunnel)} fairway-tunnel',
        )
    )


def node_settings(cluster: str, choices: EnrolmentOptions) -> dict[str, object]:
    return {
        "cluster": cluster,
        "state_dir": STATE_DIR,
        "home_root": choices.home_root,
        "runtimes": [{"kind": choices.runtime}],
        "allowed_signers_path": ALLOWED_SIGNERS_PATH,
        "agent_path": AGENT_PATH,
        "denied_networks": list(choices.denied_networks),
        **choices.settings,
    }


def enrol_with_sudo(target: SshTarget, password: str, script: str) -> str:
    """Log in once with a password, run the script as root, and return its output.

    The host key must be confirmed before (``target.host_key``); the password is sent to no other host. It is
    used at most twice (login, sudo) and never stored.

    Raise SshError when the login fails, EnrolmentScriptError when sudo or the script fails.
    """
    with login_with_password(target, password) as login:
        try:
            done = login.run_as_root(password, script, timeout_s=ENROLMENT_TIMEOUT_S)
        except LoginError as error:
            raise EnrolmentScriptError(str(error)) from error
    if done.exit_status != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        message = said[-1] if said else f"The script ended with status {done.exit_status} and no output."
        raise EnrolmentScriptError(message.removeprefix("fairway: stopped: "), done.stdout + done.stderr)
    return done.stdout


def _public_key(line: str) -> str:
    found = _PUBLIC_KEY.match(line)
    if found is None:
        raise EnrolmentError("The key is not an ed25519 public key.")
    return found[0]


def check_account(account: str) -> None:
    """Raise EnrolmentError for an invalid account name of the agent."""
    if not _ACCOUNT_NAME.fullmatch(account):
        raise EnrolmentError(
            f"{account!r} is not an account name: at most 31 lower-case letters, digits and '-'.", "account"
        )
    if account == "root":
        raise EnrolmentError("The agent needs its own account; root is not allowed.", "account")


def check_options(choices: EnrolmentOptions) -> None:
    """Raise EnrolmentError for invalid options."""
    check_account(choices.user)
    if choices.engine not in ENGINE_ACCESS_MODES:
        raise EnrolmentError(f"Engine access must be one of {', '.join(ENGINE_ACCESS_MODES)}.", "engine")
    if choices.runtime not in RUNTIME_KINDS:
        raise EnrolmentError(f"The runtime must be one of {', '.join(RUNTIME_KINDS)}.", "runtime")
    if not _ABSOLUTE_PATH.fullmatch(choices.home_root) or ".." in choices.home_root:
        raise EnrolmentError(f"{choices.home_root!r} is not an absolute folder of plain names.")
    if choices.runtime == "process" and choices.engine == "rootless":
        raise EnrolmentError(
            "The runtime process gives each job an unused uid, which needs the sudoers line.", "engine"
        )
    if choices.runtime == "docker" and choices.engine == "rootless":
        raise EnrolmentError(
            "The runtime docker needs the sudoers line; choose podman for rootless containers.", "engine"
        )
    for address in (*choices.allowed_sources, *choices.denied_networks):
        try:
            ipaddress.ip_network(address, strict=False)
        except ValueError as error:
            raise EnrolmentError(f"{address!r} is not an address or network.") from error
