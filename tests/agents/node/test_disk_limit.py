"""What a task writes to the node's disk outside its volumes is counted, and a task above its limit is ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agents.link import Link
from agents.node.runtimes import arguments
from agents.node.storage import disk_usage
from agents.node.storage.disk_usage import measure_disk_usage
from tests.agents.node.conftest import LoneNode, log_with, wait_for
from tests.agents.node.test_arguments import DOCKER, PODMAN, SPEC, order

MIB = 1024 * 1024
LIMIT_MIB = 24
ENDS_WITHIN_S = 45.0
FILL = "head -c 41943040 /dev/urandom > {path}; echo written; sleep 600"  # 40 MiB
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give tasks an account of their own")


def start(link: Link, node: LoneNode, job: str, script: str, **more: object) -> None:
    spec = node.spec(job, "sh", "-c", script, **{"disk_mib": LIMIT_MIB, "memory_mib": 256, **more})
    link.request("start", timeout_s=30, epoch=1, spec=spec)


def end_of(link: Link, job: str) -> tuple[str | None, int | None, int | None]:
    event = wait_for(link, "exited", ENDS_WITHIN_S, job=job)
    assert event["exit_code"] != 0
    return event["fault"], event["disk_mib"], event["disk_used_mib"]


# -- counting, without a task ------------------------------------------------------------------------


def test_blocks_are_counted_and_not_lengths_names_or_links(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(os.urandom(4 * MIB))
    os.link(tmp_path / "real", tmp_path / "second-name")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(4096 * MIB)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(os.urandom(8 * MIB))
    (tmp_path / "link").symlink_to(outside)
    os.sync()
    found = measure_disk_usage([str(tmp_path), str(tmp_path / "missing"), str(outside)])
    assert found.complete
    assert 4 * MIB <= found.used_bytes[0] < 5 * MIB
    assert found.used_bytes[1] == 0
    assert found.used_bytes[2] >= 8 * MIB


def test_paths_that_are_too_long_to_be_opened_leave_the_count_incomplete(tmp_path: Path) -> None:
    deep = (
        "import os\n"
        "for _ in range(30):\n"
        "    os.mkdir('d' * 250)\n"
        "    os.chdir('d' * 250)\n"
        "open('hidden', 'wb').write(os.urandom(1 << 20))\n"
    )
    subprocess.run([sys.executable, "-c", deep], cwd=tmp_path, check=True)
    try:
        assert not measure_disk_usage([str(tmp_path)]).complete
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / ("d" * 250))], check=True)


def test_more_files_than_are_counted_leave_the_count_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_usage, "MAX_ENTRIES", 10)
    for number in range(12):
        (tmp_path / str(number)).touch()
    assert not measure_disk_usage([str(tmp_path)]).complete


def test_an_unreadable_path_does_not_count_as_empty(tmp_path: Path) -> None:
    program = (
        f"import os, sys; sys.path.insert(0, {os.getcwd()!r});"
        "from agents.node.storage.disk_usage import measure_disk_usage;"
        f"os.geteuid() or os.seteuid(65534); measure_disk_usage([{str(tmp_path)!r}])"
    )
    tmp_path.chmod(0o000)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "PermissionError" in done.stderr


@pytest.mark.parametrize("engine", [PODMAN, DOCKER])
def test_the_engine_gets_the_limit_where_its_file_system_supports_it(
    engine: arguments.EngineOptions,
) -> None:
    task = order(SPEC | {"disk_mib": 2048, "runtime": engine.kind})
    able = arguments.create(engine._replace(limits_layers=True), task, "I", ())
    assert able[able.index("--storage-opt") + 1] == "size=2048m"
    assert "--storage-opt" not in arguments.create(engine, task, "I", ())
    without = order(SPEC | {"runtime": engine.kind})
    assert "--storage-opt" not in arguments.create(engine._replace(limits_layers=True), without, "I", ())


# -- plain processes ---------------------------------------------------------------------------------


def test_a_process_that_fills_its_temporary_folder_is_ended(node: LoneNode) -> None:
    link = node.open()
    start(link, node, "jquiet", "head -c 8388608 /dev/urandom > $TMPDIR/f; echo written; sleep 600")
    start(link, node, "jfull", FILL.format(path="$TMPDIR/f"))
    fault, limit_mib, used_mib = end_of(link, "jfull")
    assert (fault, limit_mib) == ("disk_limit_exceeded", LIMIT_MIB)
    assert used_mib is not None and LIMIT_MIB < used_mib <= 41
    rows = {row["job"]: row for row in link.request("list", timeout_s=10)["containers"]}
    assert rows["jquiet"]["state"] == "running"  # it wrote, and stayed below its limit
    assert (rows["jfull"]["fault"], rows["jfull"]["disk_used_mib"]) == ("disk_limit_exceeded", used_mib)


def test_a_process_without_a_limit_continues(node: LoneNode) -> None:
    link = node.open()
    start(link, node, "jfree", FILL.format(path="$TMPDIR/f"), disk_mib=None)
    start(link, node, "jfull", FILL.format(path="$TMPDIR/f"))
    assert end_of(link, "jfull")[0] == "disk_limit_exceeded"
    rows = {row["job"]: row for row in link.request("list", timeout_s=10)["containers"]}
    assert rows["jfree"]["state"] == "running"


@needs_root
def test_a_process_that_keeps_removed_files_open_is_stopped(node: LoneNode) -> None:
    link = node.open()
    script = (
        "exec 3> $TMPDIR/f; rm $TMPDIR/f; head -c 41943040 /dev/urandom >&3; echo written; exec sleep 600"
    )
    start(link, node, "jheld", script)
    assert end_of(link, "jheld")[0] == "disk_limit_exceeded"


def test_a_home_counts_by_what_the_task_added_to_it(node: LoneNode) -> None:
    link, home = node.open(), [{"kind": "home", "source": "ada", "target": "/home/ada"}]
    start(link, node, "jbefore", FILL.format(path="~/before"), mounts=home, disk_mib=None)
    log_with(link, "jbefore", "written")
    link.request("stop", timeout_s=30, epoch=1, job="jbefore", attempt=1, grace_s=0)
    script = "while [ ! -e ~/go ]; do sleep 0.2; done; " + FILL.format(path="~/after")
    start(link, node, "jafter", script, mounts=home)
    time.sleep(3)  # long enough for its first count; the second one is due ten seconds later
    rows = {row["job"]: row for row in link.request("list", timeout_s=10)["containers"]}
    assert rows["jafter"]["state"] == "running"
    (node.folder / "homes/ada/go").touch()
    fault, _, used_mib = end_of(link, "jafter")
    assert fault == "disk_limit_exceeded"
    assert used_mib is not None and used_mib <= 41  # without what was there before


@needs_root
@pytest.mark.parametrize("below", ["/srv", "/tmp", "/var/tmp"])
def test_both_temporary_folders_of_a_process_are_its_own_and_count(node: LoneNode, below: str) -> None:
    """Also where the folders of the node are below one of them, and named through a link."""
    made = Path(tempfile.mkdtemp(prefix="fairway-test-", dir=below))
    node.clean_up.append(lambda: shutil.rmtree(made))
    made.chmod(0o711)
    (made / "shared").mkdir()
    (made / "shared").chmod(0o777)
    (made / "data").mkdir()
    (made / "link").symlink_to("data")
    node.configure(state_dir=str(made / "link/state"), home_root=str(made / "link/homes"))
    filled = "/tmp" if below == "/srv" else below
    own = f"{made.name}-own"
    script = f"touch /tmp/{own}-a /var/tmp/{own}-b ~/kept $FAIRWAY_CHECKPOINT_FILE && echo done; ls $TMPDIR; "
    script += f"test -e {made}/shared && echo seen; "
    home = [{"kind": "home", "source": "ada", "target": "/home/ada"}]
    link = node.open()
    start(link, node, "jown", script + FILL.format(path=f"{filled}/{own}-f"), mounts=home)
    log = log_with(link, "jown", "written\n")
    assert "done\n" in log and f"{own}-a\n{own}-b\n" in log
    assert below == "/srv" or "seen" not in log, "other folders of the machine would not be counted"
    assert (made / "data/homes/ada/kept").exists()
    assert not Path(f"/tmp/{own}-a").exists() and not Path(f"/var/tmp/{own}-b").exists()
    fault, _, used_mib = end_of(link, "jown")
    assert fault == "disk_limit_exceeded"
    assert used_mib is not None and LIMIT_MIB < used_mib <= 41


# -- containers --------------------------------------------------------------------------------------


@pytest.mark.rig
@pytest.mark.parametrize("path", ["/tmp/f", "/var/f", "$FAIRWAY_PROGRESS_FILE"])
def test_a_container_that_writes_too_much_outside_its_volumes_is_ended(
    podman_node: LoneNode, path: str
) -> None:
    node, link = podman_node, podman_node.open()
    image = {"runtime": "podman", "image": node.image}  # type: ignore[attr-defined]
    where = path if path != "/var/f" else "/var/tmp/f"
    start(link, node, "jfull", FILL.format(path=where), **image)
    fault, limit_mib, used_mib = end_of(link, "jfull")
    assert (fault, limit_mib) == ("disk_limit_exceeded", LIMIT_MIB)
    assert used_mib is not None and used_mib > LIMIT_MIB


@pytest.mark.rig
def test_a_container_that_keeps_a_removed_file_open_is_stopped_and_its_volumes_do_not_count(
    podman_node: LoneNode,
) -> None:
    node, link = podman_node, podman_node.open()
    image = {"runtime": "podman", "image": node.image}  # type: ignore[attr-defined]
    home = [{"kind": "home", "source": "ada", "target": "/home/ada"}]
    start(link, node, "jhome", FILL.format(path="/home/ada/f"), mounts=home, **image)
    log_with(link, "jhome", "written")
    script = "exec 3> /tmp/f; rm /tmp/f; head -c 41943040 /dev/urandom >&3; echo written; exec sleep 600"
    start(link, node, "jheld", script, **image)
    assert end_of(link, "jheld")[0] == "disk_limit_exceeded"
    rows = {row["job"]: row for row in link.request("list", timeout_s=10)["containers"]}
    assert rows["jhome"]["state"] == "running"
