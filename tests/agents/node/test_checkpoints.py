"""The checkpoints of a job on its node: which are recognized, which are complete, and which are removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import CheckpointList
from agents.link import AgentError
from agents.node.storage import checkpoints
from tests.agents.node.conftest import CLUSTER, LoneNode, log_with
from tests.agents.node.test_process import needs_root, start

HOME = {"kind": "home", "source": "ada", "target": "/home/ada", "read_only": False}
PLACE = {"mount": HOME, "path": "checkpoints/j1", "uid": 2001, "gid": 2001}


def write_torch(path: Path, *, content: int = 5000) -> None:
    """The layout of ``torch.save`` since 1.6: an uncompressed zip."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", b"\1" * content)


def write_keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", hdf5())


def hdf5(version: int = 0, size: int = 2048) -> bytes:
    """An HDF5 file of a superblock, which states the end of the file, and padding."""
    address = size.to_bytes(8, "little")
    if version == 0:
        block = b"\x89HDF\r\n\x1a\n" + bytes(5) + b"\x08\x08\0" + bytes(8) + bytes(8) + b"\xff" * 8 + address
    else:
        block = b"\x89HDF\r\n\x1a\n" + bytes([version, 8, 8, 0]) + bytes(8) + b"\xff" * 8 + address
    return block + bytes(size - len(block))


