"""Enrolment: a pure script, run for real on nodes; what the keys may do; the signed agent; the sudo login."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agents.enrolment import (
    INSTALL_DIR,
    EnrolmentError,
    EnrolmentOptions,
    EnrolmentScriptError,
    PublicKeys,
    SignedAgent,
    authorized_keys,
    enrol_with_sudo,
    enrolment_script,
    loader_upgrade_script,
    loader_version,
    render_script,
)
from agents.keys import PURPOSES, Purpose, key_path, make_keys, read_public_key, sign_agent
from agents.link import AgentError, Link
from agents.ssh import (
    AgentMissingError,
    AuthenticationError,
    HostKeyMismatchError,
    connect_with_key,
    open_ssh,
)
from tests.rig.cluster import RigCluster
from tests.rig.fake_agent import echo_agent
from tests.rig.node import RigNode
from tests.rig.rig import Rig

ROOTFUL = EnrolmentOptions(engine="rootful")
CLUSTER_FILES = ("/etc/fairway/node.json", "/etc/fairway/agent_signers")
PASSWORD = 'it\'s a "secret" $(pass)word'
MakeRig = Callable[..., Rig]


@pytest.fixture
def public_keys(key_pairs: dict[Purpose, Path]) -> PublicKeys:
    return PublicKeys(**{purpose: read_public_key(key_pairs[purpose]) for purpose in PURPOSES})


@pytest.fixture
def echo(key_pairs: dict[Purpose, Path]) -> SignedAgent:
    program = echo_agent()
    return SignedAgent(program, sign_agent(program, key_pairs["signing"]))


@pytest.fixture
def node(make_rig: MakeRig) -> RigNode:
    """A fresh node that nobody has enrolled."""
    return make_rig(1).nodes[0]


def upgrade(link: Link, agent: SignedAgent) -> dict[str, object]:
    """Sends a program to the agent in pieces, as the portal does."""
    piece_bytes, size = 256 * 1024, len(agent.program)
    answer: dict[str, object] = {}
    for offset in range(0, size, piece_bytes):
        piece = agent.program[offset : offset + piece_bytes]
        more: dict[str, object] = {}
        if offset + piece_bytes >= size:
            more = {"last": True, "signature": agent.signature}
        data = base64.b64encode(piece).decode()
        answer = link.request("upgrade", timeout_s=20, offset=offset, data_b64=data, **more)
    return answer


# ---- keys and script, without a node -----------------------------------------------------------------------


def test_keys_are_private_and_never_replaced(tmp_path: Path) -> None:
    first = make_keys(tmp_path / "keys", "abc")
    before = {purpose: path.read_bytes() for purpose, path in first.items()}
    assert make_keys(tmp_path / "keys", "abc") == first
    assert {purpose: path.read_bytes() for purpose, path in first.items()} == before
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in first.values())
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert len({read_public_key(path).split()[1] for path in first.values()}) == len(PURPOSES)


def test_openssh_accepts_the_signature(key_pairs: dict[Purpose, Path], tmp_path: Path) -> None:
    signers, signature = tmp_path / "signers", tmp_path / "program.sig"
    signers.write_text(f'fairway-upgrade namespaces="fairway-node" {read_public_key(key_pairs["signing"])}\n')
    signature.write_text(sign_agent(b"program", key_path(key_pairs["signing"].parent, "signing")))
    verify = [
        *("ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "fairway-upgrade"),
        *("-n", "fairway-node", "-s", str(signature)),
    ]
    assert subprocess.run(verify, input=b"program", capture_output=True).returncode == 0
    assert subprocess.run(verify, input=b"another program", capture_output=True).returncode != 0


def test_a_node_of_another_cluster_is_left_as_it_is(
    node: RigNode, public_keys: PublicKeys, echo: SignedAgent
) -> None:
    first = enrolment_script("first2345a", public_keys, echo, ROOTFUL)
    second = enrolment_script("other2345a", public_keys, echo, ROOTFUL)
    node.execute("sh", "-s", text_in=first)
    before = node.execute("sha256sum", *CLUSTER_FILES).stdout
    refused = node.execute("sh", "-s", text_in=second, check=False)
    assert refused.returncode != 0
    assert "this machine is a node of the cluster first2345a. Retire it there, then remove" in refused.stderr
    assert node.execute("sha256sum", *CLUSTER_FILES).stdout == before
    node.execute("sh", "-s", text_in=first)
    for content, reason in (
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("{}", "names no cluster"),
        ('{"cluster": null}', "is a node of the cluster None"),
        ('{"cluster": ["other2345a"]}', "is a node of the cluster"),
    ):
        node.execute("sh", "-c", "cat > /etc/fairway/node.json", text_in=content)
        unclear = node.execute("sh", "-s", text_in=second, check=False)
        assert unclear.returncode != 0 and reason in unclear.stderr
        assert node.execute("cat", "/etc/fairway/node.json").stdout == content
    node.execute("rm", "/etc/fairway/node.json")
    node.execute("sh", "-s", text_in=second)
    assert "other2345a" in node.execute("cat", "/etc/fairway/node.json").stdout


def test_the_script_is_a_pure_function_and_valid_shell(public_keys: PublicKeys, echo: SignedAgent) -> None:
    script = enrolment_script("abc", public_keys, echo, ROOTFUL)
    assert script == enrolment_script("abc", public_keys, echo, ROOTFUL)
    assert script != enrolment_script("abd", public_keys, echo, ROOTFUL)
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert "PRIVATE KEY" not in script


@pytest.mark.parametrize(
    ("cluster", "choices"),
    [
        ("abc'; rm -rf /", ROOTFUL),
        ("abc", replace(ROOTFUL, user="x; id")),
        ("abc", replace(ROOTFUL, user="root")),
        ("abc", replace(ROOTFUL, home_root="/srv/$(id)")),
        ("abc", replace(ROOTFUL, home_root="/srv/../etc")),
        ("abc", replace(ROOTFUL, allowed_sources=('10.0.0.1",command="sh',))),
        ("abc", EnrolmentOptions(engine="rootless", runtime="docker")),
        ("abc", EnrolmentOptions(engine="rootless", runtime="process")),
        ("abc", replace(ROOTFUL, engine="$(touch /tmp/x)")),  # type: ignore[arg-type]
        ("abc", replace(ROOTFUL, engine="rootful\nid")),  # type: ignore[arg-type]
        ("abc", replace(ROOTFUL, engine="")),  # type: ignore[arg-type]
        ("abc", replace(ROOTFUL, runtime="podman; id")),  # type: ignore[arg-type]
        ("abc", replace(ROOTFUL, runtime="nerdctl")),  # type: ignore[arg-type]
        ("abc", replace(ROOTFUL, user="fairway\n")),
        ("abc\n", ROOTFUL),
        ("abc", replace(ROOTFUL, denied_networks=("10.0.0.1'; id",))),
    ],
)
def test_input_unsafe_in_a_root_shell_is_refused(
    cluster: str, choices: EnrolmentOptions, public_keys: PublicKeys, echo: SignedAgent
) -> None:
    with pytest.raises(EnrolmentError):
        enrolment_script(cluster, public_keys, echo, choices)


@pytest.mark.parametrize("template", ["enrol.sh", "renew.sh"])
def test_each_placeholder_of_a_script_is_the_whole_value_of_one_variable(template: str) -> None:
    """So that quoting by one function is enough: none stands in a comment, in quotes or in a here-document."""
    text = (INSTALL_DIR / template).read_text()
    placeholders = re.findall(r"@[A-Z_]+@", text)
    assert placeholders
    assert re.findall(r"^[a-z_]+=(@[A-Z_]+@)$", text, re.MULTILINE) == placeholders


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=2, max_size=2))
@example(["'", "'\n; echo"])
@example(["$(id)`id`\\", "END_OF_KEYS\n'\"'@ENGINE@"])
@example(["-n", "\n"])
def test_a_shell_reads_every_value_as_it_was_given(values: list[str]) -> None:
    script = 'first=@FIRST@\nsecond=@SECOND@\nprintf \'%s\\0%s\' "$first" "$second"\n'
    filled = render_script(script, {"FIRST": values[0], "SECOND": values[1]})
    done = subprocess.run(["sh", "-s"], input=filled.encode(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == "\0".join(values)


def test_a_value_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(EnrolmentError, match="zero byte"):
        render_script("first=@FIRST@\n", {"FIRST": "a\0b"})


def test_hostile_settings_stay_data(public_keys: PublicKeys, echo: SignedAgent, tmp_path: Path) -> None:
    """The assignments of the real script, run by a shell: nothing of what they say is executed."""
    mark = tmp_path / "executed"
    hostile = f"'; touch {mark}; '$(touch {mark})`touch {mark}`\nEND_OF_SETTINGS\ntouch {mark}\n"
    script = enrolment_script("abc", public_keys, echo, replace(ROOTFUL, settings={"gpu_provider": hostile}))
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assignments = script[script.index("cluster=") : script.index("library=")]
    shown = subprocess.run(
        ["sh", "-s"],
        input=assignments + "\nprintf '%s' \"$portal_settings\"\n",
        text=True,
        capture_output=True,
    )
    assert json.loads(shown.stdout)["gpu_provider"] == hostile
    assert not mark.exists()


def test_an_invalid_key_is_refused(public_keys: PublicKeys) -> None:
    with pytest.raises(EnrolmentError):
        authorized_keys(replace(public_keys, watch="ssh-rsa AAAA"))


def test_keys_can_be_bound_to_addresses(public_keys: PublicKeys) -> None:
    lines = authorized_keys(public_keys, ("10.1.0.0/16", "fd00::1")).splitlines()
    assert len(lines) == 3
    assert all(line.startswith('from="10.1.0.0/16,fd00::1",restrict,') for line in lines)


# ---- on a node ---------------------------------------------------------------------------------------------


@pytest.mark.rig
def test_a_pasted_script_makes_a_node_and_may_be_run_again(node: RigNode, rig_cluster: RigCluster) -> None:
    first = rig_cluster.enrol(node)
    assert "made the account fairway" in first
    assert "podman version" in first
    shown = node.execute("ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").stdout.split()[1]
    assert shown in first
    keys = node.execute("cat", "/var/lib/fairway-node/home/.ssh/authorized_keys").stdout
    again = rig_cluster.enrol(node)
    assert "made the account" not in again
    assert node.execute("cat", "/var/lib/fairway-node/home/.ssh/authorized_keys").stdout == keys
    with rig_cluster.open(node) as link:
        assert link.hello.hostname == node.name
        assert len(link.hello.gpus) == 4
        assert link.hello.boot_id == node.boot_id()
        assert link.hello.loader_version == loader_version()
    loader = "/usr/local/lib/fairway/fairway-node"
    node.execute("sed", "-i", "/FAIRWAY_LOADER/d", loader)  # as those of earlier versions are
    with rig_cluster.open(node) as link:
        assert link.hello.loader_version == 0
    assert "is version" in node.execute("sh", "-s", text_in=loader_upgrade_script()).stdout
    assert node.execute("cat", loader).stdout == (INSTALL_DIR / "fairway-node").read_text()
    with rig_cluster.open(node) as link:
        assert link.hello.loader_version == loader_version()
    assert node.execute("passwd", "-S", "fairway", check=False).stdout.split()[1] in ("L", "LK")
    for path in (
        "/usr/local/lib/fairway/fairway-node",
        "/etc/fairway/node.json",
        "/etc/fairway/agent_signers",
    ):
        assert node.execute("stat", "-c", "%U %A", path).stdout.split()[0] == "root"
        assert (
            node.execute("su", "-s", "/bin/sh", "fairway", "-c", f"test -w {path}", check=False).returncode
            != 0
        )


@pytest.mark.rig
def test_the_account_may_run_only_the_loader_as_root(node: RigNode, rig_cluster: RigCluster) -> None:
    rig_cluster.enrol(node)
    for refused in (
        "id",
        "/usr/local/lib/fairway/fairway-node bulk",
        "/usr/local/lib/fairway/fairway-node control x",
    ):
        done = node.execute("su", "-s", "/bin/sh", "fairway", "-c", f"sudo -n {refused}", check=False)
        assert done.returncode != 0, refused
    rig_cluster.enrol(node, EnrolmentOptions(engine="rootless"))
    assert node.execute("ls", "/etc/sudoers.d/fairway", check=False).returncode != 0


@pytest.mark.rig
def test_each_key_permits_one_command(node: RigNode, rig_cluster: RigCluster) -> None:
    rig_cluster.enrol(node)
    target = rig_cluster.target(node)
    for purpose in ("control", "watch", "tunnel"):
        connection = connect_with_key(target, rig_cluster.keys[purpose])
        transport = connection.transport
        session = transport.open_session(timeout=5)
        with pytest.raises(paramiko.SSHException):
            session.get_pty()
        session = transport.open_session(timeout=5)
        session.exec_command("echo it-ran; id")
        session.shutdown_write()
        assert b"it-ran" not in session.recv(4096)
        places = [(node.address, 22), ("127.0.0.1", 22)]
        if purpose != "tunnel":
            places.append(("127.77.0.1", 22))
        for place in places:
            with pytest.raises(paramiko.ChannelException) as refused:
                transport.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=5)
            assert refused.value.code == 1, place  # administratively prohibited
        for address, port in (("127.0.0.1", 0), ("127.77.0.1", 20_000), ("", 8022), ("127.0.0.1", 1)):
            with pytest.raises(paramiko.SSHException):
                transport.request_port_forward(address, port)
        connection.close()
    with pytest.raises(AgentError) as not_allowed:
        open_ssh(target, rig_cluster.keys["watch"], "control", cluster=rig_cluster.id)
    assert not_allowed.value.code == "forbidden"


@pytest.mark.rig
def test_only_a_signed_agent_runs(node: RigNode, rig_cluster: RigCluster, tmp_path: Path) -> None:
    rig_cluster.enrol(node)
    program = "/var/lib/fairway-node/agent/agent.pyz"
    outsider = make_keys(tmp_path / "stranger", "rig")["signing"]
    newer = rig_cluster.agent.program + b"\n"
    with rig_cluster.open(node) as link:
        with pytest.raises(AgentError) as forged:
            upgrade(link, SignedAgent(newer, sign_agent(newer, outsider)))
        assert forged.value.code == "forbidden"
        good = SignedAgent(newer, sign_agent(newer, rig_cluster.keys["signing"]))
        assert upgrade(link, good)["upgraded"]
    rig_cluster.open(node).close()
    assert (
        node.execute("sha256sum", f"{program}.previous").stdout.split()[0]
        != (node.execute("sha256sum", program).stdout.split()[0])
    )
    node.execute("sh", "-c", f"echo damage >> {program}")
    with rig_cluster.open(node) as link:  # the previous one takes over
        assert link.hello.agent_version
    node.execute("sh", "-c", f"echo damage >> {program}.previous")
    with pytest.raises(AgentMissingError, match="no agent with a valid signature"):
        rig_cluster.open(node)
    rig_cluster.enrol(node)  # and the way back
    rig_cluster.open(node).close()


@pytest.mark.rig
def test_a_script_stops_when_its_agent_was_modified(node: RigNode, rig_cluster: RigCluster) -> None:
    changed = replace(rig_cluster.agent, program=rig_cluster.agent.program + b"x")
    script = enrolment_script("rig", rig_cluster.public_keys, changed, ROOTFUL)
    done = node.execute("sh", "-s", text_in=script, check=False)
    assert done.returncode == 1
    assert "does not carry its signature" in done.stderr
    assert node.execute("ls", "/var/lib/fairway-node/agent/agent.pyz", check=False).returncode != 0


@pytest.mark.rig
def test_the_script_changes_nothing_without_root(node: RigNode, rig_cluster: RigCluster) -> None:
    node.add_admin("opal", "x")
    done = node.execute("su", "opal", "-c", "sh -s", text_in=rig_cluster.script(), check=False)
    assert done.returncode == 1
    assert "needs a root shell" in done.stderr
    assert node.execute("id", "fairway", check=False).returncode != 0


@pytest.mark.rig
def test_the_one_time_sudo_login(node: RigNode, rig_cluster: RigCluster) -> None:
    node.add_admin("opal", PASSWORD)
    target = replace(rig_cluster.target(node), user="opal")
    output = enrol_with_sudo(target, PASSWORD, rig_cluster.script())
    assert "enrolled in rig" in output
    with rig_cluster.open(node) as link:
        assert link.hello.cluster == "rig"
    traces = node.execute(
        "sh",
        "-c",
        "grep -rlF 'a \"secret\"' /etc /home /root /tmp /run/rig /var/log /var/lib/fairway-node; true",
    )
    assert traces.stdout == ""


@pytest.mark.rig
def test_failing_sudo_logins_are_explained(node: RigNode, rig_cluster: RigCluster) -> None:
    node.add_admin("opal", PASSWORD)
    node.execute("useradd", "--create-home", "--shell", "/bin/sh", "plain")
    node.execute("chpasswd", text_in=f"plain:{PASSWORD}\n")
    opal = replace(rig_cluster.target(node), user="opal")
    script = rig_cluster.script()
    with pytest.raises(AuthenticationError, match="rejects the portal's password"):
        enrol_with_sudo(opal, "wrong", script)
    with pytest.raises(
        EnrolmentScriptError, match=r"no root shell for this account|does not take this password"
    ):
        enrol_with_sudo(replace(opal, user="plain"), PASSWORD, script)
    other = read_public_key(rig_cluster.keys["watch"])
    with pytest.raises(HostKeyMismatchError):
        enrol_with_sudo(replace(opal, host_key=other), PASSWORD, script)
    with pytest.raises(EnrolmentScriptError, match="the disk is on fire"):
        enrol_with_sudo(opal, PASSWORD, "echo 'fairway: stopped: the disk is on fire' >&2; exit 3\n")
    log = node.execute("cat", "/var/log/sshd.log", check=False).stdout
    assert PASSWORD not in log


@pytest.mark.rig
def test_a_login_that_needs_no_sudo_password_never_sends_it(node: RigNode, rig_cluster: RigCluster) -> None:
    node.add_admin("opal", PASSWORD)
    node.execute("sh", "-c", "echo 'opal ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/opal")
    target = replace(rig_cluster.target(node), user="opal")
    output = enrol_with_sudo(target, PASSWORD, "id -u; echo done\n")
    assert output == "0\ndone\n"
