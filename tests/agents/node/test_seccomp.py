"""The seccomp profile that is derived from an engine's default: which calls it allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.node.errors import AgentError
from agents.node.runtimes.seccomp import BASE_PROFILES, SeccompProfiles, derive_profile
from agents.node.settings import SettingsError, parse_settings

NEWUSER, NEWNET, FILES, HIGH = 0x10000000, 0x40000000, 0x400, 1 << 32
VSOCK, NETLINK, AUDIT = 40, 16, 9
PODMAN = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "defaultErrnoRet": 38,
    "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
    "syscalls": [
        {
            "names": ["read", "clone", "clone3", "unshare", "socketcall"],
            "action": "SCMP_ACT_ALLOW",
            "args": [],
        },
        {"names": ["io_uring_setup", "setns"], "action": "SCMP_ACT_ALLOW", "args": None},
        {
            "names": ["socket"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 2, "value": AUDIT, "op": "SCMP_CMP_NE"}],
        },
        {"names": ["bpf", "clone"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {
            "names": ["bpf"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 1,
            "excludes": {"caps": ["CAP_SYS_ADMIN"]},
        },
    ],
}


def answers(profile: dict[str, Any], name: str, *arguments: int) -> set[object]:
    """Return the results of all rules that match a call of a container without capabilities: "allowed" or an errno.

    More than one would leave the order to the library.
    """
    found: set[object] = set()
    for rule in profile["syscalls"]:
        conditions = rule.get("args") or ()
        applies = name in rule["names"] and not (rule.get("includes") or {}).get("caps")
        if applies and all(matches(condition, arguments) for condition in conditions):
            found.add("allowed" if rule["action"] == "SCMP_ACT_ALLOW" else rule["errnoRet"])
    return found or {profile["defaultErrnoRet"]}


def matches(condition: dict[str, Any], arguments: tuple[int, ...]) -> bool:
    value, operator = arguments[condition["index"]], condition["op"]
    if operator == "SCMP_CMP_MASKED_EQ":
        return bool(value & condition["value"] == condition["valueTwo"])
    return bool((value == condition["value"]) == (operator == "SCMP_CMP_EQ"))


CALLS = [
    # name, arguments, by default, where user namespaces are allowed
    ("read", (), "allowed", "allowed"),
    ("setns", (), "allowed", "allowed"),
    ("bpf", (), 1, 1),
    ("clone", (17, 0), "allowed", "allowed"),
    ("clone", (NEWUSER | 17, 0), 1, "allowed"),
    ("clone", (NEWUSER | NEWNET | HIGH, 0), 1, "allowed"),
    ("clone3", (0, 88), 38, "allowed"),
    ("unshare", (FILES,), "allowed", "allowed"),
    ("unshare", (NEWUSER,), 1, "allowed"),
    ("unshare", (NEWUSER | FILES | HIGH,), 1, "allowed"),
    ("socket", (1, 1, 0), "allowed", "allowed"),
    ("socket", (2, 2, 0), "allowed", "allowed"),
    ("socket", (10 | HIGH, 1, 6), "allowed", "allowed"),
    ("socket", (NETLINK, 3, 0), "allowed", "allowed"),
    ("socket", (NETLINK, 3, AUDIT), 22, 22),
    ("socket", (NETLINK | HIGH, 3, AUDIT), 22, 22),
    ("socket", (17, 3, AUDIT), "allowed", "allowed"),
    ("socket", (VSOCK, 1, 0), 97, 97),
    ("socket", (VSOCK, 2, 5), 97, 97),
    ("socket", (VSOCK | HIGH, 1, 0), 97, 97),
    ("socket", (VSOCK | 0xFFFF << 48, 1, AUDIT), 97, 97),
    ("socketcall", (1, 0), 97, 97),
    ("io_uring_setup", (1, 0), 38, 38),
    ("ptrace", (), 38, 38),
]


@pytest.mark.parametrize(("name", "arguments", "closed", "opened"), CALLS)
def test_which_calls_are_allowed(
    name: str, arguments: tuple[int, ...], closed: object, opened: object
) -> None:
    assert answers(derive_profile(PODMAN, "x86_64", user_namespaces=False), name, *arguments) == {closed}
    assert answers(derive_profile(PODMAN, "x86_64", user_namespaces=True), name, *arguments) == {opened}


@pytest.mark.skipif(
    os.uname().machine != "x86_64" or not Path(BASE_PROFILES[-1]).exists(),
    reason="needs podman's default profile and x86_64",
)
@pytest.mark.parametrize("user_namespaces", [False, True])
def test_what_the_kernel_answers(user_namespaces: bool) -> None:
    """Under the profile of this machine, also to calls that compare equal only by their lower 32 bits."""
    base = json.loads(Path(BASE_PROFILES[-1]).read_text())
    profile = derive_profile(base, "x86_64", user_namespaces=user_namespaces)
    program = Path(__file__).with_name("seccomp_calls.py")
    words = [sys.executable, str(program)]
    done = subprocess.run(words, input=json.dumps(profile), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("unshare files", "fork", "inet", "netlink"):
        assert found[name] == "works", name
    for name in ("vsock", "vsock by 64 bits"):
        assert found[name] == "EAFNOSUPPORT", name
    for name in ("vsock by 32 bits", "vsock by socketcall"):
        assert found[name] in ("EAFNOSUPPORT", "SIGSEGV"), name  # or the kernel has no such interface
    assert found["io_uring"] == "ENOSYS"
    assert found["clone3"] == ("EINVAL" if user_namespaces else "ENOSYS")
    if not user_namespaces:
        assert found["unshare by 32 bits"] in ("EPERM", "SIGSEGV")
        for name in ("unshare", "unshare by 64 bits", "clone", "clone by 64 bits"):
            assert found[name] == "EPERM", name


def test_clone_has_its_flags_second_on_s390() -> None:
    profile = derive_profile(PODMAN, "s390x", user_namespaces=False)
    assert answers(profile, "clone", 0, NEWUSER) == {1} and answers(profile, "clone", NEWUSER, 17) == {
        "allowed"
    }
    assert answers(profile, "unshare", NEWUSER) == {1}


def test_a_call_that_the_default_refuses_stays_refused() -> None:
    base = {**PODMAN, "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}
    profile = derive_profile(base, "x86_64", user_namespaces=False)
    assert answers(profile, "clone", 17, 0) == answers(profile, "unshare", 0) == {38}


def test_the_file_follows_its_base_and_a_node_without_one_says_so(tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    profiles = SeccompProfiles(str(tmp_path), str(base))
    assert profiles.path(user_namespaces=False) is None and str(base) in profiles.missing_message()
    base.write_text(json.dumps(PODMAN))
    path = profiles.path(user_namespaces=False)
    assert path is not None and path != profiles.path(user_namespaces=True)
    base.write_text(json.dumps({**PODMAN, "defaultErrnoRet": 1}))
    assert profiles.path(user_namespaces=False) == path
    assert json.loads(Path(path).read_text())["defaultErrnoRet"] == 1
    base.write_text("{}")
    with pytest.raises(AgentError, match="cannot be read"):
        profiles.path(user_namespaces=False)


def test_the_path_of_a_base_is_absolute() -> None:
    settings = {"cluster": "c", "state_dir": "/s", "home_root": "/h"}
    with pytest.raises(SettingsError, match="absolute path"):
        parse_settings({**settings, "runtimes": [{"kind": "docker", "seccomp_profile": "base.json"}]})
