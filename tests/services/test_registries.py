"""Logins to registries: who keeps them, whose image gets which, and what can be seen of them."""

from __future__ import annotations

import json

import pytest

from agents.node.runtimes.arguments import pull
from agents.node.spec.image_names import registry_host
from portal.errors import Forbidden, InvalidRequest
from portal.models import AuditEntry, RegistryLogin
from portal.services.environments.registries import do_delete_login, do_save_login, login_for_image
from tests import factories


@pytest.mark.django_db
def test_credentials_are_encrypted_and_sent_only_to_their_registry() -> None:
    admin = factories.user(admin=True)
    with pytest.raises(Forbidden):
        do_save_login(factories.user(), "reg.example.org", "robot", "open-sesame")
    do_save_login(admin, "reg.example.org:5000", "robot", "open-sesame")
    row = do_save_login(admin, "reg.example.org:5000", "robot2", "open-sesame-2")
    assert login_for_image("reg.example.org:5000/lab/image:1") == ("robot2", "open-sesame-2")
    for other in ("reg.example.org/lab/image:1", "reg.example.org.evil.net:5000/a", "lab/image:1", "image"):
        assert login_for_image(other) is None
    for host, name, password in (
        ("lab", "a", "b"),
        ("https://x.org", "a", "b"),
        ("x.org", "a:b", "c"),
        ("x.org", "a", ""),
    ):
        with pytest.raises(InvalidRequest):
            do_save_login(admin, host, name, password)
    reported = json.dumps(
        [*AuditEntry.objects.values("before", "after"), *RegistryLogin.objects.values("encrypted_password")]
    )
    assert "sesame" not in reported and "robot2" in reported
    do_delete_login(admin, row)
    assert login_for_image("reg.example.org:5000/lab/image:1") is None


def test_the_password_is_in_no_argument_list() -> None:
    assert registry_host("localhost/a:1") == "localhost" and registry_host("a/b") is None
    assert pull("podman", "a.org/b", "/s/login-1") == [
        "pull",
        "--authfile",
        "/s/login-1/config.json",
        "a.org/b",
    ]
    assert pull("docker", "a.org/b", "/s/login-1") == ["--config", "/s/login-1", "pull", "a.org/b"]
    assert pull("docker", "a.org/b", None) == ["pull", "a.org/b"]