def write_safetensors(path: Path, *, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    path.write_bytes(whole[: len(whole) - cut])


def write_hugging_face(folder: Path, step: int = 500) -> None:
    folder.mkdir()
    write_safetensors(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt"):
        write_torch(folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))


def cut(path: Path, share: float = 0.5) -> None:
    with path.open("r+b") as stream:
        stream.truncate(int(path.stat().st_size * share))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed() -> dict[str, tuple[int | None, str]]:
    return {row.name: (row.step, row.validity) for row in checkpoints.list_checkpoints()}


LAYOUTS: dict[str, tuple[str, int | None, Callable[[Path], None], Callable[[Path], None]]] = {
    "torch": ("model_step_1200.pt", 1200, write_torch, cut),
    "torch, empty": ("last.pth", None, write_torch, lambda path: path.write_bytes(b"") and None),
    "Lightning": ("epoch=3-step=1200.ckpt", 1200, write_torch, lambda path: cut(path, 0.99)),
    "Keras": ("model-07.keras", 7, write_keras, cut),
    "Keras weights": ("12.weights.h5", 12, lambda path: path.write_bytes(hdf5()) and None, cut),
    "Keras weights, HDF5 1.10": ("12.weights.h5", 12, lambda path: path.write_bytes(hdf5(3)) and None, cut),
    "Hugging Face": (
        "checkpoint-500", 500, write_hugging_face, lambda path: (path / "trainer_state.json").unlink(),
    ),
    "Hugging Face, state cut off": (
        "checkpoint-500", 500, write_hugging_face, lambda path: cut(path / "trainer_state.json"),
    ),
    "Hugging Face, weights cut off": (
        "checkpoint-500", 500, write_hugging_face, lambda path: cut(path / "model.safetensors", 0.9),
    ),
    "Hugging Face, optimizer cut off": (
        "checkpoint-500", 500, write_hugging_face, lambda path: cut(path / "optimizer.pt"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("framework", LAYOUTS)
def test_a_complete_checkpoint_is_valid_and_one_cut_off_is_broken(folder: Path, framework: str) -> None:
    name, step, write, damage = LAYOUTS[framework]
    write(folder / name)
    assert listed() == {name: (step, "valid")}
    damage(folder / name)
    (row,) = checkpoints.list_checkpoints()
    assert row.validity == "broken" and row.problem


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_torch_file_cut_off_anywhere_is_broken(folder: Path, share: float) -> None:
    write_torch(folder / "step-1.pt")
    cut(folder / "step-1.pt", share)
    assert [row.validity for row in checkpoints.list_checkpoints()] == ["broken"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=1200-v1.ckpt", 1200), ("checkpoint-500", 500), ("ckpt_000040.pt", 40), ("step10", 10),
        ("model.3.keras", 3), ("iter_0000020", 20), ("best.pt", None), ("7", 7),
    ],
)  # fmt: skip
def test_the_step_is_read_from_the_name(name: str, step: int | None) -> None:
    assert checkpoints.step_of(name) == step


@pytest.mark.parametrize(
    "name",
    [".hidden.pt", "model.pt.tmp", "tmp-checkpoint-5", "notes.txt", "log", "step-1.pt.part", "a\nb.pt"],
)
def test_unfinished_and_other_files_are_not_checkpoints(folder: Path, name: str) -> None:
    write_torch(folder / name)
    assert listed() == {}


def test_a_marker_declares_any_format_complete(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "state" / "shard-0.bin").write_bytes(b"anything")
    (folder / "weights.npz").write_bytes(b"anything")
    (folder / "step-3").mkdir()
    (folder / "step-3" / "shard-0.bin").write_bytes(b"anything")
    assert listed() == {"step-3": (3, "unchecked")}
    for marker in ("state/.complete", "weights.npz.complete", "step-3/.complete"):
        (folder / marker).touch()
    assert listed() == {"state": (None, "valid"), "weights.npz": (None, "valid"), "step-3": (3, "valid")}
    (folder / "step-3" / "model.pt").write_bytes(b"PK\x03\x04")
    assert listed()["step-3"] == (3, "broken")


def test_a_distributed_checkpoint_is_valid_once_its_metadata_is_written(folder: Path) -> None:
    (folder / "step-3").mkdir()
    (folder / "step-3" / "__0_0.distcp").write_bytes(b"data")
    assert listed() == {"step-3": (3, "unchecked")}
    (folder / "step-3" / ".metadata").write_bytes(b"data")
    assert listed() == {"step-3": (3, "valid")}


def test_links_are_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_torch(elsewhere / "secret.pt")
    (folder / "step-1.pt").symlink_to(elsewhere / "secret.pt")
    (folder / "checkpoint-2").symlink_to(elsewhere)
    assert listed() == {}
    (folder / "step-3").mkdir()
    (folder / "step-3" / ".complete").touch()
    (folder / "step-3" / "model.pt").symlink_to(elsewhere / "secret.pt")
    (row,) = checkpoints.list_checkpoints()
    assert (row.name, row.validity, row.size_bytes < 200) == ("step-3", "valid", True)


def save_steps(folder: Path, *steps: int) -> dict[str, float]:
    """Checkpoints a second apart; return their times by name."""
    for step in steps:
        write_torch(folder / f"step-{step}.pt")
        os.utime(folder / f"step-{step}.pt", (1_700_000_000 + step, 1_700_000_000 + step))
    return {row.name: row.saved_s for row in checkpoints.list_checkpoints()}


def test_removal_spares_the_newest_valid_one_and_those_written_again(folder: Path) -> None:
    saved = save_steps(folder, 1, 2, 3, 4)
    cut(folder / "step-4.pt")
    os.utime(folder / "step-4.pt", (1_700_000_004, 1_700_000_004))
    os.utime(folder / "step-1.pt")  # written again, so it is the newest
    saved_again = {row.name: row.saved_s for row in checkpoints.list_checkpoints()}
    checkpoints.remove_checkpoints([[name, at] for name, at in saved.items()])
    assert set(listed()) == {"step-1.pt"}
    checkpoints.remove_checkpoints([["step-1.pt", saved_again["step-1.pt"]]])
    assert listed() == {"step-1.pt": (1, "valid")}


def test_nothing_is_removed_while_no_checkpoint_is_valid(folder: Path) -> None:
    saved = save_steps(folder, 1, 2)
    for step in (1, 2):
        cut(folder / f"step-{step}.pt")
        os.utime(folder / f"step-{step}.pt", (1_700_000_000 + step, 1_700_000_000 + step))
    checkpoints.remove_checkpoints([[name, at] for name, at in saved.items()])
    assert set(listed()) == {"step-1.pt", "step-2.pt"}


def test_an_interrupted_removal_is_completed_and_never_listed(folder: Path) -> None:
    saved = save_steps(folder, 5)
    write_hugging_face(folder / "checkpoint-1", 1)
    (folder / "checkpoint-1").rename(folder / ".deleted-checkpoint-1")
    assert set(listed()) == set(saved)
    checkpoints.remove_checkpoints([["gone.pt", 1.0]])
    assert not (folder / ".deleted-checkpoint-1").exists()


# -- the verb, with a real agent -----------------------------------------------------------------------


@pytest.fixture
def engine(node: LoneNode) -> Iterator[NodeEngine]:
    made = NodeEngine.local(node.pyz, node.settings_path, cluster=CLUSTER)
    yield made
    made.close()


def request_list(
    engine: NodeEngine, epoch: int, place: dict[str, object], remove: Sequence[tuple[str, float]] = ()
) -> CheckpointList:
    fields = {**place, "epoch": epoch, "remove": remove}
    return engine.request(verbs.CHECKPOINTS, CheckpointList.from_wire, **fields)


def home(node: LoneNode) -> Path:
    found = node.folder / "homes" / "ada" / "checkpoints" / "j1"
    found.mkdir(parents=True, exist_ok=True)
    return found


def own(node: LoneNode, uid: int = 2001) -> None:
    for folder, _, files in os.walk(node.folder / "homes" / "ada"):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            os.chown(path, uid, uid)


@needs_root
def test_the_agent_lists_and_removes_with_the_rights_of_the_owner(node: LoneNode, engine: NodeEngine) -> None:
    assert engine.supports(verbs.CHECKPOINTS)
    assert request_list(engine, 1, PLACE).checkpoints == ()
    for step in (1, 2, 3):
        write_torch(home(node) / f"step-{step}.pt")
        os.utime(home(node) / f"step-{step}.pt", (1_700_000_000 + step, 1_700_000_000 + step))
    own(node)
    rows = request_list(engine, 1, PLACE).checkpoints
    assert [(row.name, row.step, row.validity) for row in rows] == [
        ("step-3.pt", 3, "valid"), ("step-2.pt", 2, "valid"), ("step-1.pt", 1, "valid"),
    ]  # fmt: skip
    left = request_list(engine, 1, PLACE, [(row.name, row.saved_s) for row in rows]).checkpoints
    assert [row.name for row in left] == ["step-3.pt"]


@needs_root
def test_the_agent_never_reads_files_of_other_users(node: LoneNode, engine: NodeEngine) -> None:
    others = node.folder / "others"
    others.mkdir(mode=0o700)
    write_torch(others / "step-1.pt")
    (node.folder / "homes" / "ada" / "checkpoints").mkdir(parents=True)
    (node.folder / "homes" / "ada" / "checkpoints" / "j1").symlink_to(others)
    own(node)
    answer = request_list(engine, 1, PLACE, [("step-1.pt", (others / "step-1.pt").stat().st_mtime)])
    assert answer.checkpoints == () and "Symbolic links are not followed" in answer.problem
    assert (others / "step-1.pt").exists()
    for path in ("../bob/checkpoints/j1", "/etc", "checkpoints//j1", ""):
        with pytest.raises(AgentError) as refusal:
            request_list(engine, 1, {**PLACE, "path": path})
        assert refusal.value.code == "invalid_spec"
    scratch = {"kind": "scratch", "source": "s", "target": "/s", "read_only": False}
    with pytest.raises(AgentError, match="scratch"):
        request_list(engine, 1, {**PLACE, "mount": scratch})


@needs_root
def test_files_of_other_accounts_can_be_left_out(node: LoneNode, engine: NodeEngine) -> None:
    """A member of a project could put one into a folder that is open to it; a job would resume from it."""
    write_torch(home(node) / "step-1.pt")
    own(node)
    write_torch(home(node) / "step-2.pt")
    os.chown(home(node) / "step-2.pt", 2002, 2002)
    (home(node) / "checkpoint-3").mkdir()
    os.chown(home(node) / "checkpoint-3", 2002, 2002)
    assert engine.supports(verbs.CAN_LIST_OWN_CHECKPOINTS)
    names = {row.name for row in request_list(engine, 1, PLACE).checkpoints}
    assert names == {"step-1.pt", "step-2.pt", "checkpoint-3"}
    own_names = [row.name for row in request_list(engine, 1, {**PLACE, "own_only": True}).checkpoints]
    assert own_names == ["step-1.pt"]


@needs_root
def test_an_older_epoch_removes_nothing(node: LoneNode, engine: NodeEngine) -> None:
    write_torch(home(node) / "step-1.pt")
    own(node)
    engine.stop(7, "jnone", 1, grace_s=0)
    with pytest.raises(AgentError) as refusal:
        request_list(engine, 6, PLACE)
    assert refusal.value.code == "stale_epoch"


@needs_root
def test_a_folder_of_thousands_of_entries_is_listed_within_bounds(node: LoneNode, engine: NodeEngine) -> None:
    folder = home(node)
    for number in range(1200):
        (folder / f"step-{number}.pt").write_bytes(b"PK\x03\x04")
    own(node)
    assert len(request_list(engine, 1, PLACE).checkpoints) == checkpoints.MAX_LISTED


@needs_root
def test_a_task_gets_its_directory_and_where_to_resume(node: LoneNode) -> None:
    link = node.open()
    script = 'echo "at $FAIRWAY_CHECKPOINT_DIR from ${FAIRWAY_RESUME_FROM-nothing} in $HOME"'
    place = {"target": "/home/ada", "path": "checkpoints/jvars"}
    spec = node.spec("jvars", "sh", "-c", script, mounts=[HOME], checkpoint_dir=place)
    start(link, spec)
    at = f"{node.folder}/homes/ada"
    assert log_with(link, "jvars", "at ").strip() == f"at {at}/checkpoints/jvars from nothing in {at}"
    resumed = {"target": "/home/ada", "path": "checkpoints/jold/step-3.pt"}
    start(link, spec | {"job": "jnext", "resume_from": resumed})
    assert f"from {at}/checkpoints/jold/step-3.pt in" in log_with(link, "jnext", "at ")


@needs_root
def test_a_checkpoint_cut_off_by_a_full_disk_is_broken_and_the_list_works(node: LoneNode) -> None:
    homes = node.folder / "homes"
    homes.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=711", "tmpfs", str(homes)], check=True)
    node.clean_up.append(lambda: subprocess.run(["umount", "-l", str(homes)], check=True) and None)
    node.configure(min_free_disk_mib=0)
    engine = NodeEngine.local(node.pyz, node.settings_path, cluster=CLUSTER)
    link = node.open()
    script = (
        "import os, zipfile\n"
        "folder = os.environ['FAIRWAY_CHECKPOINT_DIR']; os.makedirs(folder, exist_ok=True)\n"
        "for step in range(1, 9):\n"
        "    try:\n"
        "        with zipfile.ZipFile(f'{folder}/step-{step}.pt', 'w') as archive:\n"
        "            archive.writestr('data', os.urandom(600_000))\n"
        "    except OSError as error: print('full', step, error.errno, flush=True); break\n"
        "import time; time.sleep(600)"
    )
    place = {"target": "/home/ada", "path": "checkpoints/j1"}
    start(link, node.spec("j1", "python3", "-c", script, mounts=[HOME], checkpoint_dir=place))
    assert log_with(link, "j1", "full").split()[:3] == ["full", "4", "28"]
    validity = {row.step: row.validity for row in request_list(engine, 1, PLACE).checkpoints}
    assert validity == {1: "valid", 2: "valid", 3: "valid", 4: "broken"}
    rows = [
        (row.name, row.saved_s) for row in request_list(engine, 1, PLACE).checkpoints if row.step in (1, 4)
    ]
    assert {row.step for row in request_list(engine, 1, PLACE, rows).checkpoints} == {2, 3}
    engine.close()
    shutil.rmtree(homes / "ada", ignore_errors=True)
