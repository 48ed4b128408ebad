"""The rig itself: nodes are machines of their own, faults are real, and nothing is left behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import records
from tests.rig.faulty_link import FaultyLinkProxy, LinkConditions
from tests.rig.images import RigImage, rig_image
from tests.rig.needs import missing_for_rig
from tests.rig.rig import Rig

pytestmark = pytest.mark.rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    reason = missing_for_rig()
    if reason is not None:
        pytest.skip(reason)
    with Rig(2) as made:
        yield made


@pytest.fixture(scope="module")
def image() -> RigImage:
    return rig_image("tiny")


def traces(run: str) -> str:
    """Everything on this machine that carries a run's name."""
    shown = ""
    for command in (["ip", "netns"], ["ip", "-br", "link"], ["cat", "/proc/self/mounts"]):
        shown += subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in shown.splitlines() if run in line)


def answers(address: str, port: int = 22) -> bool:
    try:
        with socket.create_connection((address, port), timeout=0.5) as connection:
            return connection.recv(3) == b"SSH"
    except OSError:
        return False


def test_nodes_share_only_the_network(rig: Rig) -> None:
    first, second = rig.nodes
    first.execute("sh", "-c", "useradd ada; echo here > /etc/mark; echo here > /home/mark")
    assert second.execute("sh", "-c", "id ada || cat /etc/mark /home/mark", check=False).returncode != 0
    assert not Path("/etc/mark").exists()
    assert first.host_key() != second.host_key()
    assert first.boot_id() != second.boot_id()
    assert first.execute("hostname").stdout.strip() == "gn1"
    assert first.execute("sh", "-c", "ls /proc | grep -c '^[0-9]'").stdout.strip() < "9"
    repository = str(Path(__file__).parents[2])
    assert first.execute("ls", repository, check=False).returncode != 0
    code = f"import socket; print(socket.create_connection(('{second.address}', 22), timeout=2).recv(3))"
    assert "SSH" in first.execute("python3", "-c", code).stdout


def test_a_reboot_ends_every_process_and_keeps_the_files(rig: Rig) -> None:
    node = rig.nodes[0]
    before, key = node.boot_id(), node.host_key()
    node.execute(
        "sh", "-c", "echo kept > /etc/mark; echo kept > /var/lib/fairway-node/mark; echo gone > /run/mark"
    )
    node.execute("sh", "-c", "sleep 4321 > /dev/null 2>&1 &")
    assert node.execute("pgrep", "-f", "sleep 4321").stdout
    node.reboot()
    assert node.boot_id() != before
    assert node.host_key() == key
    assert node.execute("cat", "/etc/mark", "/var/lib/fairway-node/mark").stdout == "kept\nkept\n"
    assert node.execute("cat", "/run/mark", check=False).returncode != 0
    assert node.execute("pgrep", "-f", "sleep 4321", check=False).returncode != 0
    assert answers(node.address)


def test_network_faults_are_applied_and_removed(rig: Rig) -> None:
    first, second = rig.nodes
    first.cut()
    assert not answers(first.address)
    assert answers(second.address)
    first.heal()
    assert answers(first.address)
    with socket.create_connection((first.address, 22), timeout=1) as old:
        old.recv(200)
        first.half_open()
        old.settimeout(0.5)
        old.sendall(b"SSH-2.0-test\r\n")
        with pytest.raises(TimeoutError):
            old.recv(1)
        assert answers(first.address)
    first.heal()
    first.refuse_ssh()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((first.address, 22), timeout=1)
    first.heal()
    first.stop_sshd()
    assert not answers(first.address)
    first.start_sshd()
    assert answers(first.address)


def test_a_full_disk_is_full_and_can_be_freed(rig: Rig) -> None:
    node = rig.nodes[0]
    node.fill_disk()
    assert node.execute("sh", "-c", "echo x > /var/lib/fairway-node/x", check=False).returncode != 0
    node.free_disk()
    node.execute("sh", "-c", "echo x > /var/lib/fairway-node/x")


def test_containers_run_beside_each_other_on_two_nodes(image: RigImage) -> None:
    reason = missing_for_rig()
    if reason is not None:
        pytest.skip(reason)
    with Rig(2, image_stores=[[image.store], []]) as rig:
        first, second = rig.nodes
        flags = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
        said = first.podman("run", "--rm", *flags, image.name, "python3", "-c", "print('inside')")
        assert said == "inside\n"
        assert image.name not in second.podman("images", "--format", "{{.Repository}}:{{.Tag}}")


def test_a_killed_run_is_cleaned_by_the_next(tmp_path: Path) -> None:
    code = "from tests.rig.rig import Rig; import time; print(Rig(1).up().record.run, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    run = child.stdout.readline().strip()
    assert traces(run)
    child.kill()
    child.wait(5)
    with Rig(1) as rig:
        assert rig.record is not None
        assert not traces(run)
        assert traces(rig.record.run)
        last = rig.record.run
    assert not traces(last)
    assert not (records.BASE / last).exists()
    assert not (records.BASE / run).exists()


def test_the_weather_of_a_wire(rig: Rig) -> None:
    with FaultyLinkProxy(rig.nodes[0].address, 22, LinkConditions(delay_s=0.2)) as proxy:
        began_s = time.monotonic()
        assert answers(proxy.host, proxy.port)
        assert time.monotonic() - began_s >= 0.2
        proxy.weather.frozen = True
        assert not answers(proxy.host, proxy.port)
        proxy.weather.frozen = False
        proxy.weather.cut_after_bytes = 10
        with socket.create_connection((proxy.host, proxy.port), timeout=2) as connection:
            received = b""
            with pytest.raises(ConnectionError):
                while True:
                    piece = connection.recv(100)
                    if not piece:
                        raise ConnectionResetError
                    received += piece
