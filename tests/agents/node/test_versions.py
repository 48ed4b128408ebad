"""Versions against their floors, and what the agent finds out about the sshd that runs."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from agents.local import open_local
from agents.node.host import versions


@pytest.mark.parametrize(
    ("reported", "containers", "says"),
    [
        (
            {"runc": "1.2.7"},
            True,
            "runc 1.2.7 is below 1.2.8 or 1.3.3: upgrade it, or keep vendor backports.",
        ),
        ({"runc": "1.2.9"}, True, None),
        ({"runc": "1.3.2"}, True, "runc 1.3.2"),
        ({"runc": "1.4.0"}, True, None),
        ({"runc": "1.1.5"}, False, None),
        ({"nvidia-ctk": "1.17.7"}, True, "The NVIDIA Container Toolkit 1.17.7 is below 1.17.8"),
        ({"podman": "4.3.1"}, True, "podman 4.3.1 is below 5.7.1"),
        ({"kernel": "5.3.18-lp152.19-default"}, False, None),
        ({"kernel": "4.18.0-553.el8_10.x86_64"}, False, "The kernel 4.18.0-553.el8_10.x86_64 is below 5.3"),
        ({"driver": "470.256.02"}, False, "NVIDIA's driver 470.256.02 is below 525.60.13"),
        ({"driver": "simulated"}, False, None),
        ({"driver": None, "conmon": None}, True, None),
        ({"ssh": "9.2"}, False, "OpenSSH 9.2 is below 9.6"),
        ({"ssh": "9.2", "sshd": "9.6"}, False, None),
        ({"ssh": "9.8", "sshd": "9.2"}, False, "The running sshd 9.2 is below 9.6"),
        ({"ssh": "9.2p1 Debian-2+deb12u10"}, False, None),
        ({"ssh": "9.2p1 Debian-2+deb12u3", "sshd": "9.2p1 Debian-2+deb12u3"}, False, None),
        ({"sshd": "9.2p1 Debian-2+deb12u2"}, False, "The running sshd 9.2p1 Debian-2+deb12u2 is below 9.6"),
        ({"sshd": "8.9p1 Ubuntu-3ubuntu0.13"}, False, None),
        ({"sshd": "8.9p1 Ubuntu-3ubuntu0.6"}, False, "The running sshd 8.9p1"),
        ({"sshd": "9.6p1 Ubuntu-3ubuntu13.5"}, False, None),
        ({"sshd": "8.4p1 Debian-5+deb11u4"}, False, None),
        ({"sshd": "9.2p1"}, False, "The running sshd 9.2p1 is below 9.6"),
        ({"sshd": "9.2p1 Debian-2+deb12u"}, False, "The running sshd 9.2p1"),
        ({"maxstartups": "3:50:10"}, False, "above 3 at once (MaxStartups)"),
        ({"maxstartups": "10:30:100", "maxsessions": "1"}, False, None),
    ],
)
def test_versions_below_the_minimum_are_explained(reported, containers, says) -> None:
    found = versions.version_warnings(reported, containers=containers)
    assert found == [] if says is None else (len(found) == 1 and says in found[0]), found


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.19 27 Jan 2026", "9.2p1 Debian-2+deb12u10"),
        ("SSH-2.0-OpenSSH_8.9p1 Ubuntu-3ubuntu0.13\r\n", "8.9p1 Ubuntu-3ubuntu0.13"),
        ("SSH-2.0-OpenSSH_8.7\r\n", "8.7"),
        ("SSH-2.0-dropbear_2022.83", None),
        ("", None),
    ],
)
def test_the_version_of_openssh_has_the_package_of_its_distribution(text, version) -> None:
    assert versions.parse_openssh_version(text) == version


def test_the_agent_reports_the_running_sshd_and_its_settings(tmp_path: Path, pyz: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        threading.Thread(target=_greet, args=(listening,), daemon=True).start()
        _program(tmp_path / "sshd", f"port {port}\nmaxauthtries 6\nmaxsessions 7\nmaxstartups 3:30:100")
        _program(tmp_path / "conmon", "conmon version 2.0.25\ncommit: unknown")
        own = {"cluster": "t", "state_dir": str(tmp_path / "state"), "home_root": str(tmp_path / "homes")}
        (tmp_path / "node.json").write_text(json.dumps({**own, "gpu_provider": "none"}))
        with open_local(
            pyz,
            "watch",
            tmp_path / "node.json",
            cluster="t",
            environment={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        ) as link:
            reported, below = link.hello.versions, link.hello.version_warnings
    assert (reported["sshd"], reported["maxsessions"], reported["maxstartups"]) == (
        "8.4p1 Debian-5+deb11u2",
        "7",
        "3:30:100",
    )
    assert (reported["conmon"], reported["driver"]) == ("2.0.25", None)
    assert any("The running sshd 8.4p1 Debian-5+deb11u2 is below 9.6" in each for each in below)
    assert any("MaxStartups" in each for each in below)
    assert not any("conmon" in each for each in below)  # no engine runs containers here


def test_an_sshd_that_does_not_answer_is_unknown() -> None:
    assert set(versions.parse_sshd_config("sshd: no hostkeys available -- exiting.\n").values()) == {None}


def _program(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)


def _greet(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_8.4p1 Debian-5+deb11u2\r\n")
