"""Behind https no process starts with settings that give the installation away, and each says which one it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from portal.config.production_checks import is_weak_key, same_site_warning, unsafe_setting_errors
from portal.standalone.errors import StartError
from portal.standalone.up import check_settings
from tests.process_environment import COMMANDS

ROOT = Path(__file__).parent.parent.parent
KEY = "".join(map(chr, range(48, 123)))
SAFE = {"debug": False, "allowed_hosts": ["portal.example.org"], "redis_url": "unix:///run/valkey.sock?db=0"}


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("debug", True, "FAIRWAY_DEBUG"),
        ("allowed_hosts", ["portal.example.org", "*"], "'*'"),
        ("allowed_hosts", [".com"], "'.com'"),
        ("allowed_hosts", [""], "''"),
        ("redis_url", "redis://valkey:6379/0", "password"),
        ("redis_url", "redis://127.0.0.1:6379/0", "password"),
        ("redis_url", "redis://fairway@valkey:6379/0", "password"),
        ("redis_url", "rediss://valkey:6379/0", "password"),
    ],
)
def test_unsafe_setting_is_named(setting, value, word):
    assert unsafe_setting_errors(**SAFE) == []
    (message,) = unsafe_setting_errors(**SAFE | {setting: value})
    assert word in message


@pytest.mark.parametrize(
    "url", ["redis://:word@valkey:6379/0", "rediss://u:word@v/0", "redis://v/0?password=w"]
)
def test_redis_with_a_password_is_safe(url):
    assert unsafe_setting_errors(**SAFE | {"redis_url": url}) == []


def test_every_process_refuses_unsafe_settings():
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "FAIRWAY_IN_ENVIRONMENT": "1",
        "FAIRWAY_SECRET_KEY": KEY,
        "FAIRWAY_PORTAL_URL": "https://portal.example.org",
        "FAIRWAY_ALLOWED_HOSTS": "portal.example.org",
        "DATABASE_URL": "postgres://nobody@/nowhere",
        "REDIS_URL": "redis://valkey:6379/0",
    }
    running = {
        name: subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, command in COMMANDS.items()
    }
    for name, process in running.items():
        _, said = process.communicate(timeout=90)
        assert process.returncode != 0, name
        assert "REDIS_URL is reachable over the network without a password" in said, (name, said[-500:])


def test_up_with_a_certificate_refuses_before_it_starts_anything():
    own = {"FAIRWAY_ALLOWED_HOSTS": "portal.example.org", "REDIS_URL": SAFE["redis_url"]}
    check_settings("https://portal.example.org", own)
    check_settings("http://localhost:8000", own | {"FAIRWAY_ALLOWED_HOSTS": "*"})
    with pytest.raises(StartError, match=r"'\*'"):
        check_settings("https://portal.example.org", own | {"FAIRWAY_ALLOWED_HOSTS": "*"})


@pytest.mark.parametrize("names", ["FAIRWAY_SECRET_KEY", "FAIRWAY_SECRET_KEY_FALLBACKS"])
@pytest.mark.parametrize("key", ["short", "a" * 60, "django-insecure-" + KEY])
def test_weak_secret_keys_are_refused_including_former_ones(names, key):
    assert is_weak_key(key) and not is_weak_key(KEY)
    environment = {**os.environ, "FAIRWAY_SECRET_KEY": KEY, names: key}
    done = subprocess.run(
        [sys.executable, "-c", "import portal.config.settings"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "too easy to guess" in done.stderr


@pytest.mark.parametrize(
    ("portal", "apps", "warns"),
    [
        ("portal.example.org", "apps.example.net", False),
        ("portal.example.org", "apps.example.org", True),
        ("example.org", "apps.example.org", True),
        ("portal.example.org", "portal.example.org:8443", True),
        ("PORTAL.Example.org.", "apps.example.ORG", True),
        ("gpu.physics.uni.edu", "ws.chem.uni.edu", True),
        ("portal.lab.ac.uk", "apps.lab.ac.uk", True),
        ("portal.lab.ac.uk", "apps.other.ac.uk", False),
        ("portal.bbc.uk", "apps.bbc.uk", True),
        ("localhost:8000", "localhost:8000", False),
        ("localhost", "apps.localhost", False),
        ("10.0.0.5", "apps.example.org", False),
        ("[::1]", "apps.example.org", False),
    ],
)
def test_domains_that_share_cookies_are_warned_of(portal, apps, warns):
    assert bool(same_site_warning(f"https://{portal}", apps)) is warns


def test_shared_domain_is_warned_of_by_check_and_gateway(settings, caplog):
    from portal.apps import check_separate_site
    from portal.gateway.app import Gateway

    assert check_separate_site(None) == []
    settings.SAME_SITE_WARNING = same_site_warning("https://portal.example.org", "apps.example.org")
    assert [found.id for found in check_separate_site(None)] == ["portal.W001"]
    gateway = Gateway()
    gateway._authorizer.close()
    assert "apps.example.org" in caplog.text
