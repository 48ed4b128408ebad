"""Every variable is declared once, checked by name at start, documented, and reaches the processes that read it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from portal.config import variables
from portal.config.variables import (
    BY_NAME,
    OTHER_PREFIXES,
    OTHERS,
    SetBy,
    SettingsRefused,
    check_environment,
)
from tests.process_environment import COMMANDS

ROOT = Path(__file__).parent.parent.parent
KEY = "".join(map(chr, range(48, 123)))
WRONG = {
    "DATABASE_URL": [
        "nonsense",
        "mysql://u:secret@host/fairway",
        "postgres://u:secret@host:abc/f",
        "postgres://u:secret@h",
    ],
    "DATABASE_OWNER_URL": ["postgres://u:secret@[::1/fairway", "postgres://u:secret@host:0/fairway", "a b"],
    "REDIS_URL": [
        "localhost:6379",
        "redis://:secret@host:99999/0",
        "http://host",
        "redis://:secret word@host",
    ],
    "FAIRWAY_DATABASE_POOL": ["abc", "-1", "1.5", "nan", "inf", "1e3", "٣", "9" * 30, "1001", "0x10"],
    "FAIRWAY_SERVERS": ["wheels", "1"],
    "FAIRWAY_PORTAL_URL": [
        "portal.example.org",
        "//portal.example.org",
        "ftp://portal.example.org",
        "https://",
        "https://a b",
        "https://u:secret@portal.example.org",
        "https://portal.example.org/path",
        "https://p:0",
        "https://p:99999",
        "https://portal.example.org?x=1",
        "https://[::1",
    ],
    "FAIRWAY_APPS_DOMAIN": [
        "https://apps.example.net",
        "apps.example.net/x",
        "*.apps.example.net",
        "apps.example.net:0",
        "a:b",
        ".apps.example.net",
        "a b",
        "apps.example.net:",
        "user@apps.example.net",
    ],
    "FAIRWAY_ALLOWED_HOSTS": [
        "https://portal.example.org",
        "portal.example.org:443",
        "portal.example.org/",
        "::1",
        "a b",
        "portal.example.org,http://other",
    ],
    "FAIRWAY_EGRESS_DENY": [
        "proxy.example.org",
        "192.0.2.0/33",
        "192.0.2.256",
        "192.0.2.1;192.0.2.2",
        "192.0.2.1:80",
    ],
    "FAIRWAY_TRACKING_URL": ["mlflow", "https://u:secret@mlflow", "https://mlflow?x"],
    "FAIRWAY_TRACKING_DATABASE_URL": ["sqlite:///secret.db"],
    "FAIRWAY_MAX_ARTIFACT_MIB": ["0", "-5", "1 GiB", "nan", "1e9", "99999999"],
    "FAIRWAY_MAX_UPLOAD_MIB": ["0", "infinity", "2.5"],
    "FAIRWAY_TRUSTED_PROXIES": ["proxy", "10.0.0.0/8", "10.0.0.1 10.0.0.2"],
    "FAIRWAY_WORKSPACE_UPLOAD_MIB": ["-1", "all"],
    "FAIRWAY_SECRET_KEY": ["short", "a" * 60, f"django-insecure-{KEY}"],
    "FAIRWAY_SECRET_KEY_FALLBACKS": ["secret", f"{KEY.replace(',', '')},secret"],
    "FAIRWAY_SESSION_IDLE_HOURS": ["nan", "inf", "-1", "0", "1e3", "8h", "8,5", "1_0", "99999", "-inf"],
    "FAIRWAY_SESSION_DAYS": ["NaN", "Infinity", "-0.5", "0", "9999", "."],
    "FAIRWAY_LOG_RETENTION_DAYS": ["-1", "7d", "36501"],
    "FAIRWAY_BACKUP_ALERT_HOURS": ["-1", "2d", "87601"],
    "FAIRWAY_SUPPORT_ADDRESS": ["help", "a b@example.org", "help@", "a@b\nBcc: c@d"],
    "FAIRWAY_SMTP_URL": [
        "mail.example.org",
        "http://mail.example.org",
        "smtp://u:secret@",
        "smtp://u:secret@mail:x",
    ],
    "FAIRWAY_SMTP_PASSWORD_FILE": ["/nonexistent/password", "/"],
    "FAIRWAY_MAIL_FROM": ["fairway", "Fairway <fairway>"],
    "FAIRWAY_TERMINAL_IDLE_MIN": ["0", "-1", "2.5", "1e1"],
    "FAIRWAY_LOG_LEVEL": ["LOUD", "10", "INFO,DEBUG"],
    "FAIRWAY_DEBUG": ["ture", "2", "nein"],
    "FAIRWAY_WEB_SOCKET": ["web.sock", f"/run/{'x' * 110}"],
    "FAIRWAY_TRACKING_SOCKET": ["tracking.sock"],
    "FAIRWAY_CONTROL_KEY": ["/nonexistent/key"],
    "FAIRWAY_WATCH_KEY": ["/nonexistent/key"],
    "FAIRWAY_TUNNEL_KEY": ["/nonexistent/key"],
    "FAIRWAY_STATIC_ROOT": ["a\nb"],
    "FAIRWAY_STATIC_FINDERS": ["maybe"],
    "FAIRWAY_BUNDLED_SERVERS": ["-"],
    "FAIRWAY_NO_DEV": ["true"],
}
RIGHT = {
    "DATABASE_URL": [
        "postgres://fairway_app@/%2Frun%2Fsockets/fairway",
        "postgresql://u:p%40ss@[::1]:5432/f?sslmode=require",
    ],
    "REDIS_URL": ["unix:///run/valkey.sock?db=0", "rediss://:p@host:6380/1"],
    "FAIRWAY_DATABASE_POOL": ["0", " 20 ", "1000"],
    "FAIRWAY_PORTAL_URL": ["http://localhost:8000/", "https://[2001:db8::1]", "https://portal"],
    "FAIRWAY_APPS_DOMAIN": ["apps.example.net", "localhost:8000", "[::1]:8000"],
    "FAIRWAY_ALLOWED_HOSTS": ["portal.example.org, 127.0.0.1,[::1]", "*", ".example.org"],
    "FAIRWAY_EGRESS_DENY": ["192.0.2.1, 192.0.2.0/24,2001:db8::/32"],
    "FAIRWAY_TRACKING_URL": ["http://10.0.0.1:8080/mlflow/"],
    "FAIRWAY_SESSION_IDLE_HOURS": ["8", "0.5", ".5"],
    "FAIRWAY_SMTP_URL": ["smtp+tls://user%40example.org:p@mail.example.org:587"],
    "FAIRWAY_MAIL_FROM": ["Fairway <fairway@example.org>"],
    "FAIRWAY_DEBUG": ["TRUE", "off"],
    "FAIRWAY_LOG_LEVEL": ["debug"],
}


def test_every_variable_has_wrong_values_here() -> None:
    assert set(BY_NAME) - set(WRONG) == {"FAIRWAY_DATA_DIR"}, "commands check it (test_command_arguments.py)"


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_ends_in_one_sentence(name: str, value: str) -> None:
    with pytest.raises(SettingsRefused) as refused:
        check_environment({name: value})
    said = str(refused.value)
    assert said.startswith(f"{name} in the environment cannot be read: ") and said.endswith("."), said
    assert "\n" not in said and "secret" not in said and len(said) < 250, said


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values]
)
def test_a_right_value_is_read(name: str, value: str) -> None:
    assert check_environment({name: value}) == []


def test_a_blank_value_is_the_default() -> None:
    for variable in variables.VARIABLES:
        assert variable.read({variable.name: " "}) == variable.default, variable.name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FAIRWAY_TRUSTED_PROXYS", "FAIRWAY_TRUSTED_PROXIES"),
        ("FAIRWAY_ALLOWED_HOST", "FAIRWAY_ALLOWED_HOSTS"),
        ("FAIRWAY_EGRES_DENY", "FAIRWAY_EGRESS_DENY"),
        ("FAIRWAY_SESSION_IDLE_HOUR", "FAIRWAY_SESSION_IDLE_HOURS"),
        ("FAIRWAY_SMTP_PASSWORDFILE", "FAIRWAY_SMTP_PASSWORD_FILE"),
        ("fairway_portal_url", "FAIRWAY_PORTAL_URL"),
    ],
)
def test_a_typing_error_in_a_name_is_refused(name: str, meant: str) -> None:
    with pytest.raises(
        SettingsRefused, match=rf"^{name} in the environment is not a setting .* did you mean {meant}\?$"
    ):
        check_environment({name: "x"})


def test_a_name_of_another_program_is_ignored_with_a_warning() -> None:
    (warning,) = check_environment({"FAIRWAY_SERVICE_PORT_8000_TCP_ADDR": "10.0.0.1"})
    assert (
        warning
        == "FAIRWAY_SERVICE_PORT_8000_TCP_ADDR in the environment is not a setting of Fairway and is ignored."
    )


def test_variables_of_jobs_and_of_the_client_are_neither_refused_nor_reported() -> None:
    job = dict.fromkeys(OTHERS, "1") | {"FAIRWAY_PARAM_LR": "0.1", "FAIRWAY_TRIAL": "3"}
    assert check_environment(job) == []


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("FAIRWAY_DATABASE_POOL", "abc", "whole number"),
        ("FAIRWAY_TRUSTED_PROXYS", "10.0.0.1", "did you mean FAIRWAY_TRUSTED_PROXIES"),
    ],
)
def test_each_process_says_one_sentence_and_does_not_start(name: str, value: str, word: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "FAIRWAY_SECRET_KEY": KEY}
    running = {
        process: subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment | {name: value},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for process, command in COMMANDS.items()
    }  # fmt: skip
    for process, child in running.items():
        _, said = child.communicate(timeout=90)
        assert child.returncode == 1, (process, said[-500:])
        assert word in said and name in said and said.count("\n") == 1, (process, said[-1500:])


# -- documentation and shapes -------------------------------------------------------------------------------


def test_the_tables_of_the_documentation_are_those_of_the_code() -> None:
    """`python -m portal.config.variables` prints them."""
    text = (ROOT / "docs" / "operations.md").read_text()
    for set_by in SetBy:
        assert "\n".join(variables.table_rows(set_by)) in text, set_by


def test_every_name_in_the_sources_is_declared() -> None:
    """A variable that the code reads and the table lacks would be refused, or reported as unknown."""
    unknown = {}
    for folder in (
        "portal",
        "scheduler",
        "agents",
        "client",
        "deploy",
        "manage.py",
        "docker-compose.yml",
        "docs",
    ):
        files = [ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*")
        for path in files:
            if path.suffix not in {".py", ".yml", ".yaml", ".md", ".service", ".env", ".sh", ".template"}:
                continue
            for name in re.findall(r"\bFAIRWAY_[A-Z][A-Z_]*[A-Z]\b", path.read_text(errors="replace")):
                if name not in BY_NAME and name not in OTHERS and not name.startswith(OTHER_PREFIXES):
                    unknown[name] = str(path.relative_to(ROOT))
    assert unknown == {"FAIRWAY_TRUSTED_PROXYS": "docs/operations.md"}, "the example of a typing error"


def test_settings_are_read_by_the_table_only() -> None:
    """Elsewhere a value would be used without its check."""
    allowed = {
        "portal/config/variables.py",
        "portal/config/data_paths.py",
        "portal/tracking/server.py",
        "portal/tracking/client.py",
    }
    allowed |= {"portal/standalone/up.py", "portal/bootstrap/environment.py", "portal/failpoints.py"}
    names = {name for name in BY_NAME if name.startswith("FAIRWAY_")}
    found = set()
    for path in [*(ROOT / "portal").rglob("*.py"), *(ROOT / "scheduler").rglob("*.py")]:
        for name in re.findall(r'environ(?:\.get\(|\[)"(FAIRWAY_\w+)"', path.read_text()):
            if name in names and str(path.relative_to(ROOT)) not in allowed:
                found.add((str(path.relative_to(ROOT)), name))
    assert found <= {("portal/management/commands/prepare.py", "FAIRWAY_SECRET_KEY")}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return loaded


def settings_of_a_site() -> set[str]:
    """Settings that docker-compose.yml and the environment file of the units have to pass on."""
    own = {
        "FAIRWAY_DATA_DIR",
        "FAIRWAY_SERVERS",
        "FAIRWAY_DEBUG",
        "DATABASE_OWNER_URL",
        "FAIRWAY_SMTP_PASSWORD_FILE",
    }
    return {v.name for v in variables.VARIABLES if v.set_by is SetBy.ADMINISTRATOR} - own


def test_each_setting_reaches_the_containers(services: dict[str, Any]) -> None:
    for variable in variables.VARIABLES:
        if variable.name in settings_of_a_site():
            readers = [name for name in services if name in variable.readers] or [
                "web",
                "gateway",
                "worker-nodes",
            ]
            assert [name for name in readers if variable.name not in services[name]["environment"]] == [], (
                variable.name
            )


def test_containers_have_known_variables_only(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name not in {"front", "postgres", "valkey"}:
            assert set(service["environment"]) <= set(BY_NAME), name


def test_the_environment_file_of_the_units_lists_each_setting() -> None:
    lines = (ROOT / "deploy" / "systemd" / "fairway.env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert set(values) == settings_of_a_site()
    assert check_environment(values) == []
